"""MetaDataset: joining datasets by tag, against a join through a dict."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
from opened_data import problems_of

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.types import Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine import meta as meta_module
from hvdtrain.plugins.combine.keys import MetaDatasetKeys
from hvdtrain.plugins.combine.meta import MetaDataset, TagIndex, hashes, open_meta
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


class Tagged(Dataset):
    """A dataset in memory: each sequence is its own number."""

    def __init__(self, tags: Sequence[str]) -> None:
        self.names = list(tags)
        self.closed = False
        self.streams = {"number": Stream(numpy.dtype(numpy.int32), (), len(tags), sparse=True)}
        self.lengths = {"number": numpy.arange(len(tags), dtype=numpy.int32) % 5}

    @property
    def num_sequences(self) -> int:
        return len(self.names)

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        return {"number": numpy.full(index % 5, index, dtype=numpy.int32)}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [self.names[index] for index in indices]

    def close(self) -> None:
        self.closed = True


def write(path: Path, tags: Sequence[str], key: str) -> Path:
    """An HDF file whose sequences say their own tag's length."""
    with HDFWriter(path, dims={"text": 1000, "data": 1000}) as writer:
        for number, tag in enumerate(tags):
            writer.add(tag, {key: numpy.full(number % 4 + 1, len(tag), dtype=numpy.int32)})
    return path


def names(count: int, seed: int) -> list[str]:
    """Different tags of different lengths, some beyond ASCII."""
    generator = numpy.random.default_rng(seed)
    return [f"{'é' * (number % 3)}corpus/{number}/{'x' * int(generator.integers(0, 30))}" for number in range(count)]


def keys(**options: Any) -> MetaDatasetKeys:
    return MetaDatasetKeys(**options)


@pytest.mark.parametrize("block", [7, 1 << 18])
@pytest.mark.parametrize("bits", [64, 3])
def test_join_of_a_permutation_is_that_of_a_dict(monkeypatch: pytest.MonkeyPatch, block: int, bits: int) -> None:
    mask = numpy.uint64((1 << bits) - 1)  # with 3 bits nearly all tags share their hash with others
    monkeypatch.setattr(meta_module, "hashes", lambda tags: hashes(tags) & mask)
    monkeypatch.setattr(meta_module, "TAGS_AT_ONCE", block)
    monkeypatch.setattr(meta_module.tag_blocks, "__defaults__", (block,))
    generator = numpy.random.default_rng(bits + block)
    control = names(200, seed=1)
    more = control + [f"more-{number}" for number in range(50)]
    other = [more[place] for place in generator.permutation(len(more))]
    found = TagIndex("control", Tagged(control)).positions_in("other", Tagged(other))
    place = {tag: number for number, tag in enumerate(other)}
    assert found is not None
    assert found.dtype == numpy.int32
    assert found.tolist() == [place[tag] for tag in control]


def test_the_same_order_needs_no_index() -> None:
    tags = names(100, seed=2)
    assert TagIndex("control", Tagged(tags)).positions_in("other", Tagged(tags)) is None


def test_hashes_do_not_depend_on_padding_and_differ() -> None:
    tags = [tag.encode() for tag in names(20_000, seed=3)]
    narrow = numpy.array(tags)
    assert len(set(hashes(narrow).tolist())) == len(tags)
    assert (hashes(narrow.astype("S200")) == hashes(narrow)).all()
    assert (hashes(narrow[5:9]) == hashes(narrow)[5:9]).all()


def test_missing_tags_are_counted_and_the_first_is_named() -> None:
    control = names(60, seed=4)
    other = [tag for number, tag in enumerate(control) if number not in (11, 30, 59)]
    with pytest.raises(DataError) as caught:
        TagIndex("train.datasets.a", Tagged(control)).positions_in("train.datasets.b", Tagged(other))
    assert str(caught.value) == (
        f"train.datasets.b: expected all 60 tags of train.datasets.a, got 57: 3 are missing, the first is {control[11]!r}"
    )


@pytest.mark.parametrize("block", [4, 1 << 18])
def test_a_tag_twice_is_an_error_on_either_side(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    monkeypatch.setattr(meta_module.tag_blocks, "__defaults__", (block,))
    tags = ["a", "b", "c", "d", "e", "f", "g"]
    with pytest.raises(DataError, match="^control: expected every tag once, got 'b' twice$"):
        TagIndex("control", Tagged([*tags, "b"]))
    index = TagIndex("control", Tagged(tags))
    for place in (0, 2, 7):
        other = [*tags[::-1]]
        other.insert(place, "d")
        with pytest.raises(DataError, match="^other: expected every tag once, got 'd' twice$"):
            index.positions_in("other", Tagged(other))


def test_hdf_files_in_any_order_joined_as_a_config_says(tmp_path: Path) -> None:
    control = names(50, seed=5)
    generator = numpy.random.default_rng(6)
    other = [control[place] for place in generator.permutation(50)]
    first = [write(tmp_path / "a.hdf", control[:20], "data"), write(tmp_path / "b.hdf", control[20:], "data")]
    second = write(tmp_path / "c.hdf", [*other, "one more"], "text")
    value = {
        "class": "MetaDataset",
        "datasets": {
            "sound": {
                "class": "HDFDataset",
                "files": [str(path) for path in first],
                "seq_ordering": "random",
                "partition_epoch": 2,
            },
            "words": {"class": "HDFDataset", "files": str(second)},
        },
        "data_map": {"data": ("sound", "data"), "classes": ("words", "text")},
        "seq_order_control_dataset": "sound",
    }
    spec, found = parse("train", value, {})
    assert spec is not None, found
    assert (spec.order.seq_ordering, spec.order.partition_epoch) == ("random", 2)  # the control dataset's
    dataset = open_dataset(spec)
    assert isinstance(dataset, MetaDataset)
    assert (dataset.num_sequences, list(dataset.streams)) == (50, ["data", "classes"])
    assert dataset.tags([3, 40, 3]) == [control[3], control[40], control[3]]
    place = {tag: number for number, tag in enumerate(other)}
    for index, tag in enumerate(control):
        arrays = dataset.sequence(index)
        start = 0 if index < 20 else 20
        assert arrays["data"].tolist() == ((index - start) % 4 + 1) * [len(tag)]
        assert arrays["classes"].tolist() == (place[tag] % 4 + 1) * [len(tag)]
        assert {key: len(values) for key, values in arrays.items()} == {k: v[index] for k, v in dataset.lengths.items()}
    batch = dataset.padded(numpy.array([49, 0, 17]))
    for row, index in enumerate([49, 0, 17]):
        for key, values in dataset.sequence(index).items():
            assert batch[key].values[row, : batch[key].seq_lens[row]].tolist() == values.tolist()
    assert "words joined by tag" in dataset.how_read()
    dataset.close()


def test_tags_of_any_writer_are_the_same_in_bulk(tmp_path: Path) -> None:
    import h5py

    from hvdtrain.data.hdf.dataset import open_hdf

    stored = {
        "fixed": (numpy.array([b"a\0rest", b"bb\0", "é\0x\0y".encode()], dtype="S9"), ["a", "bb", "é"]),
        "padded": (numpy.array(["é".encode(), b"second", b""]), ["é", "second", ""]),
        "variable": (["é", "日本", ""], ["é", "日本", ""]),
    }
    for name, (tags, read) in stored.items():
        path = write(tmp_path / f"{name}.hdf", ["1", "2", "3"], "data")
        with h5py.File(path, "r+") as file:
            del file["seqTags"]
            file["seqTags"] = tags
        dataset = open_hdf([path, path])
        assert dataset.tags([5, 0, 1]) == [read[2], read[0], read[1]]
        assert [tag.decode() for tag in dataset.tag_bytes(0, 6)] == dataset.tags(range(6))
        assert [tag.decode() for tag in dataset.tag_bytes(2, 5)] == dataset.tags([2, 3, 4])
        assert dataset.tag_bytes(4, 4).shape == (0,)


def test_datasets_that_are_not_needed_are_closed_and_not_joined() -> None:
    used, unused = Tagged(["a", "b"]), Tagged(["other"])
    dataset = open_meta("train", keys(datasets={"a": 0, "b": 0}, data_map={"data": ("a", "number")}), {"a": used, "b": unused})
    assert (dataset.num_sequences, unused.closed, used.closed) == (2, True, False)


def test_a_data_key_that_is_not_there() -> None:
    with pytest.raises(DataError, match=r"^train.data_map.data: expected a data key of a \(number\), got 'sound'$"):
        open_meta("train", keys(datasets={"a": 0}, data_map={"data": ("a", "sound")}), {"a": Tagged(["a"])})


def test_all_problems_of_a_dict_are_reported_at_once() -> None:
    inside = {"class": "HDFDataset", "files": "a.hdf"}
    value = {
        "class": "MetaDataset",
        "datasets": {"hdf": {**inside, "fils": 1}, "other": {"class": "HDFDataset"}, "more": {"class": "Nothing"}},
        "data_map": {"data": ("hfd", "data"), "classes": "hdf"},
        "seq_order_control_dataset": "none",
        "data_mapp": 1,
    }
    found = problems_of(value)
    assert found == [
        "train.data_mapp: unknown-key",
        "train.data_map.data: unknown-value",
        "train.data_map.classes: wrong-type",
        "train.seq_order_control_dataset: unknown-value",
        "train.datasets.hdf.fils: unknown-key",
        "train.datasets.other.files: missing",
        "train.datasets.more.class: unknown-value",
    ]


def test_order_keys_inside_that_nobody_would_follow() -> None:
    first = {"class": "HDFDataset", "files": "a.hdf", "seq_ordering": "random"}
    second = {"class": "HDFDataset", "files": "b.hdf", "seq_ordering": "laplace", "partition_epoch": 1}
    value = {"class": "MetaDataset", "datasets": {"a": first, "b": second}, "data_map": {"data": ("a", "data")}}
    assert problems_of(value) == ["train.datasets.b.seq_ordering: conflict"]
    del second["seq_ordering"]
    assert problems_of(value) == []
    assert problems_of({**value, "seq_ordering": "sorted"}) == ["train.datasets.a.seq_ordering: conflict"]


def test_dicts_without_anything_in_them() -> None:
    assert problems_of({"class": "MetaDataset", "datasets": {}, "data_map": {}}) == [
        "train.datasets: missing",
        "train.data_map: missing",
    ]
    assert problems_of({"class": "MetaDataset"}) == ["train.datasets: missing", "train.data_map: missing"]
