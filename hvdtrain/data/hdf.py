"""HDF files in RETURNN's layout, read through a memory map where the layout allows it.

A file holds the sequences of each data key one behind the other: `/inputs` (key 'data') and `/targets/data/<key>`, with
`/seqLengths` (num_sequences, number of keys) and `/seqTags`. Opening reads the lengths, in one read, and nothing else.
A contiguous dataset is mapped: a sequence is then a view of the page cache, which all ranks of a host share. What is
chunked or compressed goes through h5py.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.batches import pad
from hvdtrain.data.compression import load_filters
from hvdtrain.data.external import check_place
from hvdtrain.data.gather import Memory, Part, gather
from hvdtrain.data.types import Array, External, Padded, Stream
from hvdtrain.data.unchanged import Identity, check_same, identity
from hvdtrain.errors import DataError

BLOCK = 1 << 20
"""Sequences whose lengths are read at once."""

MANY = 8
"""Fewer sequences than this from each of several files are read one by one: looking for more at once takes longer then."""


class HDFDataset:
    """The sequences of one or several HDF files, one file after the other.

    All files have the data keys of the first one, with the same dimensions; further keys of a later file are ignored.

    Attributes:
        mapped: the data keys that are read through memory maps in all files.
    """

    def __init__(self, files: list[HDFFile]) -> None:
        self._files = files
        self.streams: Mapping[str, Stream] = files[0].streams
        self.lengths: Mapping[str, Array] = files[0].lengths
        if len(files) > 1:
            self.lengths = {key: numpy.concatenate([file.lengths[key] for file in files]) for key in self.streams}
        self.mapped = frozenset(key for key in self.streams if all(key in file.mapped for file in files))
        self._memory = Memory()
        self._first = numpy.cumsum([0] + [file.num_sequences for file in files]).tolist()

    @property
    def num_sequences(self) -> int:
        return int(self._first[-1])

    def sequence(self, index: int) -> dict[str, Array]:
        return self._sequence(index, self.streams)

    def _sequence(self, index: int, keys: Iterable[str]) -> dict[str, Array]:
        which = bisect_right(self._first, index) - 1
        return self._files[which].sequence(index - self._first[which], keys)

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Some sequences as a batch, gathered at once where they lie in mapped files, and not in too many."""
        if len(self._files) == 1:
            return self._gathered(indices, [(self._files[0], numpy.arange(len(indices)), indices)])
        which = numpy.searchsorted(self._first, indices, side="right") - 1
        numbers = numpy.unique(which).tolist()
        if len(numbers) * MANY > len(indices):
            sequences = [self.sequence(index) for index in indices.tolist()]
            return {key: pad([sequence[key] for sequence in sequences]) for key in self.streams}
        rows = [numpy.flatnonzero(which == number) for number in numbers]
        places = [(self._files[n], here, indices[here] - self._first[n]) for n, here in zip(numbers, rows, strict=True)]
        return self._gathered(indices, places)

    def _gathered(self, indices: Array, places: list[tuple[HDFFile, Array, Array]]) -> dict[str, Padded]:
        """A batch; for each file, the rows that come from it, and which of its sequences they are."""
        batch = {}
        for key in self.streams:
            if key in self.mapped:
                lengths = self.lengths[key][indices]
                parts = [Part(file.frames(key), rows, file.starts(key)[inside]) for file, rows, inside in places]
                batch[key] = Padded(gather(parts, lengths, self._memory), lengths)
            else:
                batch[key] = pad([self._sequence(index, [key])[key] for index in indices.tolist()])
        return batch

    def tags(self, indices: Sequence[int]) -> list[str]:
        tags = [""] * len(indices)
        which = numpy.searchsorted(self._first, indices, side="right") - 1
        for number in numpy.unique(which):
            places = numpy.flatnonzero(which == number)
            inside = numpy.asarray(indices)[places] - self._first[number]
            for place, tag in zip(places, self._files[number].tags(inside), strict=True):
                tags[place] = tag
        return tags

    def all_tags(self, start: int = 0, stop: int | None = None) -> Array:
        """The tags of sequences `start` to before `stop` as UTF-8: numpy bytes of shape (number,), read in bulk."""
        stop = self.num_sequences if stop is None else stop
        parts = []
        for first, file in zip(self._first, self._files, strict=False):
            inside = slice(max(0, start - first), min(file.num_sequences, stop - first))
            if inside.start < inside.stop:
                parts.append(file.all_tags(inside.start, inside.stop))
        return numpy.concatenate(parts) if parts else numpy.zeros(0, dtype="S1")

    def close(self) -> None:
        for file in self._files:
            file.close()

    def how_read(self) -> str:
        """For the log: which keys are mapped and which are read through h5py."""
        mapped = sorted({key for file in self._files for key in self.streams if key in file.mapped})
        through = sorted({key for file in self._files for key in self.streams if key not in file.mapped})
        parts = [f"{', '.join(mapped)} memory-mapped"] if mapped else []
        return "; ".join(parts + ([f"{', '.join(through)} read through h5py"] if through else []))


def open_hdf(paths: Sequence[str | os.PathLike[str]], external: External = "refuse") -> HDFDataset:
    """Open HDF files as one dataset.

    Args:
        external: whether to read other files where these lead to them.

    Raises:
        DataError: a file is missing, no HDF5 file, damaged, not in this layout, or does not go with the first one.
    """
    files: list[HDFFile] = []
    for path in paths:
        file = HDFFile(Path(path), external)
        files.append(file)
        for key, stream in files[0].streams.items():
            other = file.streams.get(key)
            if other is None:
                raise DataError(f"{path}: expected the data key {key!r} as in {paths[0]}, got only {_names(file.streams)}")
            if (other.dim, other.shape, other.sparse) != (stream.dim, stream.shape, stream.sparse):
                raise DataError(
                    f"{path}: expected dimension {stream.dim} and frames of shape {stream.shape} in {key!r} as in {paths[0]}, "
                    f"got dimension {other.dim} and shape {other.shape}"
                )
    if not files:
        raise DataError("HDFDataset: expected at least one file, got none")
    return HDFDataset(files)


class HDFFile:
    """One file: opened, checked, indexed. Sequences are counted from 0.

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
        with _open(path) as file:
            self._identity = _identity(file)
            try:
                self._index(file)
            except (OSError, RuntimeError, KeyError, ValueError) as error:  # what h5py raises where the structure is damaged
                raise DataError(f"{path}: expected a whole HDF5 file, got a damaged one: {error}") from None
        self.mapped = frozenset(self._arrays)

    def sequence(self, index: int, keys: Iterable[str]) -> dict[str, Array]:
        """The arrays of one sequence; views of the file where it is mapped."""
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
                values = numpy.array([_text(value) for value in values], dtype=object)
            result[key] = values
        return result

    def frames(self, key: str) -> Array:
        """All frames of a mapped key, one sequence behind the other."""
        return self._arrays[key]

    def starts(self, key: str) -> Array:
        """Where each sequence's frames begin, and where the last one's end: int64 of shape (num_sequences + 1,)."""
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
        texts = [_text(value) for value in few]
        return [texts[place] for place in places]

    def all_tags(self, start: int, stop: int) -> Array:
        """The tags of sequences `start` to before `stop` as numpy bytes; cut at the first zero byte, as by `tags`."""
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
        """Let go of the file; what was mapped stays valid for those who still hold a view."""
        self._arrays = {}
        if self._handle is not None:
            self._handle.close()
            self._handle = None

    def _array(self, key: str) -> Any:
        """What `key` is sliced from, opened by the process that reads: handles of h5py do not survive a fork."""
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
            handle = _open(self.path)
            try:
                check_same(self.path, self._identity, _identity(handle))  # the index is that of the file opened at the start
            except DataError:
                handle.close()
                raise
            self._handle = handle
        return self._handle

    def _unreadable(self, what: str, error: OSError) -> DataError:
        """That something cannot be read: because the file is another by now, or damaged."""
        try:
            check_same(self.path, self._identity, identity(self.path.stat()))
        except OSError as gone:
            return DataError(f"{self.path}: cannot read {what}: {gone.strerror}")
        except DataError as changed:
            return changed
        return DataError(f"{self.path}: cannot read {what}: {error}")

    def _index(self, file: h5py.File) -> None:
        """Find the sequences of every data key, and check that everything fits together."""
        path = self.path
        for name in _names_read(file):
            check_place(path, file, name, self._external)
        sources = _sources(path, file)
        self.lengths = _lengths(path, file, sources)
        self.num_sequences = len(next(iter(self.lengths.values())))
        for number, (key, dataset) in enumerate(sources.items()):
            self._names[key] = _name_of(file, key)
            load_filters(path, dataset)
            self.streams[key] = _stream(path, file, key, dataset)
            starts = numpy.zeros(self.num_sequences + 1, dtype=numpy.int64)
            starts[1:] = self.lengths[key]  # in place: numpy would make a copy to sum up integers of another size
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
        tags = _strings(path, file, "seqTags")
        if len(tags) != self.num_sequences:
            raise DataError(f"{path}: expected {self.num_sequences} tags in /seqTags as in /seqLengths, got {len(tags)}")


def _identity(file: h5py.File) -> Identity:
    """That of the very file that is open, whatever lies under its name by now."""
    return identity(os.fstat(file.id.get_vfd_handle()))


def _names_read(file: h5py.File) -> Iterator[str]:
    """Everything in a file that is read, groups before what is in them."""
    yield from ("inputs", "labels", "seqLengths", "seqTags", "targets", "targets/data", "targets/size", "targets/labels")
    for folder in ("targets/data", "targets/labels"):
        parent = file.get(folder)
        yield from (f"{folder}/{name}" for name in (parent if isinstance(parent, h5py.Group) else ()))


def _open(path: Path) -> h5py.File:
    if not path.exists():
        raise DataError(f"{path}: expected an HDF file, got: no such file")
    if path.is_dir():
        raise DataError(f"{path}: expected an HDF file, got a directory")
    try:
        return h5py.File(path, "r")
    except OSError as error:
        if h5py.is_hdf5(path):
            raise DataError(f"{path}: expected a whole HDF5 file, got a damaged one: {error}") from None
        raise DataError(f"{path}: expected an HDF5 file, got something else ({error})") from None


def _sources(path: Path, file: h5py.File) -> dict[str, h5py.Dataset]:
    """The dataset of every data key, in the order of the columns of /seqLengths: inputs first, then targets by name."""
    sources = {}
    if "inputs" in file:
        sources["data"] = _dataset(path, file, "inputs")
    if "targets" in file:
        if not isinstance(_within(path, file, "targets"), h5py.Group):
            raise DataError(f"{path}: expected /targets to be a group, got a dataset")
        group = _within(path, file, "targets/data")
        if not isinstance(group, h5py.Group):
            raise DataError(f"{path}: expected /targets/data to be a group, got a dataset")
        for key in sorted(group):
            if key in sources:
                raise DataError(f"{path}: expected 'data' once, got it as /inputs and as /targets/data/data")
            sources[key] = _dataset(path, file, f"targets/data/{key}")
    if not sources:
        raise DataError(
            f"{path}: expected /inputs or /targets/data (the layout of RETURNN's HDFDataset), got only {_names(file)}"
        )
    return sources


def _name_of(file: h5py.File, key: str) -> str:
    """Where a data key's values are; the name that h5py gives them is that in another file, where a link leads there."""
    return "/inputs" if key == "data" and "inputs" in file else f"/targets/data/{key}"


def _within(path: Path, file: h5py.File, name: str) -> h5py.Group | h5py.Dataset:
    """What lies under a name; where it may lie is for `check_place` to say."""
    folder, _, last = name.rpartition("/")
    parent = file[folder] if folder else file
    if last not in parent:
        raise DataError(f"{path}: expected /{name}, got only {_names(parent)} in {parent.name}")
    return parent[last]


def _dataset(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    """A dataset with frames, labels or the like on its first axis."""
    dataset = _within(path, file, name)
    if not isinstance(dataset, h5py.Dataset):
        raise DataError(f"{path}: expected /{name} to be a dataset, got a group")
    if not dataset.shape:
        raise DataError(f"{path}: expected /{name} to have a first axis to count on, got a scalar")
    if dataset.dtype.kind not in "biufc" and h5py.check_string_dtype(dataset.dtype) is None:
        raise DataError(f"{path}: expected numbers or strings in /{name}, got dtype {dataset.dtype}")
    return dataset


def _strings(path: Path, file: h5py.File, name: str) -> h5py.Dataset:
    dataset = _dataset(path, file, name)
    if dataset.ndim != 1 or h5py.check_string_dtype(dataset.dtype) is None:
        raise DataError(f"{path}: expected strings of shape (number,) in /{name}, got {dataset.dtype} {dataset.shape}")
    return dataset


def _lengths(path: Path, file: h5py.File, sources: dict[str, h5py.Dataset]) -> dict[str, Array]:
    """/seqLengths, checked, by data key: int32 of shape (num_sequences,). Read in blocks: it may be larger than what is kept."""
    stored = _dataset(path, file, "seqLengths")
    if stored.ndim not in (1, 2) or stored.dtype.kind not in "iu":
        raise DataError(f"{path}: expected integers of shape (sequences, keys) in /seqLengths, got {stored.dtype} {stored.shape}")
    number = len(sources) if stored.ndim == 1 else stored.shape[1]  # the oldest files: one length for all keys
    # A file without /targets may have a column for targets that are not there, for historical reasons.
    allowed = {len(sources)} | ({len(sources) + 1} if "targets" not in file else set())
    if number not in allowed:
        raise DataError(f"{path}: expected {len(sources)} columns in /seqLengths (for {', '.join(sources)}), got {number}")
    lengths = {key: numpy.empty(len(stored), dtype=numpy.int32) for key in sources}
    for start in range(0, len(stored), BLOCK):
        block: Array = stored[start : start + BLOCK]
        if block.min() < 0:
            raise DataError(f"{path}: expected lengths of 0 or more in /seqLengths, got {block.min()}")
        if block.max() > numpy.iinfo(numpy.int32).max:
            raise DataError(f"{path}: expected lengths below 2**31 in /seqLengths, got {block.max()}")
        for place, column in enumerate(lengths.values()):
            column[start : start + len(block)] = block if block.ndim == 1 else block[:, place]
    return lengths


def _stream(path: Path, file: h5py.File, key: str, dataset: h5py.Dataset) -> Stream:
    """What kind of data a dataset holds: RETURNN calls integers without a feature axis sparse."""
    sparse = dataset.ndim == 1 and dataset.dtype.kind in "iu"
    if _name_of(file, key) == "/inputs":
        dim = dataset.shape[-1] if dataset.ndim > 1 else _integer(path, "inputPattSize of /", file.attrs.get("inputPattSize", 1))
        labels = "labels"
    else:
        size = _within(path, file, "targets/size").attrs.get(key)
        dim = _integer(path, f"{key} of /targets/size", size)
        labels = f"targets/labels/{key}"
    names = tuple(_text(label) for label in _strings(path, file, labels)[:]) if labels in file else ()
    return Stream(dataset.dtype, tuple(dataset.shape[1:]), int(dim), sparse, names if names != ("dummy-label",) else ())


def _integer(path: Path, what: str, value: Any) -> int:
    """The integer, or the first of several, that an attribute holds."""
    numbers = numpy.ravel(value)
    if numbers.dtype.kind not in "iu" or not len(numbers):
        raise DataError(f"{path}: expected an integer as attribute {what}, got {value!r}")
    return int(numbers[0])


def _mapped(path: Path, dataset: h5py.Dataset) -> Array | None:
    """The dataset as an array on the mapped file, or None where its layout does not allow it."""
    if (
        dataset.external
        or dataset.is_virtual
        or dataset.dtype.hasobject
        or not dataset.dtype.isnative
        or dataset.chunks is not None
    ):
        return None
    if dataset.id.get_type() != h5py.h5t.py_create(dataset.dtype, logical=True):  # h5py converts what numpy has no type for
        return None
    if dataset.size == 0:
        return numpy.zeros(dataset.shape, dtype=dataset.dtype)
    offset = dataset.id.get_offset()
    if offset is None:  # stored inside the header
        return None
    # A plain array instead of numpy.memmap: slicing it is several times faster.
    place = path if dataset.file.filename == str(path) else dataset.file.filename  # a link may lead to another file
    return numpy.memmap(place, dtype=dataset.dtype, mode="r", offset=offset, shape=dataset.shape).view(numpy.ndarray)


def _text(value: bytes | str) -> str:
    """A stored string: UTF-8, padded with zero bytes in files of some writers."""
    text = value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value
    return text.split("\0", 1)[0]


def _names(group: Any) -> str:
    names = ", ".join(f"'{name}'" for name in group) if isinstance(group, (h5py.Group, dict)) else ""
    return names or "nothing"
