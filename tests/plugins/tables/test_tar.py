"""Tar files as WebDataset writes them: read like the library reads them, by number, and never less than all of one."""

import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import opened_data
import pytest
import soundfile
import webdataset
from hdf_files import free_descriptors

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.formats import items
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.dump import main as dump
from hvdtrain.plugins.hdf_tools.sources import open_source
from hvdtrain.plugins.tables import tar as tar_files

LENGTHS = (3, 5, 2, 7, 1, 4, 6)


def opened(files: Any, **options: Any) -> Dataset:
    return opened_data.opened({"class": "TarDataset", "files": files, **options})


def npy(array: numpy.ndarray) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, array)
    return stream.getvalue()


def frames(number: int) -> numpy.ndarray:
    return numpy.random.default_rng(number).normal(size=(LENGTHS[number], 4)).astype(numpy.float32)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three shards written by WebDataset: arrays, numbers, texts, JSON and sound."""
    folder = tmp_path_factory.mktemp("shards")
    with webdataset.ShardWriter(f"{folder}/train-%03d.tar", maxcount=3, verbose=0) as writer:
        for number, length in enumerate(LENGTHS):
            sound = io.BytesIO()
            soundfile.write(sound, numpy.arange(length * 10) / 100, 8000, format="WAV", subtype="FLOAT")
            writer.write(
                {
                    "__key__": f"speaker/utt-ä{number}",
                    "npy": frames(number),
                    "cls": number % 5,
                    "text.txt": "ab" * length,
                    "json": list(range(length)),
                    "wav": sound.getvalue(),
                }
            )
    return sorted(map(str, folder.glob("*.tar")))


def test_samples_are_those_that_webdataset_reads(shards: list[str]) -> None:
    entries = {"data": "npy", "classes": ".cls", "numbers": "json"}
    dataset = opened(str(Path(shards[0]).parent / "train-{000..002}.tar"), entries=entries)
    expected = list(webdataset.WebDataset(shards, shardshuffle=False).decode())
    assert dataset.num_sequences == len(expected) == 7
    assert dataset.tags(range(7)) == [sample["__key__"] for sample in expected]
    assert dataset.tag_bytes(2, 4).tolist() == [sample["__key__"].encode() for sample in expected[2:4]]
    assert dataset.file_bounds().tolist() == [0, 3, 6, 7]
    for number, sample in enumerate(expected):
        arrays = dataset.sequence(number)
        assert numpy.array_equal(arrays["data"], sample["npy"])
        assert arrays["data"].dtype == numpy.float32
        assert arrays["classes"].tolist() == [sample["cls"]]
        assert arrays["numbers"].tolist() == sample["json"]
    assert dataset.lengths["data"].tolist() == list(LENGTHS)
    assert (dataset.streams["data"].shape, dataset.streams["classes"].dim, dataset.streams["numbers"].dim) == ((4,), 5, 7)


def test_lengths_come_from_headers_if_that_is_enough(shards: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(items, "find_lengths", lambda *_, **more: pytest.fail("all items were read"))
    dataset = opened(shards, entries={"data": "npy", "classes": "cls"})
    assert {key: column.tolist() for key, column in dataset.lengths.items()} == {"data": list(LENGTHS), "classes": [1] * 7}
    assert dataset.streams["classes"].dim == 5


def test_the_index_is_kept(shards: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    original = tar_files.read_index

    def note(path: str, entries: Any) -> Any:
        read.append(path)
        return original(path, entries)

    monkeypatch.setattr(tar_files, "read_index", note)
    value = {"class": "TarDataset", "files": shards, "entries": {"data": "npy", "classes": "cls"}}

    def open_on(rank: int) -> Dataset:
        read.clear()
        return opened_data.opened(value, scanning=Scanning(tmp_path / "lengths", rank, 3))

    first = open_on(1)
    assert read == [*shards[1:], shards[0]]
    second = open_on(2)
    assert read == []
    for dataset in (first, second):
        assert dataset.tags(range(7)) == [f"speaker/utt-ä{number}" for number in range(7)]
        assert {key: column.tolist() for key, column in dataset.lengths.items()} == {"data": list(LENGTHS), "classes": [1] * 7}
        assert numpy.array_equal(dataset.sequence(6)["data"], frames(6))
        assert dataset.streams["classes"].dim == 5
    for path in (tmp_path / "lengths").glob("*.tar.index"):
        path.write_bytes(path.read_bytes()[:-40])
    assert open_on(0).lengths["data"].tolist() == list(LENGTHS)
    assert read == shards
    os.utime(shards[1])
    open_on(0)
    assert read == [shards[1]]


def test_texts_sounds_and_formats_of_the_config(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("b\na\n")
    entries = {"data": "wav", "classes": "text.txt", "half": "npy"}

    def halves(content: bytes) -> numpy.ndarray:
        return numpy.load(io.BytesIO(content))[:, :2]

    options = {"entries": entries, "vocabulary": {"classes": str(tmp_path / "letters")}, "decode": {"half": halves}}
    dataset = opened(shards[:1], **options)
    arrays = dataset.sequence(1)
    assert numpy.allclose(arrays["data"][:, 0], numpy.arange(50) / 100)
    assert arrays["classes"].tolist() == [1, 0] * 5
    assert dataset.streams["classes"].labels == ("b", "a")
    assert numpy.array_equal(arrays["half"], frames(1)[:, :2])

    def fails(content: bytes) -> None:
        raise KeyError("planted")

    with pytest.raises(KeyError, match="planted") as caught:
        opened(shards[:1], **{**options, "decode": {"half": fails}})
    assert re.search(r"\(in decode\['half'\] of .*train-000.tar, speaker/utt-ä0.npy\)", "".join(caught.value.__notes__))


def test_links_are_the_files_that_they_lead_to(tmp_path: Path) -> None:
    def link(name: str, target: str, kind: bytes) -> None:
        member = tarfile.TarInfo(name)
        member.type, member.linkname = kind, target
        tar.addfile(member)

    for target, error in (("../x/b.npy", ""), ("none.npy", "expected a file of the archive before the link 'y/c.npy' to it")):
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            member = tarfile.TarInfo("./x/a.npy")
            member.size = len(npy(frames(0)))
            tar.addfile(member, io.BytesIO(npy(frames(0))))
            link("x/b.npy", "x/a.npy", tarfile.LNKTYPE)
            link("y/c.npy", target, tarfile.SYMTYPE)
            link("y/c.json", "none.json", tarfile.SYMTYPE)  # which nobody reads, as the next one
            link("y/notes.pdf", "none.pdf", tarfile.SYMTYPE)
        if error:
            with pytest.raises(DataError, match=error):
                opened(str(tmp_path / "a.tar"))
            continue
        dataset = opened(str(tmp_path / "a.tar"))
        assert dataset.tags(range(3)) == ["./x/a", "x/b", "y/c"]
        assert all(numpy.array_equal(dataset.sequence(number)["npy"], frames(0)) for number in range(3))


def test_a_vocabulary_that_does_not_fit_is_in_the_log(shards: list[str], tmp_path: Path) -> None:
    (tmp_path / "letters").write_text("<unk>\nA\nB\n")
    options = {"entries": {"data": "npy", "classes": "text.txt"}, "vocabulary": {"classes": str(tmp_path / "letters")}}
    [line] = opened(shards, **options).warnings()
    assert re.match(r"'classes': (\d+) of the \1 units of its first texts are not in ", line)


def test_it_is_converted_in_the_order_of_its_keys(shards: list[str], tmp_path: Path) -> None:
    read: list[int] = []

    def decode(content: bytes) -> numpy.ndarray:
        read.append(len(content))
        return numpy.load(io.BytesIO(content)) + numpy.random.rand()

    once = {"class": "TarDataset", "files": shards, "entries": {"data": "npy"}, "decode": {"data": decode}}
    spec, _ = parse("train", once, {})
    assert spec is not None
    source = open_source(spec, 1)
    found = [float(arrays["data"][0, 0]) for _, arrays in source.read(0, None)]
    assert len(read) == 7
    dataset = opened_data.opened(once)
    assert found == [float(dataset.at_epoch(1).sequence(number)["data"][0, 0]) for number in range(7)]
    dataset.close()
    corpus = {"class": "TarDataset", "files": shards, "entries": {"data": "npy"}, "seq_ordering": "sorted"}
    assert dump([repr(corpus), str(tmp_path / "out.hdf")]) == 0
    assert opened_data.opened(str(tmp_path / "out.hdf")).lengths["data"].tolist() == sorted(LENGTHS)


def test_problems_of_the_dict_are_found_without_files() -> None:
    def problems(**options: Any) -> list[str]:
        return opened_data.problems_of({"class": "TarDataset", "files": "none-{0..3}.tar", **options})

    assert problems() == []
    assert problems(files="none-{3..0}.tar") == ["train.files: out-of-range"]
    assert problems(entries={"data": "npy"}, decode={"date": len}, vocabulary={"c": "a"}) == [
        "train.decode: unknown-value",
        "train.vocabulary: unknown-value",
    ]
    assert problems(decode={"data": "npy"}) == ["train.decode.data: wrong-type"]
    assert problems(units="letters") == ["train.units: unknown-value"]


# ------------------------------------------------------------------------------------------------ what may be wrong

GOOD = {"a.npy": npy(frames(0)), "a.cls": b"1", "b.npy": npy(frames(1)), "b.cls": b"2"}


def archive(files: Mapping[str, bytes], *more: tuple[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, content in (*files.items(), *more):
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "cut in a file": (lambda: archive(GOOD)[: 5 * 512 + 100], "expected a whole tar file, got a damaged one behind 'b.npy': "),
    "cut in a header": (
        lambda: archive(GOOD)[: 6 * 512 + 100],
        "expected a whole tar file, got a damaged one behind 'b.npy'|end mark",
    ),
    "cut behind a file": (
        lambda: archive(GOOD)[: 6 * 512],
        r"expected the end mark of a tar file behind 'b.npy', got the end of the file \(was it cut off\?\)",
    ),
    "damaged header": (
        lambda: archive(GOOD)[: 4 * 512 + 7] + b"xxxx" + archive(GOOD)[4 * 512 + 11 :],
        r"expected a header or the end mark behind 'a.cls', at byte 2048, got other bytes \(is it damaged\?\)",
    ),
    "two in one": (lambda: archive(GOOD) + archive(GOOD), "expected nothing behind the end mark at byte 4096, got more data"),
    "compressed": (
        lambda: gzip.compress(archive(GOOD)),
        r"expected a whole tar file, got a damaged one .* \(decompress it: files ",
    ),
    "no tar": (lambda: b"not a tar file" * 100, "expected a whole tar file, got a damaged one behind its beginning"),
    "empty": (lambda: b"", "expected a whole tar file, got a damaged one behind its beginning: empty file"),
    "no samples": (lambda: archive({}), "expected at least one sequence, got none in .*bad.tar"),
    "missing entry": (
        lambda: archive({**GOOD, "c.npy": b""}),
        "expected files with the suffixes npy, cls of every sample, got none with cls of 'c', which has npy",
    ),
    "twice": (lambda: archive({**GOOD, "b.CLS": b"2"}), "expected each file of a sample once, got 'b.CLS' again at byte 4608"),
    "apart": (
        lambda: archive(GOOD, ("a.npy", b""), ("a.cls", b"")),
        "expected the files of a sample one after the other, got sample 'a' again",
    ),
    "no number": (lambda: archive({**GOOD, "b.cls": b"two"}), "bad.tar, b.cls: expected an integer, got b'two'"),
    "short array": (
        lambda: archive({**GOOD, "b.npy": GOOD["b.npy"][:-9]}),
        "bad.tar, b.npy: expected a .npy file of numbers, got: ",
    ),
    "long array": (
        lambda: archive({**GOOD, "b.npy": GOOD["b.npy"] + b"?"}),
        "bad.tar, b.npy: expected a .npy file of 208 bytes, as its header says, got 209",
    ),
    "no array": (
        lambda: archive({**GOOD, "b.npy": b"two"}),
        "bad.tar, b.npy: expected a .npy file .* b'two'",
    ),
    "pickled array": (
        lambda: archive({**GOOD, "a.npy": npy(numpy.array([{}], dtype=object))}),
        "bad.tar, a.npy: expected a .npy file of numbers, got: Object arrays cannot be loaded",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_file_is_named_with_the_entry(tmp_path: Path, what: str) -> None:
    make, expected = BAD[what]
    (tmp_path / "bad.tar").write_bytes(make())
    (tmp_path / "good.tar").write_bytes(archive(GOOD))
    entries = {"data": "npy", "classes": "cls"}
    files = [str(tmp_path / "bad.tar")] if what in ("no samples", "pickled array") else sorted(map(str, tmp_path.glob("*.tar")))
    with pytest.raises(DataError, match=expected) as caught:
        opened(files, entries=entries)
    assert "bad.tar" in str(caught.value)
    if what in ("no number", "short array", "long array", "no array"):
        value = {"class": "TarDataset", "files": files, "entries": entries}
        dataset = opened_data.opened(value, scanning=Scanning(broken=BrokenSequences("train", 1)))
        assert dataset.tags(range(dataset.num_sequences)) == ["a", "a", "b"]


def test_a_missing_shard_and_unreadable_entries_are_named(tmp_path: Path, shards: list[str]) -> None:
    with pytest.raises(DataError, match=r"none.tar: expected a tar file, got: No such file or directory"):
        opened([shards[0], str(tmp_path / "none.tar")], entries={"data": "npy"})
    (tmp_path / "a.tar").write_bytes(archive({"a.pyd": b"", "a.npy": GOOD["a.npy"]}))
    with pytest.raises(
        DataError, match=r"train.entries: expected a suffix that ends in npy, json, .*, got 'pyd' for 'pyd' \(give a"
    ):
        opened(str(tmp_path / "a.tar"))
    with pytest.raises(DataError, match=r"train.vocabulary: expected a vocabulary for 'text', which has texts, got none"):
        opened(shards)
    (tmp_path / "b.tar").write_bytes(archive({"a.left.npy": b"", "a.left.cls": b""}))
    with pytest.raises(DataError, match=r'train: expected "entries", as two suffixes begin in the same way, got none'):
        opened(str(tmp_path / "b.tar"))


def test_more_archives_than_a_process_may_open(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.tar" for number in range(9)]
    for path in paths:
        path.write_bytes(archive(GOOD))
    dataset = opened(list(map(str, paths)), entries={"data": "npy"})
    with free_descriptors(4):
        assert all(numpy.array_equal(dataset.sequence(index)["data"], frames(index % 2)) for index in range(18))
    paths[0].unlink()
    with pytest.raises(DataError, match="0.tar: expected a tar file that can be read, got: No such file"):
        dataset.sequence(0)


def test_what_is_no_sample_is_left_out(tmp_path: Path) -> None:
    more = {"README": b"", "__meta__/info.json": json.dumps({}).encode(), **GOOD, ".hidden.npy": b""}
    (tmp_path / "a.tar").write_bytes(archive(more))
    dataset = opened(str(tmp_path / "a.tar"), entries={"data": "npy"})
    assert dataset.tags([0, 1]) == ["a", "b"]
