"""FilesDataset: very many files as one dataset, only a few of them open at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.data.batches import merged, padded
from hvdtrain.data.combine.tags import tag_bytes_of_several
from hvdtrain.data.combine.union import common_streams
from hvdtrain.data.types import Array, Dataset, Padded, Stream
from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class FilesDatasetKeys:
    """Keys of a dataset dict with `"class": "FilesDataset"`: very many HDF files, opened when they are needed."""

    files: list[str] = key(REQUIRED, "the HDF files")
    max_open_files: int = key(32, "how many files are open at a time", positive)

    def problems(self) -> list[str]:
        """What is wrong with the keys."""
        return [] if self.files else ["files: expected at least one file, got none"]


class FilesDataset:
    """The sequences of all files, one file behind the other, with the data keys of the first one.

    Every file is opened once at the beginning for its lengths, and again when a sequence of it is asked for.

    Attributes:
        group_bounds: where each file's sequences begin, and where those of the last one end.
    """

    def __init__(self, where: str, paths: Sequence[str], open_file: Callable[[str], Dataset], max_open: int) -> None:
        self._where = where
        self._paths = paths
        self._open_file = open_file
        self._max_open = max_open
        self._open: OrderedDict[int, Dataset] = OrderedDict()
        self.group_bounds: Array = numpy.zeros(1, dtype=numpy.int64)
        self.streams: Mapping[str, Stream] = {}
        self.lengths: Mapping[str, Array] = {}

    def read_lengths(self) -> None:
        """Look into every file. Raises: DataError, if one is bad or does not go with the first one."""
        streams: dict[str, Mapping[str, Stream]] = {}
        lengths: list[Mapping[str, Array]] = []
        sizes = []
        for number, path in enumerate(self._paths):
            file = self._open_file(path)
            streams[f"{path} (file {number})"] = file.streams
            lengths.append(file.lengths)
            sizes.append(file.num_sequences)
            file.close()
        self.group_bounds = numpy.cumsum([0, *sizes], dtype=numpy.int64)
        self.streams = common_streams(self._where, streams)
        self.lengths = {name: numpy.concatenate([columns[name] for columns in lengths]) for name in self.streams}

    @property
    def num_sequences(self) -> int:
        return int(self.group_bounds[-1])

    @property
    def num_open(self) -> int:
        """How many files are open now."""
        return len(self._open)

    def sequence(self, index: int) -> dict[str, Array]:
        number = int(numpy.searchsorted(self.group_bounds, index, side="right")) - 1
        arrays = self._file(number).sequence(index - int(self.group_bounds[number]))
        return {name: arrays[name].astype(stream.dtype, copy=False) for name, stream in self.streams.items()}

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Some sequences as a batch; each file is asked for its part at once."""
        which = numpy.searchsorted(self.group_bounds, indices, side="right") - 1
        parts = []
        for number in numpy.unique(which).tolist():
            rows = numpy.flatnonzero(which == number)
            parts.append((rows, padded(self._file(number), indices[rows] - self.group_bounds[number])))
        return merged(self.streams, len(indices), parts)

    def tags(self, indices: Sequence[int]) -> list[str]:
        tags = [""] * len(indices)
        which = numpy.searchsorted(self.group_bounds, indices, side="right") - 1
        for number in numpy.unique(which).tolist():
            places = numpy.flatnonzero(which == number)
            inside = (numpy.asarray(indices)[places] - self.group_bounds[number]).tolist()
            for place, tag in zip(places, self._file(number).tags(inside), strict=True):
                tags[place] = tag
        return tags

    def all_tags(self, start: int = 0, stop: int | None = None) -> Array:
        """The tags of sequences `start` to before `stop` as UTF-8: numpy bytes of shape (number,)."""
        stop = self.num_sequences if stop is None else stop
        return tag_bytes_of_several(self.group_bounds, self._file, start, stop)

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def how_read(self) -> str:
        """For the log."""
        return f"{len(self._paths)} files, up to {self._max_open} of them open"

    def _file(self, number: int) -> Dataset:
        """A file, opened unless it is open; the one that was not asked for the longest makes room."""
        file = self._open.get(number)
        if file is not None:
            self._open.move_to_end(number)
            return file
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].close()
        file = self._open_file(self._paths[number])
        first, end = self.group_bounds[number : number + 2]
        for name in self.streams:
            if name not in file.streams or not numpy.array_equal(file.lengths[name], self.lengths[name][first:end]):
                file.close()
                raise DataError(f"{self._paths[number]}: expected the lengths it had at the start, got others in {name!r}")
        self._open[number] = file
        return file


def open_files(where: str, keys: FilesDatasetKeys, open_file: Callable[[str], Dataset]) -> Dataset:
    """Look into every file. Raises: DataError."""
    dataset = FilesDataset(where, keys.files, open_file, keys.max_open_files)
    dataset.read_lengths()
    return dataset
