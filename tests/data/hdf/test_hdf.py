"""Reading HDF files: RETURNN's own, every layout, and files that are not what they should be."""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
from hdf_files import BY_RETURNN, CLASSES, EXPECTED, FRAMES, Change, contents, data_error, laid_out, put, write

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.sources import check_dataset
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def test_what_files_by_returnn_say_about_their_values() -> None:
    """test_reference_files.py compares the values themselves with RETURNN."""
    a, b, c = (open_hdf([BY_RETURNN / f"{name}.hdf"]) for name in "abc")
    described = {key: (stream.shape, stream.dim, stream.sparse, stream.labels) for key, stream in a.streams.items()}
    assert described == {
        "data": ((3,), 3, False, ()),
        "classes": ((), 5, True, ("a", "b", "c", "d", "e")),
        "emb": ((2,), 2, False, ()),  # "dummy-label" stands for none
        "txt": ((), 1, False, ()),
    }
    assert all(column.dtype == numpy.int32 for column in a.lengths.values())
    assert list(b.streams) == ["data"]  # the second column of its lengths counts targets that are not there
    assert b.streams["data"].labels == tuple(f"l{number}" for number in range(10))
    assert c.how_read() == "aux, classes, data memory-mapped"
    assert c.streams["classes"].labels == tuple(f"classes-class-{number}" for number in range(4))


def test_several_files_are_one_dataset(tmp_path: Path) -> None:
    def renamed(file: h5py.File) -> None:
        file["seqTags"][...] = [b"third", b"fourth"]
        file["inputs"][...] = FRAMES + 100

    dataset = open_hdf([write(tmp_path / "one.hdf"), write(tmp_path / "two.hdf", renamed)])
    assert dataset.num_sequences == 4
    assert dataset.lengths["data"].tolist() == [3, 2, 3, 2]
    assert dataset.lengths["classes"].tolist() == [1, 3, 1, 3]
    assert contents(dataset)[:2] == EXPECTED
    assert dataset.sequence(2)["data"].tolist() == [[100, 101], [102, 103], [104, 105]]
    assert dataset.sequence(3)["data"].tolist() == [[106, 107], [108, 109]]


def test_tags_come_in_the_order_asked_for(tmp_path: Path) -> None:
    paths = [write(tmp_path / "one.hdf"), write(tmp_path / "two.hdf", put("seqTags", numpy.array([b"third", b"fourth"])))]
    dataset = open_hdf(paths)
    assert dataset.tags([3, 0, 2, 0]) == ["fourth", "first", "third", "first"]
    assert dataset.tags([]) == []


def test_tags_of_many_sequences(tmp_path: Path) -> None:
    size = 2500

    def many(file: h5py.File) -> None:
        for name in ("inputs", "seqLengths", "seqTags", "targets"):
            del file[name]
        file["inputs"] = numpy.arange(size, dtype=numpy.int32)
        file["seqLengths"] = numpy.ones((size, 1), dtype=numpy.int32)
        file["seqTags"] = [f"tag-{number}" for number in range(size)]

    dataset = open_hdf([write(tmp_path / "many.hdf", many)])
    wanted = numpy.random.default_rng(0).permutation(size)[:2000]
    assert dataset.tags(wanted) == [f"tag-{number}" for number in wanted]


def test_further_keys_of_a_later_file_are_ignored(tmp_path: Path) -> None:
    def without_targets(file: h5py.File) -> None:
        del file["targets"]

    dataset = open_hdf([write(tmp_path / "one.hdf", without_targets), write(tmp_path / "two.hdf")])
    assert list(dataset.streams) == list(dataset.sequence(3)) == ["data"]
    every = numpy.arange(20) % dataset.num_sequences
    assert list(dataset.padded(every)) == list(dataset.packed(every, ["data"])) == ["data"]
    with pytest.raises(
        DataError, match=r"expected the data key 'classes' of .*two.hdf .file 0. in .*one.hdf .file 1., got data$"
    ):
        open_hdf([tmp_path / "two.hdf", tmp_path / "one.hdf"])


def test_files_of_other_dimensions_do_not_go_together(tmp_path: Path) -> None:
    wider = put("inputs", numpy.zeros((5, 3), numpy.float32))
    with pytest.raises(
        DataError, match=r"'data': expected .* dimension 2 as in .*one.hdf .*, got .* dimension 3 in .*two.hdf .file 1.$"
    ):
        open_hdf([write(tmp_path / "one.hdf"), write(tmp_path / "two.hdf", wider)])

    def more_classes(file: h5py.File) -> None:
        file["targets/size"].attrs["classes"] = [5, 1]

    with pytest.raises(DataError, match=r"'classes': expected .* dimension 4 as in .*, got .* dimension 5 in .*three.hdf"):
        open_hdf([tmp_path / "one.hdf", write(tmp_path / "three.hdf", more_classes)])


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [("uint8", "int32", "int32"), ("int16", "float32", "float32"), ("float32", "float64", "float64")],
)
def test_files_of_other_types_have_a_type_that_holds_all_values(tmp_path: Path, first: str, second: str, common: str) -> None:
    values = {dtype: numpy.array([[1, 0], [2, 40]]).astype(dtype) for dtype in (first, second)}
    values[second] += numpy.array(3000.25).astype(second)
    for number, (dtype, frames) in enumerate(values.items()):
        with HDFWriter(tmp_path / f"{number}.hdf") as writer:
            for _ in range(8):
                writer.add(dtype, {"data": frames})
    paths = [tmp_path / "0.hdf", tmp_path / "1.hdf"]
    spec, _ = check_dataset("dev", {"class": "FilesDataset", "files": list(map(str, paths))}, {})
    assert spec is not None
    for dataset in (open_hdf(paths), open_dataset(spec)):
        many, few, packed = (
            dataset.padded(numpy.arange(16)),
            dataset.padded(numpy.array([0, 8])),
            dataset.packed(numpy.array([0, 8]), ["data"]),
        )
        for rows in (
            many["data"].values[[0, 8]],
            few["data"].values,
            packed["data"].values.reshape(2, 2, 2),
            [dataset.sequence(index)["data"] for index in (0, 8)],
        ):
            for row, expected in zip(rows, values.values(), strict=True):
                assert row.tolist() == expected.tolist()
                assert row.dtype == dataset.streams["data"].dtype == common


def test_files_that_would_not_be_one_dataset(tmp_path: Path) -> None:
    def opened(**second: Any) -> str:
        for number, given in enumerate(({}, second)):
            labels = {"data": given.pop("labels", ["x", "y", "z"])}
            with HDFWriter(tmp_path / f"{number}.hdf", labels=labels, overwrite=True) as writer:
                writer.add("one", {"data": numpy.array([0, 2], given.get("dtype", "uint64"))})
        with pytest.raises(DataError) as caught:
            open_hdf([tmp_path / "0.hdf", tmp_path / "1.hdf"])
        return str(caught.value)

    assert "expected the labels of " in opened(labels=["z", "y", "x"])
    assert "the first difference is at index 0" in opened(labels=["z", "y", "x"])
    assert "expected the type uint64 of " in opened(dtype="int64")


def test_no_files_at_all() -> None:
    with pytest.raises(DataError, match="HDFDataset: expected at least one file, got none"):
        open_hdf([])


def both_chunked(file: h5py.File) -> None:
    laid_out("inputs", chunks=(2, 2))(file)
    laid_out("targets/data/classes", chunks=(2,))(file)


def linked_inside(file: h5py.File) -> None:
    file.move("inputs", "elsewhere")
    file["inputs"] = h5py.SoftLink("/elsewhere")


LAYOUTS: dict[str, tuple[Change | None, str]] = {
    "contiguous": (None, "classes, data memory-mapped"),
    "chunked": (laid_out("inputs", chunks=(2, 1)), "classes memory-mapped; data read through h5py"),
    "growing": (laid_out("inputs", maxshape=(None, 2)), "classes memory-mapped; data read through h5py"),
    "compressed": (laid_out("inputs", compression="gzip"), "classes memory-mapped; data read through h5py"),
    "checked": (laid_out("inputs", fletcher32=True), "classes memory-mapped; data read through h5py"),
    "big-endian": (put("inputs", FRAMES.astype(">f4")), "classes memory-mapped; data read through h5py"),
    "both chunked": (both_chunked, "classes, data read through h5py"),
    "linked inside": (linked_inside, "classes, data memory-mapped"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reads_the_same(tmp_path: Path, layout: str) -> None:
    change, how = LAYOUTS[layout]
    dataset = open_hdf([write(tmp_path / "file.hdf", change)])
    assert dataset.how_read() == how
    assert contents(dataset) == EXPECTED
    assert dataset.sequence(0)["data"].dtype in (numpy.dtype("f4"), numpy.dtype(">f4"))
    assert dataset.streams["data"].dim == 2


@pytest.mark.parametrize("options", [{"libver": "latest"}, {"userblock_size": 1024}, {"track_order": True}])
def test_every_version_of_the_format_reads_the_same(tmp_path: Path, options: dict[str, object]) -> None:
    dataset = open_hdf([write(tmp_path / "file.hdf", **options)])
    assert dataset.how_read() == "classes, data memory-mapped"
    assert contents(dataset) == EXPECTED


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "uint16", "int64", "float16", "float64", "complex64"])
def test_every_dtype_is_mapped_and_kept(tmp_path: Path, dtype: str) -> None:
    dataset = open_hdf([write(tmp_path / "file.hdf", put("inputs", FRAMES.astype(dtype)))])
    assert dataset.how_read() == "classes, data memory-mapped"
    values = dataset.sequence(1)["data"]
    assert values.dtype == dataset.streams["data"].dtype == numpy.dtype(dtype)
    assert values.tolist() == FRAMES[3:].astype(dtype).tolist()


def test_floats_that_numpy_has_no_type_for_are_converted(tmp_path: Path) -> None:
    def bfloat16(file: h5py.File) -> None:
        del file["inputs"]
        kind = h5py.h5t.IEEE_F32LE.copy()
        kind.set_fields(15, 7, 8, 0, 7)
        kind.set_precision(16)
        kind.set_size(2)
        stored = h5py.h5d.create(file.id, b"inputs", kind, h5py.h5s.create_simple((5, 2)))
        stored.write(h5py.h5s.ALL, h5py.h5s.ALL, FRAMES)

    dataset = open_hdf([write(tmp_path / "file.hdf", bfloat16)])
    assert dataset.how_read() == "classes memory-mapped; data read through h5py"
    assert contents(dataset) == EXPECTED


def test_mapped_sequences_are_read_only_views(tmp_path: Path) -> None:
    dataset = open_hdf([write(tmp_path / "file.hdf")])
    values = dataset.sequence(0)["data"]
    assert not values.flags.writeable
    assert not values.flags.owndata
    dataset.close()
    assert values.tolist() == EXPECTED[0][1]["data"]


def test_strings_come_as_text_whether_they_have_one_length_or_each_its_own(tmp_path: Path) -> None:
    texts = ["ä", "b", "", "日本"]
    paths = [
        write(tmp_path / "variable.hdf", put("targets/data/classes", texts)),
        write(tmp_path / "fixed.hdf", put("targets/data/classes", numpy.array([text.encode() for text in texts]))),
    ]
    for dataset in (*(open_hdf([path]) for path in paths), open_hdf(paths), open_hdf(paths[::-1])):
        for index in range(1, dataset.num_sequences, 2):
            assert dataset.sequence(index)["classes"].tolist() == ["b", "", "日本"]
            assert dataset.sequence(index)["classes"].dtype == object
        assert dataset.padded(numpy.array([0, 1]))["classes"].values.tolist() == [["ä", "", ""], ["b", "", "日本"]]
        assert not dataset.streams["classes"].sparse


def test_sequences_of_no_frames(tmp_path: Path) -> None:
    def empty(file: h5py.File) -> None:
        put("seqLengths", numpy.array([[0, 4], [5, 0]]))(file)

    dataset = open_hdf([write(tmp_path / "file.hdf", empty)])
    assert dataset.sequence(0)["data"].shape == (0, 2)
    assert dataset.sequence(1)["classes"].shape == (0,)

    def nothing(file: h5py.File) -> None:
        put("inputs", FRAMES[:0])(file)
        put("targets/data/classes", CLASSES[:0])(file)
        put("seqLengths", numpy.zeros((2, 2), numpy.int32))(file)

    dataset = open_hdf([write(tmp_path / "nothing.hdf", nothing)])
    assert contents(dataset) == [("first", {"data": [], "classes": []}), ("second", {"data": [], "classes": []})]


def test_one_length_for_all_keys_as_in_the_oldest_files(tmp_path: Path) -> None:
    def old(file: h5py.File) -> None:
        put("seqLengths", numpy.array([3, 2]))(file)
        put("targets/data/classes", numpy.arange(5))(file)
        file["targets/size"].attrs["classes"] = 5

    dataset = open_hdf([write(tmp_path / "file.hdf", old)])
    assert dataset.lengths["classes"].tolist() == [3, 2]
    assert dataset.streams["classes"].dim == 5
    assert dataset.sequence(1)["classes"].tolist() == [3, 4]


def test_targets_without_inputs(tmp_path: Path) -> None:
    def targets_only(file: h5py.File) -> None:
        del file["inputs"]
        put("seqLengths", numpy.array([[1], [3]]))(file)

    dataset = open_hdf([write(tmp_path / "file.hdf", targets_only)])
    assert contents(dataset) == [("first", {"classes": [3]}), ("second", {"classes": [1, 0, 2]})]


def chunked_file(folder: Path) -> Path:
    return write(folder / "chunked.hdf", LAYOUTS["chunked"][0])


def test_members_stay_open_with_the_chunks_that_they_have_decompressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset, opened, get = open_hdf([chunked_file(tmp_path)]), [], h5py.Group.__getitem__
    monkeypatch.setattr(h5py.Group, "__getitem__", lambda group, name: (opened.append(name), get(group, name))[1])
    assert contents(dataset) + contents(dataset) == 2 * EXPECTED
    assert sorted(opened) == ["/inputs", "seqTags"]


def test_reading_after_a_fork(tmp_path: Path) -> None:
    dataset = open_hdf([write(tmp_path / "mapped.hdf"), chunked_file(tmp_path)])
    assert contents(dataset) == 2 * EXPECTED  # opens the parent's handles, of which the child must not make use
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, b"same" if contents(dataset) == 2 * EXPECTED else b"different")
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    assert os.read(reading, 100) == b"same"
    os.close(reading)
    assert contents(dataset) == 2 * EXPECTED


def test_a_child_opens_the_file_itself(tmp_path: Path) -> None:
    dataset = open_hdf([chunked_file(tmp_path)])
    assert contents(dataset) == EXPECTED
    (tmp_path / "chunked.hdf").unlink()  # the parent's handle still reads it
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def read() -> None:
        try:
            there.send(dataset.sequence(0))
        except DataError as error:
            there.send(str(error))

    child = context.Process(target=read)
    child.start()
    assert here.poll(timeout=30)
    assert here.recv() == f"{tmp_path / 'chunked.hdf'}: expected an HDF file, got: no such file"
    child.join()
    assert contents(dataset) == EXPECTED


def test_missing_file(tmp_path: Path) -> None:
    assert data_error(tmp_path / "none.hdf") == "expected an HDF file, got: no such file"


def test_folder_instead_of_a_file(tmp_path: Path) -> None:
    assert data_error(tmp_path) == "expected an HDF file, got a directory"


def test_text_instead_of_hdf(tmp_path: Path) -> None:
    (tmp_path / "words.hdf").write_text("first 3\nsecond 2\n")
    assert data_error(tmp_path / "words.hdf").startswith("expected an HDF5 file, got something else")
    (tmp_path / "empty.hdf").touch()
    assert data_error(tmp_path / "empty.hdf") == "expected an HDF5 file, got an empty file"
    (tmp_path / "words.py").write_text("words = []")
    assert data_error(tmp_path / "words.py").endswith(f"got something else (a class or function in it: {tmp_path}/words.py:NAME)")
    assert data_error(tmp_path / "*.hdf").endswith(
        f"got: no such file (a list of the files that match: sorted(glob.glob('{tmp_path}/*.hdf')))"
    )


def test_damaged_structure(tmp_path: Path) -> None:
    whole = write(tmp_path / "file.hdf").read_bytes()
    for number, mark in enumerate((b"SNOD", b"HEAP", b"TREE")):
        path = tmp_path / f"damaged-{number}.hdf"
        path.write_bytes(whole.replace(mark, b"    "))
        assert data_error(path).startswith("expected a whole HDF5 file, got a damaged one"), mark


def test_damaged_values_are_noticed_when_they_are_read(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", laid_out("inputs", fletcher32=True, chunks=(5, 2)))
    whole = path.read_bytes()
    assert FRAMES.tobytes() in whole
    path.write_bytes(whole.replace(FRAMES.tobytes(), (FRAMES + 1).tobytes()))
    dataset = open_hdf([path])
    with pytest.raises(DataError, match=r"file.hdf: cannot read sequence 1 of /inputs: "):
        dataset.sequence(1)


def remove(*names: str) -> Change:
    def change(file: h5py.File) -> None:
        for name in names:
            del file[name]

    return change


def group(name: str) -> Change:
    def change(file: h5py.File) -> None:
        del file[name]
        file.create_group(name)

    return change


def attribute(name: str, value: object, of: str = "targets/size") -> Change:
    def change(file: h5py.File) -> None:
        file[of].attrs[name] = value

    return change


def sparse_inputs(dim: object) -> Change:
    def change(file: h5py.File) -> None:
        put("inputs", numpy.arange(5))(file)
        file.attrs["inputPattSize"] = dim

    return change


def lists(file: h5py.File) -> None:
    del file["inputs"]
    file.create_dataset("inputs", (5,), h5py.vlen_dtype("i4"))


def twice(file: h5py.File) -> None:
    file["targets/data/data"] = CLASSES


MALFORMED: dict[str, tuple[Change, str]] = {
    "no lengths": (remove("seqLengths"), "expected /seqLengths, got only 'inputs', 'seqTags', 'targets' in /"),
    "no tags": (remove("seqTags"), "expected /seqTags, got only 'inputs', 'seqLengths', 'targets' in /"),
    "no data": (
        remove("inputs", "targets"),
        "expected /inputs or /targets/data (the layout of RETURNN's HDFDataset), got only 'seqLengths', 'seqTags'",
    ),
    "nothing": (remove("inputs", "targets", "seqTags", "seqLengths"), "expected /inputs or /targets/data"),
    "no target data": (remove("targets/data"), "expected /targets/data, got only 'labels', 'size' in /targets"),
    "no target sizes": (remove("targets/size"), "expected /targets/size, got only 'data', 'labels' in /targets"),
    "no size of one target": (
        group("targets/size"),
        "expected an integer as attribute classes of /targets/size, got None",
    ),
    "size is text": (attribute("classes", "four"), "expected an integer as attribute classes of /targets/size, got 'four'"),
    "size is empty": (attribute("classes", numpy.zeros(0, int)), "expected an integer as attribute classes of /targets/size"),
    "input size is text": (sparse_inputs("ten"), "expected an integer as attribute inputPattSize of /, got 'ten'"),
    "data twice": (twice, "expected 'data' once, got it as /inputs and as /targets/data/data"),
    "lengths do not add up": (
        put("seqLengths", numpy.array([[3, 1], [3, 3]])),
        "expected the lengths in /seqLengths, column 0, to add up to the 5 frames of /inputs, got 6",
    ),
    "lengths of a target do not add up": (
        put("seqLengths", numpy.array([[3, 1], [2, 2]])),
        "expected the lengths in /seqLengths, column 1, to add up to the 4 frames of /targets/data/classes, got 3",
    ),
    "negative lengths": (
        put("seqLengths", numpy.array([[6, 1], [-1, 3]])),
        "expected lengths of 0 or more in /seqLengths, got -1",
    ),
    "huge lengths": (
        put("seqLengths", numpy.array([[2**63, 1], [2, 3]], dtype=numpy.uint64)),
        "expected lengths below 2**31 in /seqLengths, got 9223372036854775808",
    ),
    "float lengths": (
        put("seqLengths", numpy.array([[3.0, 1.0], [2.0, 3.0]])),
        "expected integers of shape (sequences, keys) in /seqLengths, got float64 (2, 2)",
    ),
    "NaN lengths": (
        put("seqLengths", numpy.array([[3.0, numpy.nan], [2.0, 3.0]])),
        "expected integers of shape (sequences, keys) in /seqLengths, got float64 (2, 2)",
    ),
    "lengths are text": (
        put("seqLengths", numpy.array([[b"3", b"1"], [b"2", b"3"]])),
        "expected integers of shape (sequences, keys) in /seqLengths, got |S1 (2, 2)",
    ),
    "lengths of rank 3": (
        put("seqLengths", numpy.zeros((2, 2, 1), int)),
        "expected integers of shape (sequences, keys) in /seqLengths, got int64 (2, 2, 1)",
    ),
    "lengths are a scalar": (put("seqLengths", 3), "expected /seqLengths to have a first axis to count on, got a scalar"),
    "too few columns": (
        put("seqLengths", numpy.array([[3], [2]])),
        "expected 2 columns in /seqLengths (for data, classes), got 1",
    ),
    "too many columns": (
        put("seqLengths", numpy.array([[3, 1, 0], [2, 3, 0]])),
        "expected 2 columns in /seqLengths (for data, classes), got 3",
    ),
    "too many tags": (
        put("seqTags", numpy.array([b"a", b"b", b"c"])),
        "expected 2 tags in /seqTags as in /seqLengths, got 3",
    ),
    "too few tags": (put("seqTags", numpy.array([b"a"])), "expected 2 tags in /seqTags as in /seqLengths, got 1"),
    "numbers as tags": (put("seqTags", numpy.arange(2)), "expected strings of shape (number,) in /seqTags, got int64 (2,)"),
    "one tag": (put("seqTags", "first"), "expected /seqTags to have a first axis to count on, got a scalar"),
    "numbers as labels": (
        put("targets/labels/classes", numpy.arange(4)),
        "expected strings of shape (number,) in /targets/labels/classes, got int64 (4,)",
    ),
    "scalar data": (put("inputs", 3.0), "expected /inputs to have a first axis to count on, got a scalar"),
    "texts with two axes": (
        put("inputs", numpy.full((5, 2), b"a")),
        "expected texts of shape (frames,) in /inputs, got the shape",
    ),
    "records as data": (put("inputs", numpy.zeros(5, [("a", "i4")])), "expected numbers or strings in /inputs, got dtype"),
    "lists as data": (lists, "expected numbers or strings in /inputs, got dtype object"),
    "inputs are a group": (group("inputs"), "expected /inputs to be a dataset, got a group"),
    "a target is a group": (group("targets/data/classes"), "expected /targets/data/classes to be a dataset, got a group"),
    "lengths are a group": (group("seqLengths"), "expected /seqLengths to be a dataset, got a group"),
    "tags are a group": (group("seqTags"), "expected /seqTags to be a dataset, got a group"),
    "targets are a dataset": (put("targets", CLASSES), "expected /targets to be a group, got a dataset"),
    "target data are a dataset": (put("targets/data", CLASSES), "expected /targets/data to be a group, got a dataset"),
    "link to nowhere": (put("inputs", h5py.SoftLink("/nowhere")), "expected /nowhere, the target of the link /inputs, got: "),
    "link to itself": (put("targets", h5py.SoftLink("/targets")), "expected /targets, the target of the link /targets, got: "),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused(tmp_path: Path, case: str) -> None:
    change, message = MALFORMED[case]
    assert data_error(write(tmp_path / "file.hdf", change)).startswith(message)
