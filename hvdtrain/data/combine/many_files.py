"""FilesDataset: thousands of files as one dataset, of which only a few are open at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.data.batches import merged
from hvdtrain.data.combine.union import common_streams
from hvdtrain.data.dataset import Dataset, FileDatasetKeys, concatenated_tag_bytes, concatenated_tags, split
from hvdtrain.data.types import Array, Padded, Stream
from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class FilesDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "FilesDataset"`: thousands of HDF files, opened when they are needed."""

    files: list[str] = key(REQUIRED, "the HDF files")
    max_open_files: int = key(32, "the number of files that are open at a time", positive)


class FilesDataset(Dataset):
    """The sequences of all files, one file after the other, with the data keys of the first one.

    Every file is opened once at the start for its lengths, and again when one of its sequences is read.
    """

    def __init__(self, where: str, paths: Sequence[str], open_file: Callable[[str], Dataset], max_open: int) -> None:
        self._where = where
        self._paths = paths
        self._open_file = open_file
        self._max_open = max_open
        self._open: OrderedDict[int, Dataset] = OrderedDict()
        self._bounds: Array = numpy.zeros(1, dtype=numpy.int64)
        self.streams = {}
        self.lengths = {}

    def read_lengths(self) -> None:
        """Open every file once. Raises: DataError, if one is bad or does not match the first one."""
        streams: dict[str, Mapping[str, Stream]] = {}
        lengths: list[Mapping[str, Array]] = []
        sizes = []
        for number, path in enumerate(self._paths):
            file = self._open_file(path)
            streams[f"{path} (file {number})"] = file.streams
            lengths.append(file.lengths)
            sizes.append(file.num_sequences)
            file.close()
        self._bounds = numpy.cumsum([0, *sizes], dtype=numpy.int64)
        self.streams = common_streams(self._where, streams)
        self.lengths = {name: numpy.concatenate([columns[name] for columns in lengths]) for name in self.streams}

    @property
    def num_sequences(self) -> int:
        return int(self._bounds[-1])

    @property
    def num_open(self) -> int:
        """The number of files that are open now."""
        return len(self._open)

    def file_bounds(self) -> Array:
        return self._bounds

    def sequence(self, index: int) -> dict[str, Array]:
        number = int(numpy.searchsorted(self._bounds, index, side="right")) - 1
        arrays = self._file(number).sequence(index - int(self._bounds[number]))
        return {name: arrays[name].astype(stream.dtype, copy=False) for name, stream in self.streams.items()}

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Each file reads its part of the batch at once."""
        parts = [(rows, self._file(number).padded(inside)) for number, rows, inside in split(indices, self._bounds)]
        return merged(self.streams, len(indices), parts)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return concatenated_tags(indices, self._bounds, lambda number, inside: self._file(number).tags(inside.tolist()))

    def tag_bytes(self, start: int, stop: int) -> Array:
        return concatenated_tag_bytes(start, stop, self._bounds, lambda number, *inside: self._file(number).tag_bytes(*inside))

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def how_read(self) -> str:
        return f"{len(self._paths)} files, up to {self._max_open} of them open"

    def _file(self, number: int) -> Dataset:
        """An open file; to open it, the least recently used one is closed if there are too many."""
        file = self._open.get(number)
        if file is not None:
            self._open.move_to_end(number)
            return file
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        file = self._open_file(self._paths[number])
        first, end = self._bounds[number : number + 2]
        for name in self.streams:
            if name not in file.streams or not numpy.array_equal(file.lengths[name], self.lengths[name][first:end]):
                file.close()
                raise DataError(
                    f"{self._paths[number]}: expected the same lengths as at the start, got different ones in {name!r}"
                )
        self._open[number] = file
        return file


def open_files(where: str, keys: FilesDatasetKeys, open_file: Callable[[str], Dataset]) -> Dataset:
    """Open files as one dataset. Raises: DataError, if one is bad or does not match the first one."""
    dataset = FilesDataset(where, keys.data_files(), open_file, keys.max_open_files)
    dataset.read_lengths()
    return dataset
