"""HDF files in RETURNN's layout as one dataset, read through memory maps if possible.

Opening a file reads only the lengths. A contiguous dataset is memory-mapped: a sequence is then a view of the page cache, which
all ranks of a host share, and a batch is gathered at about the speed of copying memory. Chunked and compressed datasets are read
through h5py.
"""

from __future__ import annotations

import math
import mmap
import os
import weakref
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.combine.keys import FilesDatasetKeys
from hvdtrain.data.combine.parts import concatenate_tag_bytes, concatenate_tags, split
from hvdtrain.data.combine.union import FilesDataset, common_streams
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import Identity, check_same, identity
from hvdtrain.data.hdf.compression import load_filters
from hvdtrain.data.hdf.handles import Handles, Opened
from hvdtrain.data.hdf.layouts import (
    check_links,
    damage_error,
    lengths_in,
    mapped_array,
    name_of,
    names_in,
    names_to_read,
    open_file,
    sources_of,
    stream_of,
    strings_in,
    texts_of,
    virtual_files,
)
from hvdtrain.data.kinds import HDFDatasetKeys
from hvdtrain.data.padding import pack, pad
from hvdtrain.data.types import Array, External, Packed, Padded, Stream
from hvdtrain.errors import BrokenSequence, DataError

SHORT = 512
"""Sequences of up to this many bytes are gathered frame by frame in one operation; longer ones are copied one by one."""

REUSED = 1 << 16
"""Batches of at least this many bytes reuse memory; for smaller ones, numpy itself is fast."""

KEPT = 4
"""The maximal number of free pieces of memory kept for the next batches."""


class Memory:
    """Memory for batches, reused once no array refers to it.

    The system provides new memory of the size of a batch page by page, which takes longer than filling it.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []

    def empty(self, shape: tuple[int, ...], dtype: numpy.dtype[Any]) -> Array:
        """An uninitialized array."""
        size = math.prod(shape) * dtype.itemsize
        if size < REUSED:
            return numpy.empty(shape, dtype)
        try:
            piece = self._free.pop()
        except IndexError:  # the list is empty; checking first would be a race between threads
            piece = bytearray()
        if len(piece) < size:
            piece = bytearray(size + size // 4)  # room for a slightly larger batch
        # Every view refers to `root`, as numpy does not own the memory below it: `root` dies with the last view.
        root = numpy.frombuffer(piece, numpy.uint8, size)
        weakref.finalize(root, self._give_back, piece).atexit = False
        return root.view(dtype).reshape(shape)

    def _give_back(self, piece: bytearray) -> None:
        if len(self._free) < KEPT:
            self._free.append(piece)


@dataclass(frozen=True)
class FileSlice:
    """The rows of a batch that come from one array, and their first frames in it; both int64 of shape (number of rows,)."""

    array: Array
    rows: Array
    starts: Array


def gather(parts: Sequence[FileSlice], lengths: Array, memory: Memory) -> Array:
    """A batch of sequences from one array, or from several with the same dtype and shape of frames.

    Args:
        lengths: number of frames of every row.

    Returns:
        shape (rows, longest, ...), zero after the end of each row.
    """
    longest = int(lengths.max())
    first = parts[0].array
    if longest * first.dtype.itemsize * math.prod(first.shape[1:]) <= SHORT:
        return _gather_frames(parts, lengths, longest)
    values = memory.empty((len(lengths), longest, *first.shape[1:]), first.dtype)
    for part in parts:
        counts = lengths[part.rows].tolist()
        for row, start, length in zip(part.rows.tolist(), part.starts.tolist(), counts, strict=True):
            values[row, :length] = part.array[start : start + length]
            values[row, length:] = 0
    return values


def gather_packed(parts: Sequence[FileSlice], lengths: Array, memory: Memory) -> Array:
    """As `gather`, but one sequence after the other, without padding: shape (frames, ...)."""
    ends = lengths.cumsum(dtype=numpy.int64)
    begins, first = ends - lengths, parts[0].array
    is_short = int(lengths.max()) * first.dtype.itemsize * math.prod(first.shape[1:]) <= SHORT
    values = memory.empty((int(ends[-1]), *first.shape[1:]), first.dtype)
    for part in parts:
        counts = lengths[part.rows]
        if is_short:  # without a Python loop over sequences
            before = counts.cumsum(dtype=numpy.int64) - counts
            frames = numpy.arange(int(counts.sum(dtype=numpy.int64)))
            taken = _take_frames(part.array, frames + numpy.repeat(part.starts - before, counts))
            if len(parts) == 1:
                return taken
            values[frames + numpy.repeat(begins[part.rows] - before, counts)] = taken
            continue
        for begin, start, length in zip(begins[part.rows].tolist(), part.starts.tolist(), counts.tolist(), strict=True):
            values[begin : begin + length] = part.array[start : start + length]
    return values


def _gather_frames(parts: Sequence[FileSlice], lengths: Array, longest: int) -> Array:
    """Gather all frames at once, without a Python loop over sequences."""
    frames = numpy.arange(longest)
    taken = [_take_frames(part.array, part.starts[:, None] + frames) for part in parts]
    values = taken[0]
    if len(parts) > 1:
        values = numpy.empty((len(lengths), *values.shape[1:]), values.dtype)
        for part, rows in zip(parts, taken, strict=True):
            values[part.rows] = rows
    values[frames >= lengths[:, None]] = 0
    return values


def _take_frames(array: Array, places: Array) -> Array:
    """The frames at some positions; the last frame for positions beyond it."""
    if not len(array):
        return numpy.zeros((*places.shape, *array.shape[1:]), array.dtype)
    if array.flags.aligned:
        return array.take(places, axis=0, mode="clip")
    # HDF5 does not align data, and `take` would copy an unaligned array as a whole first.
    return array[numpy.minimum(places, len(array) - 1)]


class HDFFile:
    """One file: opened, checked and indexed. Sequences are counted from 0.

    Attributes:
        lengths: by data key, int32 of shape (num_sequences,).
        mapped: the data keys that are read through a memory map.
    """

    def __init__(self, path: Path, external: External = "refuse", handles: Handles | None = None) -> None:
        self.path = path
        self._external = external
        self._handles = handles or Handles()
        self.num_sequences = 0
        self.streams: dict[str, Stream] = {}
        self.lengths: dict[str, Array] = {}
        self._starts: dict[str, Array] = {}
        self._names: dict[str, str] = {}
        self._arrays: dict[str, Array] = {}
        self._parts: list[Path] = []
        with ExitStack() as stack:
            file = stack.enter_context(open_file(path))
            self._identity = _identity(file)
            try:
                for name in names_to_read(file):
                    check_links(path, file, name, external)
                    if external == "follow" and isinstance(found := file.get(name), h5py.Dataset):
                        self._parts += dict.fromkeys(virtual_files(path, found))
                for part in self._parts:
                    stack.enter_context(open_file(part))
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
        self.memory_mapped = frozenset(self._arrays)

    def open(self) -> Opened:
        """The file, opened again. Raises: DataError, if it is another one by now: the index is of the first one."""
        with Opened() as stack:
            stack.handle = stack.enter_context(open_file(self.path))
            check_same(self.path, self._identity, _identity(stack.handle))
            for part in self._parts:
                stack.enter_context(open_file(part))
            opened = stack.pop_all()
            opened.handle = stack.handle
            return opened

    def sequence(self, index: int, keys: Iterable[str]) -> dict[str, Array]:
        """The arrays of one sequence; views of the file for mapped data keys."""
        result = {}
        for key in keys:
            starts = self._starts[key]
            start, stop = starts[index], starts[index + 1]
            if (array := self._arrays.get(key)) is not None:
                result[key] = array[start:stop]
                continue
            name = self._names[key]
            with self._reading(f"sequence {index} of {name}") as file:
                values = file.member(name)[start:stop]
            if values.dtype == object:
                values = numpy.array(texts_of(self.path, name, values), dtype=object)
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
        with self._reading("/seqTags") as file:
            stored = file.member("seqTags")
            if len(wanted) < 1000:
                few = stored[wanted]
            else:  # h5py looks up a long list of indices one by one
                few = stored[wanted[0] : wanted[-1] + 1][wanted - wanted[0]]
        texts = texts_of(self.path, "/seqTags", few)
        return [texts[place] for place in places]

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
        self._arrays = {}

    def release(self) -> None:
        """Close h5py's file, so that another process may write to it; it is reopened when needed."""
        self._handles.close(self)

    @contextmanager
    def _reading(self, what: str) -> Iterator[Opened]:
        """The open file. Raises: DataError, also for a failed read: the file was replaced or changed, or is damaged."""
        with self._handles.use(self) as file:
            try:
                if self._parts:  # HDF5 needs a descriptor, if only for a moment, to open a part; else it reads zeros
                    os.close(os.dup(file.handle.id.get_vfd_handle()))
                yield file
            except OSError as error:
                try:
                    check_same(self.path, self._identity, identity(self.path.stat()))
                except OSError as gone:
                    raise DataError(f"{self.path}: cannot read {what}: {gone.strerror}") from None
                raise BrokenSequence(f"{self.path}: cannot read {what}: {error}") from None

    def _index(self, file: h5py.File) -> None:
        """Find the sequences of every data key, and check that the parts of the file are consistent."""
        path, maps = self.path, dict[Path, mmap.mmap]()
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
            mapped = mapped_array(path, dataset, maps)
            if mapped is not None:
                self._arrays[key] = mapped
        tags = strings_in(path, file, "seqTags")
        if len(tags) != self.num_sequences:
            raise DataError(f"{path}: expected {self.num_sequences} tags in /seqTags as in /seqLengths, got {len(tags)}")


def _identity(file: h5py.File) -> Identity:
    """The identity of the open file, which may have been replaced since."""
    return identity(os.fstat(file.id.get_vfd_handle()))


SEQUENCES_PER_FILE = 8
"""If a batch has fewer sequences per file than this, they are read one by one, which is then faster than file by file."""


class HDFDataset(Dataset):
    """The sequences of one or several HDF files, one file after the other.

    All files have the data keys of the first one, with the same dimensions and labels; further keys of a later file are ignored.
    A data key has the type that holds the values of all files (int16 and float32: float32); if a file has another one, the key is
    not mapped.
    """

    def __init__(self, files: list[HDFFile], streams: Mapping[str, Stream]) -> None:
        self._files = files
        self.streams = streams
        self.lengths = files[0].lengths
        if len(files) > 1:
            self.lengths = {key: numpy.concatenate([file.lengths[key] for file in files]) for key in streams}
        self._cast = {
            key: stream.dtype for key, stream in streams.items() if any(file.streams[key].dtype != stream.dtype for file in files)
        }
        self.memory_mapped = frozenset(
            key for key in streams if key not in self._cast and all(key in file.memory_mapped for file in files)
        )
        self._memory = Memory()
        self._first = numpy.cumsum([0] + [file.num_sequences for file in files]).tolist()

    @property
    def num_sequences(self) -> int:
        return int(self._first[-1])

    def file_bounds(self) -> Array:
        return numpy.array(self._first, dtype=numpy.int64)

    def sequence(self, index: int) -> dict[str, Array]:
        return self._sequence(index, self.streams)

    def _sequence(self, index: int, keys: Iterable[str]) -> dict[str, Array]:
        which = bisect_right(self._first, index) - 1
        arrays = self._files[which].sequence(index - self._first[which], keys)
        for key in self._cast.keys() & arrays.keys():
            arrays[key] = arrays[key].astype(self._cast[key], copy=False)
        return arrays

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self.packed(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        """Gathers sequences from memory maps file by file, unless they are spread over too many files."""
        places = [(self._files[0], numpy.arange(len(indices)), indices)]
        if len(self._files) > 1:
            places = [(self._files[number], rows, inside) for number, rows, inside in split(indices, self._first)]
            if len(places) * SEQUENCES_PER_FILE > len(indices):
                return super().packed(indices, keys)
        batch: dict[str, Padded] = {}
        for key in self.streams:
            if key in self.memory_mapped:
                lengths = self.lengths[key][indices]
                parts = [FileSlice(file.frames(key), rows, file.starts(key)[inside]) for file, rows, inside in places]
                if key in keys:
                    batch[key] = Packed(gather_packed(parts, lengths, self._memory), lengths)
                else:
                    batch[key] = Padded(gather(parts, lengths, self._memory), lengths)
            else:
                batch[key] = (pack if key in keys else pad)([self._sequence(index, [key])[key] for index in indices.tolist()])
        return batch

    def tags(self, indices: Sequence[int]) -> list[str]:
        return concatenate_tags(indices, self._first, lambda number, inside: self._files[number].tags(inside))

    def tag_bytes(self, start: int, stop: int) -> Array:
        return concatenate_tag_bytes(start, stop, self._first, lambda number, *inside: self._files[number].tag_bytes(*inside))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def release(self) -> None:
        for file in self._files:
            file.release()

    def how_read(self) -> str:
        """Which data keys are memory-mapped and which are read through h5py."""
        mapped = sorted({key for file in self._files for key in self.streams if key in file.memory_mapped})
        through = sorted({key for file in self._files for key in self.streams if key not in file.memory_mapped})
        parts = [f"{', '.join(mapped)} memory-mapped"] if mapped else []
        return "; ".join(parts + ([f"{', '.join(through)} read through h5py"] if through else []))


def open_hdf(paths: Sequence[str | os.PathLike[str]], external: External = "refuse") -> HDFDataset:
    """Open HDF files as one dataset.

    Args:
        external: whether to read other files that the files refer to.

    Raises:
        DataError: a file is missing, not an HDF5 file, damaged, not in this layout, or does not match the first one.
    """
    files: list[HDFFile] = []
    handles = Handles()
    for path in paths:
        file = HDFFile(Path(path), external, handles)
        files.append(file)
        for key, stream in files[0].streams.items():
            other = file.streams.get(key)
            if other is None:
                raise DataError(f"{path}: expected the data key {key!r} as in {paths[0]}, got only {names_in(file.streams)}")
            if (other.dim, other.shape, other.sparse) != (stream.dim, stream.shape, stream.sparse):
                raise DataError(
                    f"{path}: expected dimension {stream.dim} and frames of shape {stream.shape} in {key!r} as in {paths[0]}, "
                    f"got dimension {other.dim} and shape {other.shape}"
                )
    if not files:
        raise DataError("HDFDataset: expected at least one file, got none")
    if len(files) == 1:
        return HDFDataset(files, files[0].streams)
    return HDFDataset(files, common_streams("HDFDataset", {str(file.path): file.streams for file in files}))


def open_hdf_dataset(where: str, keys: HDFDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open the HDF files of a dataset dict. Raises: DataError."""
    return open_hdf(keys.data_files(), "follow" if keys.allow_external else "refuse")


def open_files_dataset(where: str, keys: FilesDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open files as one dataset. Raises: DataError, if one is bad or does not match the first one."""
    dataset = FilesDataset(where, keys.data_files(), lambda path: open_hdf([path]), keys.max_open_files)
    dataset.read_lengths()
    return dataset
