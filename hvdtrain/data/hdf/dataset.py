"""HDF files in RETURNN's layout as one dataset."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy

from hvdtrain.data.batches import pad
from hvdtrain.data.dataset import Dataset, concatenated_tag_bytes, concatenated_tags
from hvdtrain.data.hdf.file import HDFFile
from hvdtrain.data.hdf.gather import Memory, Part, gather
from hvdtrain.data.hdf.layouts import names_in
from hvdtrain.data.types import Array, External, Padded
from hvdtrain.errors import DataError

SEQUENCES_PER_FILE = 8
"""If a batch has fewer sequences per file than this, they are read one by one, which is faster then than file by file."""


class HDFDataset(Dataset):
    """The sequences of one or several HDF files, one file after the other.

    All files have the data keys of the first one, with the same dimensions; further keys of a later file are ignored.
    """

    def __init__(self, files: list[HDFFile]) -> None:
        self._files = files
        self.streams = files[0].streams
        self.lengths = files[0].lengths
        if len(files) > 1:
            self.lengths = {key: numpy.concatenate([file.lengths[key] for file in files]) for key in self.streams}
        self.mapped = frozenset(key for key in self.streams if all(key in file.mapped for file in files))
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
        return self._files[which].sequence(index - self._first[which], keys)

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Gathers sequences from memory maps file by file, unless they are spread over too many files."""
        if len(self._files) == 1:
            return self._gathered(indices, [(self._files[0], numpy.arange(len(indices)), indices)])
        which = numpy.searchsorted(self._first, indices, side="right") - 1
        numbers = numpy.unique(which).tolist()
        if len(numbers) * SEQUENCES_PER_FILE > len(indices):
            return super().padded(indices)
        rows = [numpy.flatnonzero(which == number) for number in numbers]
        places = [(self._files[n], here, indices[here] - self._first[n]) for n, here in zip(numbers, rows, strict=True)]
        return self._gathered(indices, places)

    def _gathered(self, indices: Array, places: list[tuple[HDFFile, Array, Array]]) -> dict[str, Padded]:
        """A batch; `places` has each file, the rows of the batch that come from it, and their indices in the file."""
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
        return concatenated_tags(indices, self._first, lambda number, inside: self._files[number].tags(inside))

    def tag_bytes(self, start: int, stop: int) -> Array:
        return concatenated_tag_bytes(start, stop, self._first, lambda number, *inside: self._files[number].tag_bytes(*inside))

    def close(self) -> None:
        for file in self._files:
            file.close()

    def release(self) -> None:
        for file in self._files:
            file.release()

    def how_read(self) -> str:
        """Which data keys are memory-mapped and which are read through h5py."""
        mapped = sorted({key for file in self._files for key in self.streams if key in file.mapped})
        through = sorted({key for file in self._files for key in self.streams if key not in file.mapped})
        parts = [f"{', '.join(mapped)} memory-mapped"] if mapped else []
        return "; ".join(parts + ([f"{', '.join(through)} read through h5py"] if through else []))


def open_hdf(paths: Sequence[str | os.PathLike[str]], external: External = "refuse") -> HDFDataset:
    """Open HDF files as one dataset.

    Args:
        external: whether to read other files that these refer to.

    Raises:
        DataError: a file is missing, not an HDF5 file, damaged, not in this layout, or does not match the first one.
    """
    files: list[HDFFile] = []
    for path in paths:
        file = HDFFile(Path(path), external)
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
    return HDFDataset(files)
