"""HDF files in RETURNN's layout as one dataset, read through memory maps if possible.

Opening a file reads only the lengths. A contiguous dataset is memory-mapped: a sequence is then a view of the page cache, which
all ranks of a host share, and a batch is gathered at about the speed of copying memory. Chunked and compressed datasets are read
through h5py.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import h5py
import numpy

from hvdtrain.data.combine.files import MappedFile, open_files
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import FileStamp, check_same, file_stamp
from hvdtrain.data.handles import Handles, Opened
from hvdtrain.data.hdf.compression import load_filters
from hvdtrain.data.hdf.layouts import (
    check_links,
    damage_error,
    lengths_in,
    mapped_array,
    name_of,
    names_to_read,
    open_file,
    sources_of,
    stream_of,
    strings_in,
    texts_of,
    virtual_files,
)
from hvdtrain.data.kinds import HDFDatasetKeys
from hvdtrain.data.padding import are_short, gather, gather_packed, pack, pad
from hvdtrain.data.types import Array, External, Padded, Stream
from hvdtrain.errors import BrokenSequence, DataError


class HDFFile(MappedFile):
    """One file: opened, checked and indexed."""

    def __init__(self, path: Path, external: External = "refuse", handles: Handles | None = None) -> None:
        self.path = path
        self._external = external
        self._handles = handles or Handles()
        self._size = 0
        self.streams: dict[str, Stream] = {}
        self.lengths: dict[str, Array] = {}
        self.starts = {}
        self._names: dict[str, str] = {}
        self.frames = {}
        self._parts: dict[Path, FileStamp] = {}  # of virtual datasets
        with ExitStack() as stack:
            file = stack.enter_context(open_file(path))
            self._stamp = _stamp(file)
            try:
                for name in names_to_read(file):
                    check_links(path, file, name, external)
                    if external == "follow" and isinstance(dataset := file.get(name), h5py.Dataset):
                        for source in virtual_files(path, dataset):
                            if source not in self._parts:
                                self._parts[source] = _stamp(stack.enter_context(open_file(source)))
                self._index(file)
            except (
                OSError,
                RuntimeError,
                KeyError,
                ValueError,
                TypeError,
                MemoryError,
            ) as error:  # raised by h5py for a damaged file
                raise damage_error(path, error) from None
        self.memory_mapped = frozenset(self.frames)

    def open(self) -> Opened:
        """The file, opened again. Raises: DataError, if it is another one by now: the index is of the first one."""
        with Opened() as stack:
            stack.handle = stack.enter_context(open_file(self.path))
            check_same(self.path, self._stamp, _stamp(stack.handle))
            for source, before in self._parts.items():
                check_same(source, before, _stamp(stack.enter_context(open_file(source))))
            opened = stack.pop_all()
            opened.handle = stack.handle
            return opened

    @property
    def num_sequences(self) -> int:
        return self._size

    def sequence(self, index: int) -> dict[str, Array]:
        """Views of the file for mapped data keys."""
        return {key: self._read(index, key) for key in self.streams}

    def _read(self, index: int, key: str) -> Array:
        start = self.starts[key][index]
        stop = start + self.lengths[key][index]
        if (array := self.frames.get(key)) is not None:
            return array[start:stop]
        name = self._names[key]
        with self._reading(f"sequence {index} of {name}") as file:
            values: Array = file.member(name)[start:stop]
        return values if self.streams[key].dtype != object else numpy.array(texts_of(self.path, name, values), dtype=object)

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self.packed(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        """Short sequences of mapped data keys are gathered at once."""
        batch: dict[str, Padded] = {}
        for key, stream in self.streams.items():
            array = self.frames.get(key)
            lengths = self.lengths[key][indices]
            if array is not None and are_short(stream, lengths):
                batch[key] = (gather_packed if key in keys else gather)(array, self.starts[key][indices], lengths)
            else:
                batch[key] = (pack if key in keys else pad)([self._read(index, key) for index in indices.tolist()])
        return batch

    def tags(self, indices: Sequence[int]) -> list[str]:
        wanted, places = numpy.unique(indices, return_inverse=True)
        with self._reading("/seqTags") as file:
            stored = file.member("seqTags")
            if len(wanted) < 1000:
                few = stored[wanted]
            else:  # h5py looks up a long list of indices one by one
                few = stored[wanted[0] : wanted[-1] + 1][wanted - wanted[0]]
        texts = texts_of(self.path, "/seqTags", few)
        return [texts[position] for position in places]

    def tag_bytes(self, start: int, stop: int) -> Array:
        """The tags from `start` up to `stop` (exclusive) as numpy bytes, cut at the first zero byte as by `tags`."""
        with self._reading("/seqTags") as file:
            stored: Array = file.member("seqTags")[start:stop]
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
        self.frames = {}

    def how_read(self) -> str:
        """Which data keys are memory-mapped and which are read through h5py."""
        ways = {"memory-mapped": self.memory_mapped, "read through h5py": self.streams.keys() - self.memory_mapped}
        return "; ".join(f"{', '.join(sorted(keys))} {how}" for how, keys in ways.items() if keys)

    def release(self) -> None:
        """Close h5py's file, so that another process may write to it; it is reopened when needed."""
        self._handles.close(self)

    @contextmanager
    def _reading(self, member: str) -> Iterator[Opened]:
        """The open file. Raises: DataError, also for a failed read: the file was replaced or changed, or is damaged."""
        file = self._handles.opened(self)
        try:
            if self._parts:  # HDF5 needs a descriptor, if only for a moment, to open a part; else it reads zeros
                os.close(os.dup(file.handle.id.get_vfd_handle()))
            yield file
        except OSError as error:
            try:
                check_same(self.path, self._stamp, file_stamp(self.path.stat()))
            except OSError as gone:
                raise DataError(f"{self.path}: cannot read {member}: {gone.strerror}") from None
            raise BrokenSequence(f"{self.path}: cannot read {member}: {error}") from None

    def _index(self, file: h5py.File) -> None:
        """Find the sequences of every data key, and check that the parts of the file are consistent."""
        path = self.path
        maps = dict[Path, mmap.mmap]()
        sources = sources_of(path, file)
        self.lengths = lengths_in(path, file, sources)
        self._size = len(next(iter(self.lengths.values())))
        for number, (key, dataset) in enumerate(sources.items()):
            self._names[key] = name_of(file, key)
            load_filters(path, dataset)
            self.streams[key] = stream_of(path, file, key, dataset)
            starts = numpy.zeros(self._size + 1, dtype=numpy.int64)
            starts[1:] = self.lengths[key]  # in place: cumsum of int32 would make a copy
            numpy.cumsum(starts, out=starts)
            if starts[-1] != len(dataset):
                raise DataError(
                    f"{path}: expected the lengths in /seqLengths, column {number}, to add up to the {len(dataset)} frames "
                    f"of {self._names[key]}, got {starts[-1]}"
                )
            self.starts[key] = starts[:-1]
            mapped = mapped_array(path, dataset, maps)
            if mapped is not None:
                self.frames[key] = mapped
        tags = strings_in(path, file, "seqTags")
        if len(tags) != self._size:
            raise DataError(f"{path}: expected {self._size} tags in /seqTags as in /seqLengths, got {len(tags)}")


def _stamp(file: h5py.File) -> FileStamp:
    """The stamp of the open file, which may have been replaced since."""
    return file_stamp(os.fstat(file.id.get_vfd_handle()))


def open_hdf(paths: Sequence[str | os.PathLike[str]], external: External = "refuse") -> Dataset:
    """Open HDF files as one dataset.

    Args:
        external: whether to read other files that the files refer to.

    Raises:
        DataError: a file is missing, not an HDF5 file, damaged, not in this layout, or does not match the first one.
    """
    handles = Handles()
    return open_files("HDFDataset", list(map(str, paths)), lambda path: HDFFile(Path(path), external, handles))


def open_hdf_dataset(where: str, keys: HDFDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open the HDF files of a dataset dict. Raises: DataError."""
    return open_hdf(keys.data_files(), "follow" if keys.allow_external else "refuse")
