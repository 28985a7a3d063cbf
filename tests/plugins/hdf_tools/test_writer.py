"""Writing HDF files: what is written is what is read, in RETURNN's layout, whole or not at all."""

import re
import subprocess
import sys
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import BY_RETURNN

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools import writer as writer_module
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

FRAMES = numpy.arange(10, dtype=numpy.float32).reshape(5, 2)
CLASSES = numpy.array([3, 1, 0, 2], dtype=numpy.int32)


def write_two(path: Path, **options: object) -> Path:
    with HDFWriter(path, **options) as writer:
        writer.add("first", {"data": FRAMES[:3], "classes": CLASSES[:1]})
        writer.add("second", {"data": FRAMES[3:], "classes": CLASSES[1:]})
    return path


def objects(path: Path) -> dict[str, tuple[str, tuple[int, ...], object]]:
    """Every dataset of a file: kind of dtype, shape, chunks."""
    found = {}

    def note(name: str, thing: h5py.Group | h5py.Dataset) -> None:
        is_dataset = isinstance(thing, h5py.Dataset)
        found[name] = (thing.dtype.kind, thing.shape, thing.chunks) if is_dataset else ("group", (), None)

    with h5py.File(path) as file:
        file.visititems(note)
    return found


def write_all(path: Path, *sequences: dict[str, object], **options: object) -> None:
    with HDFWriter(path, **options) as writer:
        for number, sequence in enumerate(sequences):
            writer.add(f"seq-{number}", sequence)


def write_and_fail(path: Path, num_sequences: int, **options: object) -> None:
    """An exception that has nothing to do with the writer, after some sequences."""
    with HDFWriter(path, **options) as writer:
        for number in range(num_sequences):
            writer.add(f"new-{number}", {"data": FRAMES + 1})
        raise ZeroDivisionError


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint32", "int64", "float16", "float64", ">f4", ">i2"])
def test_every_dtype_is_kept_in_native_byte_order(tmp_path: Path, dtype: str) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("only", {"data": FRAMES.astype(dtype), "aux": CLASSES.astype(dtype)})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.how_read() == "aux, data memory-mapped"
    assert dataset.streams["data"].dtype == numpy.dtype(dtype).newbyteorder("=")
    assert dataset.sequence(0)["data"].tolist() == FRAMES.astype(dtype).tolist()
    assert dataset.sequence(0)["aux"].tolist() == CLASSES.astype(dtype).tolist()


def test_layout_is_that_of_returnns_writer(tmp_path: Path) -> None:
    theirs = BY_RETURNN / "c.hdf"
    source = open_hdf([theirs])
    labels = {key: stream.labels for key, stream in source.streams.items() if stream.labels}
    with HDFWriter(tmp_path / "ours.hdf", labels=labels) as writer:
        for index, tag in enumerate(source.tags([0, 1])):
            writer.add(tag, source.sequence(index))
    assert objects(tmp_path / "ours.hdf") == objects(theirs)
    with h5py.File(theirs) as expected, h5py.File(tmp_path / "ours.hdf") as file:
        assert dict(file.attrs) == dict(expected.attrs) == {"inputPattSize": 2}
        sizes, expected_sizes = file["targets/size"].attrs, expected["targets/size"].attrs
        assert {key: sizes[key].tolist() for key in sizes} == {key: expected_sizes[key].tolist() for key in expected_sizes}
        assert file["seqLengths"].dtype == numpy.int32
        for name, (kind, _, _) in objects(theirs).items():
            if kind != "group":
                assert file[name][:].tolist() == expected[name][:].tolist(), name


def test_columns_are_the_input_and_then_the_targets_by_name(tmp_path: Path) -> None:
    names = ["zeta", "data", "alpha", "Beta"]
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for length in (1, 2):
            writer.add(f"seq-{length}", {name: numpy.zeros(length + 10 * number) for number, name in enumerate(names)})
    with h5py.File(tmp_path / "file.hdf") as file:
        assert file["seqLengths"][:].tolist() == [[11, 31, 21, 1], [12, 32, 22, 2]]  # data, Beta, alpha, zeta
    assert open_hdf([tmp_path / "file.hdf"]).lengths["zeta"].tolist() == [1, 2]


def test_dimension_of_classes_comes_from_labels_or_dims_or_the_largest_class(tmp_path: Path) -> None:
    options = {"labels": {"labelled": ["a", "b", "c"], "unlabelled": []}, "dims": {"counted": 7, "labelled": 9}}
    with HDFWriter(tmp_path / "file.hdf", **options) as writer:
        for classes in ([0, 2], [1, 1]):
            array = numpy.array(classes)
            writer.add("x", {"data": array, "labelled": array, "counted": array, "unlabelled": array, "neither": array})
    dims = {key: stream.dim for key, stream in open_hdf([tmp_path / "file.hdf"]).streams.items()}
    assert dims == {"data": 3, "labelled": 3, "counted": 7, "unlabelled": 3, "neither": 3}
    with h5py.File(tmp_path / "file.hdf") as file:
        assert file.attrs["inputPattSize"] == 3
        assert file["targets/size"].attrs["counted"].tolist() == [7, 1]
        assert file["targets/labels/counted"][:].tolist() == [b"dummy-label"]


def test_frames_of_more_axes(tmp_path: Path) -> None:
    images = numpy.arange(24, dtype=numpy.uint8).reshape(4, 3, 2)
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("only", {"data": images, "image": images[:1]})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.streams["image"].shape == (3, 2)
    assert numpy.array_equal(dataset.sequence(0)["data"], images)
    with h5py.File(tmp_path / "file.hdf") as file:
        assert file["targets/size"].attrs["image"].tolist() == [2, 3]


def test_sequences_of_no_frames(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("none", {"data": FRAMES[:0], "classes": CLASSES[:0]})
        writer.add("", {"data": FRAMES, "classes": CLASSES[:0]})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.lengths["data"].tolist() == [0, 5]
    assert dataset.sequence(1)["data"].tolist() == FRAMES.tolist()
    assert dataset.sequence(1)["classes"].shape == (0,)
    assert dataset.tags([0, 1]) == ["none", ""]


def test_values_are_copied_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BYTES_AT_ONCE", 3 * 8)  # three frames at once; 100 is no multiple of it
    frames = numpy.random.default_rng(0).normal(size=(100, 2)).astype(numpy.float32)
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for start in range(0, 100, 7):
            writer.add(f"from-{start}", {"data": frames[start : start + 7]})
    with h5py.File(tmp_path / "file.hdf") as file:
        assert numpy.array_equal(file["inputs"][:], frames)


def test_arrays_that_are_not_contiguous_and_narrower_types(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("first", {"data": FRAMES[::2, ::-1], "classes": numpy.array([1, 2], numpy.int32)})
        writer.add("second", {"data": FRAMES.astype(numpy.float64), "classes": numpy.array([3], numpy.int64)})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.sequence(0)["data"].tolist() == FRAMES[::2, ::-1].tolist()
    assert dataset.sequence(1)["data"].tolist() == FRAMES.tolist()
    assert dataset.sequence(1)["classes"].tolist() == [3]


def test_file_is_absent_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file.hdf"
    with HDFWriter(path) as writer:
        writer.add("first", {"data": FRAMES})
        assert not path.exists()
    assert path.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["file.hdf"]


@pytest.mark.parametrize("after", [0, 1])
def test_nothing_is_left_behind_after_an_exception(tmp_path: Path, after: int) -> None:
    with pytest.raises(ZeroDivisionError):
        write_and_fail(tmp_path / "file.hdf", after)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept(tmp_path: Path) -> None:
    path = write_two(tmp_path / "file.hdf")
    before = path.read_bytes()
    with pytest.raises(DataError, match=r"file.hdf: expected a file that does not exist yet, got an existing one \(--overwrite"):
        write_two(path)
    assert path.read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


def test_an_existing_file_is_replaced_on_demand_and_only_as_a_whole(tmp_path: Path) -> None:
    path = write_two(tmp_path / "file.hdf")
    reader = open_hdf([path])
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError):
        write_and_fail(path, 1, overwrite=True)
    assert path.read_bytes() == before
    with HDFWriter(path, overwrite=True) as writer:
        writer.add("new", {"data": FRAMES + 1})
    assert open_hdf([path]).tags([0]) == ["new"]
    assert reader.sequence(0)["data"].tolist() == FRAMES[:3].tolist()  # who was reading the old file reads it still


def test_a_folder_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"file.hdf: expected a folder that can be written to, got: No such file or directory"):
        write_two(tmp_path / "none" / "file.hdf")


TEXTS = numpy.array(["a"])
FIRST = {"data": FRAMES, "classes": CLASSES}
NO_NUMBERS = "expected numbers of shape (frames, ...) for 'data', got"
NO_CLASSES = "expected classes from 0 to 2 for 'classes', got 0 to 3 in sequence 'seq-0'"
REFUSED: list[tuple[list[dict[str, object]], dict[str, object], str]] = [
    ([], {}, "expected at least one sequence to write, got none"),
    ([{}], {}, "expected at least one key in sequence 'seq-0', got []"),
    ([FIRST, {"data": FRAMES}], {}, "expected the keys ['classes', 'data'] in sequence 'seq-1', got ['data']"),
    ([FIRST, {**FIRST, "more": CLASSES}], {}, "... in sequence 'seq-1', got ['classes', 'data', 'more']"),
    ([FIRST, {}], {}, "expected the keys ['classes', 'data'] in sequence 'seq-1', got []"),
    (
        [{"data": FRAMES}, {"data": numpy.zeros((5, 3), numpy.float32)}],
        {},
        "expected float32 frames of shape (2,) for 'data' as in the first sequence, got float32 (3,) in sequence 'seq-1'",
    ),
    ([{"data": FRAMES}, {"data": CLASSES}], {}, "... got int32 () in sequence 'seq-1'"),
    ([{"data": CLASSES}, {"data": CLASSES.astype(numpy.float32)}], {}, "expected int32 frames of shape () for 'data'..."),
    (
        [{"data": numpy.array([100], numpy.int8)}, {"data": numpy.array([5, 300], numpy.int64)}],
        {"dims": {"data": 1000}},
        "expected int8 for 'data' as in the first sequence, got 5 to 300 in sequence 'seq-1'",
    ),
    ([{"data": "abc"}], {}, f"{NO_NUMBERS} <U3 of shape () in sequence 'seq-0'..."),
    ([{"data": numpy.array([["a"]])}], {}, f"{NO_NUMBERS} <U1 of shape (1, 1)..."),
    ([{"data": numpy.array(["a", 1], object)}], {}, f"{NO_NUMBERS} object of shape (2,)..."),
    ([{"data": numpy.float32(1)}], {}, f"{NO_NUMBERS} float32 of shape ()..."),
    ([{"data": CLASSES}, {"data": 3}], {}, f"{NO_NUMBERS} int64 of shape ()..."),
    ([FIRST], {"labels": {"classes": ["a", "b", "c"]}}, NO_CLASSES),
    ([FIRST], {"dims": {"classes": 3}}, NO_CLASSES),
    ([{**FIRST, "classes": CLASSES - 1}], {"dims": {"classes": 9}}, "... got -1 to 2 in sequence 'seq-0'"),
    ([{"text": numpy.array(["a\0b"])}], {}, "expected text without zero bytes for 'text', got some in sequence 'seq-0'"),
    ([{"text": numpy.array(["\udc80"])}], {}, "expected a name that can be written..."),
    ([{"text": TEXTS}, {"text": CLASSES}], {}, "... for 'text' as in the first sequence, got ..."),
    ([{"text": CLASSES}, {"text": TEXTS}], {}, "... for 'text' as in the first sequence, got ..."),
    *(
        ([{key: FRAMES}], {}, f"expected keys that are names without '/', got {key!r} in sequence 'seq-0'")
        for key in ("a/b", "/", "", ".")
    ),
    ([{"data": CLASSES}], {"labels": {"data": ["\udc80", "b", "c", "d"]}}, "expected a name that can be written as UTF-8..."),
]


@pytest.mark.parametrize(("sequences", "options", "message"), REFUSED)
def test_what_cannot_be_written_is_refused(
    tmp_path: Path, sequences: list[dict[str, object]], options: dict[str, object], message: str
) -> None:
    path = tmp_path / "file.hdf"
    with pytest.raises(DataError) as caught:
        write_all(path, *sequences, **options)
    assert list(tmp_path.iterdir()) == []
    assert re.fullmatch(re.escape(f"{path}: {message}").replace(r"\.\.\.", ".*"), str(caught.value), re.DOTALL), caught.value


def test_texts_are_kept(tmp_path: Path) -> None:
    texts = [["größe", ""], [], ["日本", "b c", "new\nline"]]
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for number, some in enumerate(texts):
            values = numpy.array(some, dtype=object) if number else numpy.array(some)  # of fixed width, too
            writer.add(f"seq-{number}", {"data": FRAMES, "text": values})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert [dataset.sequence(number)["text"].tolist() for number in range(3)] == texts
    with h5py.File(tmp_path / "file.hdf") as file:
        assert h5py.check_string_dtype(file["targets/data/text"].dtype) == ("utf-8", None)
        assert file["targets/size"].attrs["text"].tolist() == [1, 1]


def test_texts_are_copied_in_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "TEXTS", 3)
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("only", {"text": numpy.array([str(number) for number in range(10)])})
    assert open_hdf([tmp_path / "file.hdf"]).sequence(0)["text"].tolist() == [str(number) for number in range(10)]


def test_tags_that_are_no_utf_8(tmp_path: Path) -> None:
    expected = r"file.hdf: expected a name that can be written as UTF-8, got '\\udc80'"
    with pytest.raises(DataError, match=expected), HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("\udc80", {"data": FRAMES})


READ = """
import sys
from hvdtrain.data.hdf.dataset import open_hdf
for dataset in (open_hdf([path]) for path in sys.argv[1:]):
    print([int(dataset.sequence(number)["data"].sum()) for number in range(4)])
"""


def test_compressed_files_hold_the_same_in_chunks_along_time(tmp_path: Path) -> None:
    pytest.importorskip("hdf5plugin")
    generator = numpy.random.default_rng(0)
    sequences = [
        {
            "data": generator.integers(0, 9, (length, 40)).astype(numpy.float32),
            "classes": generator.integers(0, 9, length // 100),
            "text": numpy.array(["a text"]),
            "none": numpy.zeros((0, 3), numpy.float32),
        }
        for length in (900, 1100, 1000, 0)
    ]
    paths = [tmp_path / f"{compression}.hdf" for compression in ("gzip", "lzf", "zstd", "lz4", "blosc2")]
    for path in paths:
        write_all(path, *sequences, compression=path.stem)
        found = objects(path)
        assert found["inputs"] == ("f", (3000, 40), (750, 40))  # the mean sequence
        assert found["targets/data/classes"][2] == (30,)  # all there is: less than the least chunk
        assert found["targets/data/none"][2] is None
        assert path.stat().st_size < 3000 * 40 * 4 / 2
        dataset = open_hdf([path])
        for number, sequence in enumerate(sequences):
            for key, values in dataset.sequence(number).items():
                assert numpy.array_equal(values, sequence[key]), key
    # Another process that has not imported hdf5plugin, either.
    shown = subprocess.run([sys.executable, "-c", READ, *map(str, paths)], capture_output=True, text=True, check=True)
    assert shown.stdout.splitlines() == len(paths) * [str([int(sequence["data"].sum()) for sequence in sequences])]


def test_frames_wider_than_a_chunk_and_blocks_of_whole_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BYTES_AT_ONCE", 50_000)
    wide = numpy.arange(3 * 100_000, dtype=numpy.float32).reshape(3, 100_000)
    many = numpy.arange(30_000, dtype=numpy.int32)
    write_all(tmp_path / "file.hdf", {"data": wide, "many": many}, compression="lzf")
    assert objects(tmp_path / "file.hdf")["inputs"][2] == (1, 100_000)
    sequence = open_hdf([tmp_path / "file.hdf"]).sequence(0)
    assert numpy.array_equal(sequence["data"], wide)
    assert numpy.array_equal(sequence["many"], many)


def test_what_a_compression_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdf5plugin", None)  # as where it is not installed
    with pytest.raises(DataError, match=r"^compression: expected the package hdf5plugin for zstd, got none \(pip install"):
        HDFWriter(tmp_path / "file.hdf", compression="zstd")


def test_unknown_compression(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="compression: expected one of gzip, lzf, zstd, lz4, blosc2, got 'zip'"):
        HDFWriter(tmp_path / "file.hdf", compression="zip")


# The system refuses to let a file grow beyond a limit as it refuses to write to a full disk.
ON_A_FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.errors import DataError
for limit in (100_000, 799_000, 900_000):  # while collecting, at the last of it, and at copying
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    for then in ("end", "continue"):
        try:
            with HDFWriter(Path(sys.argv[1])) as writer:
                for number in range(10):
                    try:
                        writer.add(f"seq-{number}", {"a": numpy.zeros(10_000), "b": numpy.zeros(10_000)})
                    except DataError:
                        if then == "end":
                            raise
                        # else it continues, as callers should not
        except DataError as error:
            print(error)
"""


def test_a_full_disk_is_reported_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "file.hdf"
    command = [sys.executable, "-c", ON_A_FULL_DISK, str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert len(shown.stdout.splitlines()) == 6
    for line in shown.stdout.splitlines():
        assert line.startswith(f"{path}: expected to be able to write in {tmp_path}, got: ")
        assert "File too large" in line
    assert list(tmp_path.iterdir()) == []


def test_parts_take_their_types_from_a_sequence_they_do_not_hold(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.expect("first", {"data": FRAMES})
        writer.add("second", {"data": FRAMES.astype(numpy.float64)})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.num_sequences == 1
    assert dataset.streams["data"].dtype == numpy.float32


def test_a_refused_sequence_leaves_no_trace(tmp_path: Path) -> None:
    with HDFWriter(tmp_path / "file.hdf") as writer:
        writer.add("first", {"aux": FRAMES, "data": FRAMES})
        with pytest.raises(DataError, match="in sequence 'bad'"):
            writer.add("bad", {"aux": FRAMES, "data": CLASSES})
        writer.add("second", {"aux": FRAMES[:1], "data": FRAMES[:2]})
    dataset = open_hdf([tmp_path / "file.hdf"])
    assert dataset.tags([0, 1]) == ["first", "second"]
    assert dataset.sequence(1)["aux"].tolist() == FRAMES[:1].tolist()
    assert (writer.num_sequences, writer.num_frames) == (2, {"aux": 6, "data": 7})


@pytest.mark.parametrize("tag", ["x", "xy", "xyz", "x" * 50])
def test_data_is_aligned_wherever_the_tags_end(tmp_path: Path, tag: str) -> None:
    path = tmp_path / "out.hdf"
    with HDFWriter(path) as writer:
        for number in range(3):
            writer.add(f"{tag}{number}", {"data": numpy.ones((50, 3), "float64"), "classes": numpy.ones(1, "int64")})
    with h5py.File(path) as file:
        for name in ("inputs", "targets/data/classes"):
            assert file[name].id.get_offset() % 64 == 0
