"""Small HDF files that tests write and change, and those that RETURNN wrote."""

import gc
import os
import resource
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy
import pytest

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError

BY_RETURNN = Path(__file__).resolve().parent / "data" / "hdf" / "by_returnn"
"""Files that RETURNN wrote: a, b and e with SimpleHDFWriter, c with HDFDatasetWriter."""

FRAMES = numpy.arange(10, dtype=numpy.float32).reshape(5, 2)
CLASSES = numpy.array([3, 1, 0, 2], dtype=numpy.int32)

Change = Callable[[h5py.File], None]


def write(path: Path, change: Change | None = None, **options: object) -> Path:
    """A small file of two sequences as RETURNN lays it out, with a change."""
    with h5py.File(path, "w", **options) as file:
        file["inputs"] = FRAMES
        file["seqLengths"] = numpy.array([[3, 1], [2, 3]], dtype=numpy.int32)
        file["seqTags"] = numpy.array([b"first", b"second"])
        file["targets/data/classes"] = CLASSES
        file.create_group("targets/size").attrs["classes"] = [4, 1]
        file["targets/labels/classes"] = numpy.array([b"w", b"x", b"y", b"z"])
        file.attrs["inputPattSize"] = 2
        if change is not None:
            change(file)
    return path


def put(name: str, value: object) -> Change:
    """Puts something else (a value, a link) in a dataset's place."""

    def change(file: h5py.File) -> None:
        del file[name]
        if value is not None:
            file[name] = value

    return change


def laid_out(name: str, **layout: object) -> Change:
    """Stores a dataset's values in another layout."""

    def change(file: h5py.File) -> None:
        values = file[name][:]
        del file[name]
        file.create_dataset(name, data=values, **layout)

    return change


def contents(dataset: Dataset) -> list[tuple[str, dict[str, list]]]:
    """Everything in it: tags, and values by key."""
    tags = dataset.tags(range(dataset.num_sequences))
    sequences = [dataset.sequence(index) for index in range(dataset.num_sequences)]
    return [
        (tag, {key: values.tolist() for key, values in sequence.items()}) for tag, sequence in zip(tags, sequences, strict=True)
    ]


@contextmanager
def free_descriptors(number: int) -> Iterator[None]:
    """This process may open so many more files."""
    gc.collect()  # which closes those of other tests
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(number)]
    spare = os.open(os.devnull, os.O_RDONLY)
    for descriptor in [*held, spare]:
        os.close(descriptor)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, before[1]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def data_error(path: Path) -> str:
    """The message with which a file is refused. It names the file."""
    with pytest.raises(DataError) as caught:
        open_hdf([path])
    message = str(caught.value)
    assert message.startswith(f"{path}: expected ")
    return message.removeprefix(f"{path}: ")


EXPECTED = [
    ("first", {"data": [[0, 1], [2, 3], [4, 5]], "classes": [3]}),
    ("second", {"data": [[6, 7], [8, 9]], "classes": [1, 0, 2]}),
]


def frames_of_epochs(path: Path, epochs: int) -> Counter[tuple[int, int]]:
    """All frames of a file's data, by their checksums, once in every epoch."""
    dataset = open_hdf([str(path)])
    frames = Counter(
        zlib.crc32(frame.tobytes()) for index in range(dataset.num_sequences) for frame in dataset.sequence(index)["data"]
    )
    dataset.close()
    return Counter({(epoch, frame): count for epoch in range(1, epochs + 1) for frame, count in frames.items()})
