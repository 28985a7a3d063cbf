"""HDF files that lead to other files: refused unless a key allows it, and never read as zeros where something is missing."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import h5py
import numpy
import pytest
from hdf_files import CLASSES, EXPECTED, FRAMES, Change, contents, data_error, free_descriptors, laid_out, put, write

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.opening import open_dataset
from hvdtrain.errors import DataError


def virtual(name: str, other: str, source: str) -> Change:
    def change(file: h5py.File) -> None:
        shape, dtype = file[name].shape, file[name].dtype
        layout = h5py.VirtualLayout(shape, dtype)
        layout[:] = h5py.VirtualSource(other, source, shape)
        del file[name]
        file.create_virtual_dataset(name, layout)

    return change


def stored_in(path: Path, size: int = 40) -> Change:
    def change(file: h5py.File) -> None:
        del file["inputs"]
        file.create_dataset("inputs", (5, 2), "f4", external=[(str(path), 0, size)])

    return change


def refused(path: Path) -> str:
    with pytest.raises(DataError) as caught:
        open_hdf([path], "follow")
    assert str(caught.value).startswith(f"{path}: expected ")
    return str(caught.value).removeprefix(f"{path}: ")


ALLOWED = "(allow_external in the dataset dict allows it)"
LINK = f"to be in this file, got a link to another file {ALLOWED}"
ELSEWHERE = f"to be stored in this file, got a dataset whose values are stored in other files {ALLOWED}"
NAMES = ["inputs", "targets/data/classes", "targets/data", "targets", "seqLengths", "seqTags", "targets/labels/classes"]


@pytest.mark.parametrize("name", NAMES)
def test_links_are_followed_where_allowed(tmp_path: Path, name: str) -> None:
    write(tmp_path / "other.hdf")
    own = put(name, h5py.ExternalLink("other.hdf", f"/{name}"))
    path = write(tmp_path / "file.hdf", own)
    assert data_error(path) == f"expected /{name} {LINK}"
    dataset = open_hdf([path], "follow")
    assert contents(dataset) == EXPECTED
    assert dataset.how_read() == "classes, data memory-mapped"  # each key in the file where it is


def test_links_by_a_detour_are_not_followed(tmp_path: Path) -> None:
    def detour(file: h5py.File) -> None:
        file["other"] = h5py.ExternalLink("other.hdf", "/")
        put("inputs", h5py.SoftLink("/other/inputs"))(file)

    write(tmp_path / "other.hdf")
    assert data_error(write(tmp_path / "file.hdf", detour)) == f"expected /inputs {LINK}"


def test_a_link_may_lead_to_another_name(tmp_path: Path) -> None:
    def elsewhere(file: h5py.File) -> None:
        file["shift"] = numpy.zeros(1000)
        file.move("inputs", "somewhere")

    write(tmp_path / "other.hdf", elsewhere)
    path = write(tmp_path / "file.hdf", put("inputs", h5py.ExternalLink("other.hdf", "/somewhere")))
    assert contents(open_hdf([path], "follow")) == EXPECTED


def test_the_other_file_may_be_the_larger_one(tmp_path: Path) -> None:
    frames = numpy.arange(100_000, dtype=numpy.float32).reshape(5, -1)
    write(tmp_path / "other.hdf", put("inputs", frames))
    path = write(tmp_path / "file.hdf", put("inputs", h5py.ExternalLink("other.hdf", "/inputs")))
    assert path.stat().st_size < frames.nbytes
    assert numpy.array_equal(open_hdf([path], "follow").sequence(1)["data"], frames[3:])


@pytest.mark.parametrize(("other", "name"), [("none.hdf", "/inputs"), ("other.hdf", "/none")])
def test_a_link_to_what_is_not_there(tmp_path: Path, other: str, name: str) -> None:
    write(tmp_path / "other.hdf")
    path = write(tmp_path / "file.hdf", put("inputs", h5py.ExternalLink(other, name)))
    assert refused(path).startswith(f"expected {name} in {other}, the target of the link /inputs, got: ")


@pytest.mark.parametrize("name", ["inputs", "targets/data/classes", "seqLengths"])
def test_virtual_datasets_are_read_where_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "other.hdf")
    path = write(tmp_path / "folder" / "file.hdf", virtual(name, "other.hdf", name))
    assert data_error(path) == f"expected /{name} {ELSEWHERE}"
    dataset = open_hdf([path], "follow")
    assert contents(dataset) == EXPECTED
    mapped = {"inputs": "classes memory-mapped; data read", "targets/data/classes": "data memory-mapped; classes read"}
    assert dataset.how_read() == (f"{mapped[name]} through h5py" if name in mapped else "classes, data memory-mapped")
    monkeypatch.chdir(tmp_path)  # names in it go by the file's folder
    assert contents(open_hdf([Path("folder/file.hdf")], "follow")) == EXPECTED


@pytest.mark.parametrize(("other", "source"), [("none.hdf", "inputs"), ("other.hdf", "none")])
def test_a_virtual_dataset_of_what_is_not_there(tmp_path: Path, other: str, source: str) -> None:
    write(tmp_path / "other.hdf")
    path = write(tmp_path / "file.hdf", virtual("inputs", other, source))
    with h5py.File(path) as file:
        assert file["inputs"][:].tolist() == [[0, 0]] * 5  # that is what HDF5 makes of it
    assert refused(path) == f"expected {source} in {other} as a part of /inputs, got none"


def test_parts_that_cannot_be_opened_at_the_moment_are_no_zeros(tmp_path: Path) -> None:
    layout = h5py.VirtualLayout((5, 2), "f4")
    for row in range(5):
        with h5py.File(tmp_path / f"{row}.h5", "w") as file:
            file["x"] = numpy.full((1, 2), row + 1, "f4")
        layout[row : row + 1] = h5py.VirtualSource(f"{row}.h5", "x", (1, 2))

    def change(file: h5py.File) -> None:
        del file["inputs"]
        file.create_virtual_dataset("inputs", layout)

    path = write(tmp_path / "file.hdf", change)
    with (
        free_descriptors(6),
        pytest.raises(DataError, match=r"h5: expected a file that can be opened, got the limit of \d+ open"),
    ):
        open_hdf([path], "follow")
    with free_descriptors(8):
        dataset = open_hdf([path], "follow")
        assert [values[:, 0].tolist() for values in (dataset.sequence(0)["data"], dataset.sequence(1)["data"])] == [
            [1, 2, 3],
            [4, 5],
        ]
        held = []
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(DataError, match="cannot read sequence 0 of /inputs: .*Too many open files"):
            dataset.sequence(0)
        for descriptor in held:
            os.close(descriptor)
        dataset.close()
    with h5py.File(tmp_path / "3.h5", "w") as file:
        file["x"] = numpy.zeros((2, 2), "f4")
    with pytest.raises(DataError, match="3.h5: expected the file that was opened at the start, got one of"):
        dataset.sequence(1)


@pytest.mark.parametrize(
    ("rows", "size", "message"),
    [
        (4, 5, "expected inputs in other.hdf as a part of /inputs with all of its 8 values, got the shape (5, 2) there"),
        (5, 6, "expected parts with all 12 values of /inputs, got 10"),
    ],
)
def test_a_virtual_dataset_with_less_in_its_parts(tmp_path: Path, rows: int, size: int, message: str) -> None:
    def change(file: h5py.File) -> None:
        layout = h5py.VirtualLayout((size, 2), "f4")
        layout[:rows] = h5py.VirtualSource("other.hdf", "inputs", (rows, 2))
        del file["inputs"]
        file.create_virtual_dataset("inputs", layout)

    write(tmp_path / "other.hdf")
    assert refused(write(tmp_path / "file.hdf", change)) == message


def test_an_intact_file_that_is_locked_is_not_called_damaged(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf")
    code = f"import h5py; file = h5py.File({str(path)!r}, 'a'); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"\n"
        assert refused(path).startswith("expected a file that can be opened, got one that a program locks")
        writer.communicate(b"\n")
    assert contents(open_hdf([path])) == EXPECTED


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.data.handles.MOST_OPEN", 2)
    paths = [write(tmp_path / f"{number}.hdf", laid_out("inputs", chunks=True)) for number in range(9)]
    dataset = open_hdf(paths)
    before = len(os.listdir("/proc/self/fd"))
    assert contents(dataset) == EXPECTED * 9
    assert len(os.listdir("/proc/self/fd")) - before == 2
    dataset.close()
    with free_descriptors(5), pytest.raises(DataError, match="few of its files open at a time"):
        open_hdf(paths)  # each is mapped


def test_external_storage_is_read_where_allowed(tmp_path: Path) -> None:
    (tmp_path / "raw").write_bytes(FRAMES.tobytes())
    path = write(tmp_path / "file.hdf", stored_in(tmp_path / "raw"))
    assert data_error(path) == f"expected /inputs {ELSEWHERE}"
    assert contents(open_hdf([path], "follow")) == EXPECTED


def test_external_storage_that_is_not_there_or_too_short(tmp_path: Path) -> None:
    path = write(tmp_path / "file.hdf", stored_in(tmp_path / "raw"))
    expected = f"expected {tmp_path}/raw with 40 bytes, where /inputs is stored, got: "
    assert refused(path) == expected + "no such file"
    (tmp_path / "raw").write_bytes(FRAMES.tobytes()[:39])
    assert refused(path) == expected + "39 bytes"


def test_the_key_of_the_dataset(tmp_path: Path) -> None:
    write(tmp_path / "other.hdf")
    path = write(tmp_path / "file.hdf", put("targets/data/classes", h5py.ExternalLink("other.hdf", "/targets/data/classes")))
    named = {"class": "HDFDataset", "files": str(path)}
    spec, problems = parse("train", named, {})
    assert (problems, spec.files, spec.copied) == ([], (str(path),), (str(path),))
    with pytest.raises(DataError, match=r"got a link to another file \(allow_external in the dataset dict allows it\)"):
        open_dataset(spec)
    spec, problems = parse("train", {**named, "allow_external": True}, {})
    assert (problems, spec.files, spec.copied) == ([], (str(path),), ())  # a copy would lead to other places
    dataset = open_dataset(spec)
    assert dataset.sequence(1)["classes"].tolist() == CLASSES[1:].tolist()
