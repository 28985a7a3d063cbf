"""tools/hdf_check.py: what is in a file, is it sound, what makes it slow; and the cure."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import BY_RETURNN
from launching import ROOT

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.check import check, main
from hvdtrain.plugins.hdf_tools.dump import main as dump
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

LENGTHS = [300, 500, 0, 400]


def write(path: Path) -> Path:
    """A good file: 1200 frames of 40 features, a class of 5 for every hundredth of them, and a text."""
    generator = numpy.random.default_rng(0)
    with HDFWriter(path, labels={"classes": list("abcdé")}) as writer:
        for number, length in enumerate(LENGTHS):
            frames = generator.normal(size=(length, 40)).astype(numpy.float32)
            classes = numpy.arange(length // 100, dtype=numpy.int32) % 5
            writer.add(f"sequence {number}", {"data": frames, "classes": classes, "text": numpy.array([f"text {number}"])})
    return path


def store(path: Path, name: str, **options: object) -> Path:
    """The file with a dataset stored in another way, or with other values."""
    with h5py.File(path, "r+") as file:
        values = options.pop("data", file[name][:])
        del file[name]
        file.create_dataset(name, data=values, **options)
    return path


def contents(path: Path) -> list[tuple[str, dict[str, list[object]]]]:
    dataset = open_hdf([path])
    sequences = [dataset.sequence(index) for index in range(dataset.num_sequences)]
    tags = dataset.tags(range(dataset.num_sequences))
    return [(tag, {key: values.tolist() for key, values in one.items()}) for tag, one in zip(tags, sequences, strict=True)]


def warnings(path: Path, **options: object) -> list[str]:
    report = check(path, seconds=0, **options)
    assert report.problems == []
    return report.warnings


def test_a_good_file(tmp_path: Path) -> None:
    report = check(write(tmp_path / "file.hdf"), seconds=0.02)
    assert (report.problems, report.warnings, report.sequences) == ([], [], 4)
    assert report.tags == ["sequence 0", "sequence 3"]
    assert set(report.keys) == {"data", "classes", "text"}
    data = report.keys["data"]
    assert (data["dtype"], data["shape"], data["frames"], data["storage"]) == ("float32", [40], 1200, "contiguous")
    assert data["lengths"] == {"least": 0, "most": 500, "mean": 300.0, "median": 350.0}
    assert data["stored_bytes"] == 1200 * 40 * 4
    classes = report.keys["classes"]
    assert (classes["sparse"], classes["dim"], classes["labels"]) == (True, 5, 5)
    assert report.speed["sequences_per_second"] > 0
    assert report.speed["megabytes_per_second"] > 0


@pytest.mark.parametrize("name", ["a", "b", "c", "e"])
def test_files_by_returnn_are_sound(name: str) -> None:
    assert check(BY_RETURNN / f"{name}.hdf", everything=True, seconds=0).problems == []


def test_layouts_that_read_slowly(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf")
    unmapped = "/inputs: chunked but not compressed: it cannot be memory-mapped"
    assert warnings(store(path, "inputs", chunks=(270, 10))) == [
        "/inputs: chunks (270, 10) cut the feature axis of 40: a sequence of 300 frames is read from 8 chunks, "
        "which hold 1.9 times as much data",
        unmapped,
    ]
    assert warnings(store(path, "inputs", chunks=(4, 40))) == [
        "/inputs: chunks (4, 40) are small: a sequence of 300 frames is read from 75 chunks",
        unmapped,
    ]
    assert warnings(store(path, "inputs", chunks=(300, 40), compression="gzip", shuffle=True)) == [
        "/inputs: gzip is slow to decompress in random access (zstd, lz4, blosc2 and no compression are faster)"
    ]
    assert check(path, seconds=0).keys["data"]["storage"] == "chunks (300, 40), shuffle, gzip"
    assert warnings(store(path, "inputs", dtype=">f4")) == [
        "/inputs: >f4 is not the byte order of this machine: every read converts numbers"
    ]
    assert warnings(store(path, "inputs", dtype="<f4")) == []
    assert warnings(store(path, "seqTags", dtype=h5py.string_dtype())) == [
        "/seqTags are strings of variable length, which take longer to read than strings of a fixed width"
    ]
    with h5py.File(write(tmp_path / "more.hdf"), "r+") as file:
        file["times"] = numpy.zeros((3, 2))
    assert warnings(tmp_path / "more.hdf") == ["/times: not read by the trainer (--repack leaves it out)"]


def test_chunks_of_which_most_is_not_wanted(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for number in range(16):
            writer.add(str(number), {"data": numpy.zeros((512, 64), numpy.float32)})
    assert warnings(store(tmp_path / "file.hdf", "inputs", chunks=(8192, 64)))[0] == (
        "/inputs: chunks (8192, 64) hold 2.0 MiB, a sequence 0.12 MiB: whole chunks are read for each sequence"
    )


def test_what_our_writer_compresses_for_reading_is_well_laid_out(tmp_path: Path) -> None:
    pytest.importorskip("hdf5plugin")
    write(tmp_path / "file.hdf")
    for compression in ("zstd", "lz4", "blosc2"):
        repack = ["--repack", str(tmp_path / f"{compression}.hdf"), "--compression", compression]
        assert main([str(tmp_path / "file.hdf"), "--seconds", "0", *repack]) == 0
        assert warnings(tmp_path / f"{compression}.hdf") == []
        assert contents(tmp_path / f"{compression}.hdf") == contents(tmp_path / "file.hdf")


def test_values_that_are_no_numbers(tmp_path: Path) -> None:
    frames = numpy.zeros((1200, 40), numpy.float32)
    frames[300, 2], frames[1000, 0] = numpy.nan, -numpy.inf
    path = store(write(tmp_path / "file.hdf"), "inputs", data=frames)
    assert warnings(path) == ["NaN or infinity for 'data' in 2 of 4 checked sequences, the first is 'sequence 1'"]


def test_a_sample_is_looked_at_unless_all_is_asked_for(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for number in range(1000):
            writer.add(str(number), {"data": numpy.full((1, 2), numpy.nan if number == 1 else 0.0)})
    assert warnings(tmp_path / "file.hdf") == []
    assert warnings(tmp_path / "file.hdf", everything=True) == [
        "NaN or infinity for 'data' in 1 of 1000 checked sequences, the first is '1'"
    ]


def test_chunks_that_were_never_written(tmp_path: Path) -> None:
    """Opening a file looks at some of many chunks only."""
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for number in range(3000):
            writer.add(str(number), {"data": numpy.ones((1, 1), numpy.float32)})
    with h5py.File(tmp_path / "file.hdf", "r+") as file:
        del file["inputs"]
        stored = file.create_dataset("inputs", (3000, 1), "f4", chunks=(1, 1), compression="lzf")
        stored[:1001] = stored[1003:] = 1
    assert "/inputs: 2 of its chunks were never written: they are read as zeros" in warnings(tmp_path / "file.hdf")


def test_tags_that_stand_twice(tmp_path: Path) -> None:
    path = store(write(tmp_path / "file.hdf"), "seqTags", data=numpy.array(["ü", "b", "ü", "b"], object))
    assert warnings(path)[0] == "2 tags occur more than once, such as 'ü', 'b': they do not identify a sequence"


def test_an_unknown_dimension_is_reported(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf")
    with h5py.File(path, "r+") as file:
        file["targets/size"].attrs["classes"] = [1, 1]
        del file["targets/labels/classes"]
    assert warnings(path) == [f"{path}: expected classes from 0 to 0 for 'classes', got 0 to 4"]
    assert dump([str(path), str(tmp_path / "out.hdf")]) == 0
    assert open_hdf([tmp_path / "out.hdf"]).streams["classes"].dim == 1
    assert contents(tmp_path / "out.hdf") == contents(path)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5000])


def damage(path: Path) -> None:
    """Other bytes in the middle of what is compressed."""
    store(path, "inputs", chunks=(1200, 40), compression="gzip")
    with h5py.File(path) as file:
        place = file["inputs"].id.get_chunk_info(0).byte_offset
    with path.open("r+b") as file:
        file.seek(place + 1000)
        file.write(b"\0" * 5000)


def nothing(path: Path) -> None:
    path.unlink()
    with h5py.File(path, "w") as file:
        file["inputs"] = numpy.zeros((0, 2))
        file["seqLengths"] = numpy.zeros((0, 1), int)
        file["seqTags"] = numpy.zeros(0, "S1")


BAD: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.unlink(), "expected an HDF file, got: no such file"),
    (lambda path: path.write_text("no HDF"), "expected an HDF5 file, got something else"),
    (truncate, "expected a whole HDF5 file, got a damaged one: the first "),
    (damage, "cannot read sequence 0 of /inputs"),
    (nothing, "expected at least one sequence"),
    (lambda path: store(path, "seqLengths", data=numpy.full((4, 3), 7)), "to add up to the 1200 frames of /inputs, got 28"),
    (lambda path: store(path, "seqLengths", data=numpy.full((4, 3), -1)), "expected lengths of 0 or more"),
    (lambda path: store(path, "seqTags", data=numpy.array([b"one"])), "expected 4 tags in /seqTags"),
    (
        lambda path: store(path, "targets/data/classes", data=numpy.arange(12, dtype=numpy.int32)),
        "expected classes from 0 to 4 for 'classes', got",
    ),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_files_have_the_verdict_of_hdf_dump(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spoil: Callable[[Path], object], message: str
) -> None:
    path = write(tmp_path / "file.hdf")
    spoil(path)
    assert main([str(path), "--repack", str(tmp_path / "out.hdf")]) == 2
    shown = capsys.readouterr()
    assert shown.out.startswith(f"{path}: not sound")
    assert f"  problem: {path}: " in shown.out
    assert message in shown.out
    assert dump([str(path), str(tmp_path / "out.hdf")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out.hdf").exists()


def test_repacking_cures_and_keeps_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "abce":
        source, out = BY_RETURNN / f"{name}.hdf", tmp_path / f"{name}.hdf"
        assert main([str(source), "--seconds", "0", "--repack", str(out)]) == 0
        assert f"{out}: " in capsys.readouterr().out
        assert [text for text in warnings(out) if "from 0 to 0 for 'sizes'" not in text] == []
        assert contents(out) == contents(source)
        theirs, ours = open_hdf([source]).streams, open_hdf([out]).streams
        for key, stream in theirs.items():
            assert (ours[key].shape, ours[key].sparse, ours[key].labels) == (stream.shape, stream.sparse, stream.labels)
            assert ours[key].dim == stream.dim  # also of sizes, which has no classes, though it looks as if
        assert "memory-mapped" in open_hdf([out]).how_read()
    assert main([str(source), "--seconds", "0", "--repack", str(out)]) == 2
    assert "expected a file that does not exist yet" in capsys.readouterr().err
    before = contents(source)
    assert main([str(out), "--seconds", "0", "--repack", str(out), "--overwrite"]) == 0  # onto itself
    assert contents(out) == before


def test_exit_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, slow, bad = str(write(tmp_path / "good.hdf")), str(BY_RETURNN / "a.hdf"), str(tmp_path / "none.hdf")
    fast = ["--seconds", "0"]
    assert main([good, slow, *fast]) == 0
    assert main([good, "--strict", *fast]) == 0
    assert main([good, slow, "--strict", *fast]) == 1
    assert main([good, bad, slow, "--strict", *fast]) == 2
    with pytest.raises(SystemExit) as ended:
        main([good, slow, "--repack", str(tmp_path / "out.hdf")])
    assert ended.value.code == 2
    assert "--repack: expected one FILE, got several" in capsys.readouterr().err


def test_output_for_scripts(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf")
    command = [sys.executable, str(ROOT / "tools" / "hdf_check.py"), str(path), "none.hdf", "--json", "--seconds", "0.01"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (finished.returncode, finished.stderr) == (2, "")
    good, bad = json.loads(finished.stdout)
    assert (good["file"], good["sound"], good["problems"], good["sequences"]) == (str(path), True, [], 4)
    assert good["keys"]["classes"]["dim"] == 5
    assert good["speed"]["sequences_per_second"] > 0
    assert (bad["sound"], bad["problems"]) == (False, ["none.hdf: expected an HDF file, got: no such file"])


def test_output_for_people(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(write(tmp_path / "file.hdf"), "inputs", chunks=(270, 10))
    assert main([str(path), "--seconds", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{path}: sound, 2 warnings"
    assert lines[1].startswith("  4 sequences, 0.2 MB, 'sequence 0' to 'sequence 3'")
    assert (
        lines[2] == "  data: float32, 40 features; 1200 frames, 0 to 500 per sequence (mean 300.0, median 350); chunks (270, 10)"
    )
    assert lines[3].startswith("  classes: int32, 5 classes with 5 labels; 12 frames, ")
    assert lines[5] == "  classes memory-mapped; data, text read through h5py"
    assert lines[6].startswith("  in random order: ")
    assert re.fullmatch(r"  a contiguous copy of [1-4] sequences was read .* in random order", lines[7])
    assert lines[8].startswith("  warning: /inputs: chunks (270, 10) cut the feature axis")


def test_what_a_contiguous_copy_would_bring_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "file.hdf"
    with HDFWriter(path) as writer:
        for number in range(60):
            writer.add(str(number), {"data": numpy.full((400, 80), number, numpy.float32)})
    assert "gain_of_copy" not in check(path, seconds=0.02).speed
    slow = check(store(path, "inputs", chunks=(64, 5), compression="gzip"), seconds=0.4).speed
    assert slow["gain_of_copy"] > 3, "unpacking takes a hundred times as long"
    assert slow["copied_sequences"] > 5


def test_data_that_begins_at_an_odd_place(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "aligned.hdf") as writer:
        for number in range(5):
            writer.add(f"t{number}", {"data": numpy.arange(number + 20, dtype=numpy.int32)})
    path = tmp_path / "odd.hdf"
    with h5py.File(path, "w") as file, h5py.File(tmp_path / "aligned.hdf") as good:
        file["seqTags"] = numpy.array([f"t{number}" for number in range(5)], "S3")  # 15 bytes
        for name in ("inputs", "seqLengths"):
            file[name] = good[name][:]
        for name in ("data", "size", "labels"):
            file.create_group(f"targets/{name}")
        offset = file["inputs"].id.get_offset()
    assert offset % 4, "as HDF5 puts it now; else this test needs another way to get such a file"
    found = warnings(path)
    assert f"/inputs: begins at byte {offset}, not a multiple of 4: gathering short sequences is slower" in found
    assert main([str(path), "--seconds", "0", "--repack", str(tmp_path / "repacked.hdf")]) == 0
    assert not any("begins at byte" in warning for warning in warnings(tmp_path / "repacked.hdf"))
