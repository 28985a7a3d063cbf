"""One HDF file in RETURNN's layout, read through a memory map if possible.

Opening a file reads only the lengths. A contiguous dataset is memory-mapped: a sequence is then a view of the page cache, which
all ranks of a host share. Chunked and compressed datasets are read through h5py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.files.unchanged import Identity, check_same, identity
from hvdtrain.data.hdf.compression import load_filters
from hvdtrain.data.hdf.layouts import (
    check_links,
    lengths_in,
    members_read,
    name_of,
    open_file,
    sources_of,
    stream_of,
    strings_in,
    texts_of,
)
from hvdtrain.data.types import Array, External, Stream
from hvdtrain.errors import DataError


class HDFFile:
    """One file: opened, checked and indexed. Sequences are counted from 0.

    Attributes:
        lengths: by data key, int32 of shape (num_sequences,).
        mapped: the data keys that are read through a memory map.
    """

    def __init__(self, path: Path, external: External = "refuse") -> None:
        self.path = path
        self._external = external
        self._handle: h5py.File | None = None
        self._process = os.getpid()
        self.num_sequences = 0
        self.streams: dict[str, Stream] = {}
        self.lengths: dict[str, Array] = {}
        self._starts: dict[str, Array] = {}
        self._names: dict[str, str] = {}
        self._arrays: dict[str, Array | h5py.Dataset] = {}
        with open_file(path) as file:
            self._identity = _identity(file)
            try:
                self._index(file)
            except (OSError, RuntimeError, KeyError, ValueError, TypeError, MemoryError) as error:  # h5py's for a damaged file
                raise DataError(f"{path}: expected a whole HDF5 file, got a damaged one: {error}") from None
        self.mapped = frozenset(self._arrays)

    def sequence(self, index: int, keys: Iterable[str]) -> dict[str, Array]:
        """The arrays of one sequence; views of the file for mapped data keys."""
        result = {}
        for key in keys:
            starts = self._starts[key]
            array = self._arrays.get(key)
            if array is None or os.getpid() != self._process:
                array = self._array(key)
            try:
                values = array[starts[index] : starts[index + 1]]
            except OSError as error:
                raise self._unreadable(f"sequence {index} of {self._names[key]}", error) from None
            if values.dtype == object:
                values = numpy.array(texts_of(self.path, self._names[key], values), dtype=object)
            result[key] = values
        return result

    def frames(self, key: str) -> Array:
        """All frames of a mapped key, one sequence after the other."""
        return self._arrays[key]

    def starts(self, key: str) -> Array:
        """The first frame of every sequence, then the number of frames: int64 of shape (num_sequences + 1,)."""
        return self._starts[key]

    def tags(self, indices: Array) -> list[str]:
        """The tags of some sequences."""
        wanted, places = numpy.unique(indices, return_inverse=True)
        stored = self._file()["seqTags"]
        try:
            if len(wanted) < 1000:
                few = stored[wanted]
            else:  # h5py looks up a long list of indices one by one
                few = stored[wanted[0] : wanted[-1] + 1][wanted - wanted[0]]
        except OSError as error:
            raise self._unreadable("/seqTags", error) from None
        texts = texts_of(self.path, "/seqTags", few)
        return [texts[place] for place in places]

    def tag_bytes(self, start: int, stop: int) -> Array:
        """The tags from `start` up to `stop` (exclusive) as numpy bytes, cut at the first zero byte as by `tags`."""
        try:
            stored: Array = self._file()["seqTags"][start:stop]
        except OSError as error:
            raise self._unreadable("/seqTags", error) from None
        if stored.dtype == object:
            stored = numpy.array([value.encode() if isinstance(value, str) else value for value in stored], dtype=bytes)
        letters = stored.view(numpy.uint8).reshape(len(stored), -1)
        ended = letters == 0
        if (ended[:, :-1] & ~ended[:, 1:]).any():
            letters[numpy.logical_or.accumulate(ended, axis=1)] = 0
        return stored

    def close(self) -> None:
        """Close the file. Views of memory-mapped data stay valid."""
        self.release()
        self._arrays = {}

    def release(self) -> None:
        """Close h5py's file, which is opened again when it is needed; another process may then write to it."""
        self._arrays = {key: array for key, array in self._arrays.items() if key in self.mapped}
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _array(self, key: str) -> Any:
        """The array or h5py dataset of a key, opened in the process that reads: handles of h5py do not survive a fork."""
        dataset = self._file()[self._names[key]]
        if key not in self._arrays:
            self._arrays[key] = dataset
        return self._arrays[key]

    def _file(self) -> h5py.File:
        if self._process != os.getpid():
            self._process = os.getpid()
            self._handle = None
            self._arrays = {key: array for key, array in self._arrays.items() if key in self.mapped}
        if self._handle is None:
            handle = open_file(self.path)
            try:
                check_same(self.path, self._identity, _identity(handle))  # the index is of the file that was opened first
            except DataError:
                handle.close()
                raise
            self._handle = handle
        return self._handle

    def _unreadable(self, what: str, error: OSError) -> DataError:
        """The error for something that cannot be read: the file was replaced or changed, or is damaged."""
        try:
            check_same(self.path, self._identity, identity(self.path.stat()))
        except OSError as gone:
            return DataError(f"{self.path}: cannot read {what}: {gone.strerror}")
        except DataError as changed:
            return changed
        return DataError(f"{self.path}: cannot read {what}: {error}")

    def _index(self, file: h5py.File) -> None:
        """Find the sequences of every data key, and check that the parts of the file are consistent."""
        path = self.path
        for name in members_read(file):
            check_links(path, file, name, self._external)
        sources = sources_of(path, file)
        self.lengths = lengths_in(path, file, sources)
        self.num_sequences = len(next(iter(self.lengths.values())))
        for number, (key, dataset) in enumerate(sources.items()):
            self._names[key] = name_of(file, key)
            load_filters(path, dataset)
            self.streams[key] = stream_of(path, file, key, dataset)
            starts = numpy.zeros(self.num_sequences + 1, dtype=numpy.int64)
            starts[1:] = self.lengths[key]  # in place: cumsum of int32 would make a copy
            numpy.cumsum(starts, out=starts)
            if starts[-1] != len(dataset):
                raise DataError(
                    f"{path}: expected the lengths in /seqLengths, column {number}, to add up to the {len(dataset)} frames "
                    f"of {self._names[key]}, got {starts[-1]}"
                )
            self._starts[key] = starts
            mapped = _mapped(path, dataset)
            if mapped is not None:
                self._arrays[key] = mapped
        tags = strings_in(path, file, "seqTags")
        if len(tags) != self.num_sequences:
            raise DataError(f"{path}: expected {self.num_sequences} tags in /seqTags as in /seqLengths, got {len(tags)}")


def _identity(file: h5py.File) -> Identity:
    """The identity of the file that is open, which may have been replaced since."""
    return identity(os.fstat(file.id.get_vfd_handle()))


def _mapped(path: Path, dataset: h5py.Dataset) -> Array | None:
    """The dataset as a memory-mapped array, or None if its layout does not allow it."""
    if (
        dataset.external
        or dataset.is_virtual
        or dataset.dtype.hasobject
        or not dataset.dtype.isnative
        or dataset.chunks is not None
    ):
        return None
    if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):  # a type that numpy lacks, which h5py converts
        return None
    if dataset.size == 0:
        return numpy.zeros(dataset.shape, dtype=dataset.dtype)
    offset = dataset.id.get_offset()
    if offset is None:  # stored in the header
        return None
    # A plain array instead of a numpy.memmap: slicing it is several times faster.
    place = path if dataset.file.filename == str(path) else dataset.file.filename  # a link may lead to another file
    return numpy.memmap(place, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape).view(numpy.ndarray)
