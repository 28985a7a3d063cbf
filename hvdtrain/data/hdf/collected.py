"""What an HDF writer has been given so far: each key in a file of its own, until all is written at the end."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, BinaryIO

import h5py
import numpy

from hvdtrain.data.hdf.compression import chunk_length
from hvdtrain.data.types import Array

BLOCK = 64 << 20
"""Bytes copied at once."""

TEXTS = 10_000
"""Strings copied at once."""


class Numbers:
    """The frames of one key so far: values in a file, lengths in memory."""

    def __init__(self, file: BinaryIO, first: Array) -> None:
        self.file = file
        self.shape = first.shape[1:]
        self.dtype = first.dtype.newbyteorder("=")
        self.lengths = array("i")
        self.largest = 0

    def append(self, values: Array) -> None:
        self.file.write(numpy.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.lengths.append(len(values))
        if not self.shape and self.dtype.kind in "iu" and len(values):
            self.largest = max(self.largest, int(values.max()))

    def write(self, file: h5py.File, name: str, storage: Mapping[str, Any]) -> None:
        """Copy what was collected into a dataset."""
        total = sum(self.lengths)
        row = math.prod(self.shape)
        step = max(1, BLOCK // max(1, row * self.dtype.itemsize))
        if storage and total * row:
            length = chunk_length(total, len(self.lengths), row * self.dtype.itemsize)
            step = max(1, step // length) * length  # whole chunks: none is compressed twice
            storage = {**storage, "chunks": (length, *self.shape)}
        else:
            storage = {}
        dataset = file.create_dataset(name, (total, *self.shape), self.dtype, **storage)
        with open(self.file.name, "rb") as collected:
            for start in range(0, total, step):
                rows = min(step, total - start)
                block = numpy.fromfile(collected, self.dtype, rows * row)
                dataset[start : start + rows] = block.reshape(rows, *self.shape)


class Texts:
    """The strings of one key so far: in a file, each with a zero byte behind it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file
        self.shape = ()
        self.dtype = numpy.dtype(object)
        self.lengths = array("i")
        self.largest = 0

    def append(self, values: Array) -> None:
        self.file.write(b"".join(text.encode("utf-8") + b"\0" for text in values.tolist()))
        self.lengths.append(len(values))

    def write(self, file: h5py.File, name: str, storage: Mapping[str, Any]) -> None:
        """Copy what was collected into a dataset of strings of variable length, as RETURNN writes them.

        HDF5 stores references in the dataset and the strings elsewhere, so compressing it would gain nothing.
        """
        total = sum(self.lengths)
        dataset = file.create_dataset(name, (total,), h5py.string_dtype("utf-8"))
        texts = _zero_terminated(self.file.name)
        for start in range(0, total, TEXTS):
            block = list(islice(texts, TEXTS))
            dataset[start : start + len(block)] = numpy.array(block, dtype=object)


def _zero_terminated(path: str) -> Iterator[bytes]:
    rest = b""
    with open(path, "rb") as collected:
        while block := collected.read(1 << 20):
            *whole, rest = (rest + block).split(b"\0")
            yield from whole
