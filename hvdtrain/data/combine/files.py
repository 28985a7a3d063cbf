"""Files of one kind that are read as one dataset."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Self

import numpy

from hvdtrain.data.combine.joined import JoinedDataset, common_streams
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.padding import are_short, gather, gather_packed, span
from hvdtrain.data.types import Array, Padded, Stream
from hvdtrain.errors import DataError


class MappedFile(Dataset):
    """A file, of which parts may be memory-mapped.

    Attributes:
        frames: all frames of the data keys that are.
        starts: by data key, the first frame of every sequence.
    """

    frames: dict[str, Array]
    starts: dict[str, Array]


class FilesDataset(JoinedDataset):
    """The sequences of files, one file after the other, with the data keys of the first one: the same in every epoch."""

    is_stochastic = False
    reads_for_tags = False
    reads_batches = False
    _spans: Mapping[str, tuple[Array, Array, int]] = {}
    """By data key, if all is memory-mapped: the frames of all files, where sequences begin there, and the step between frames."""

    def keep_once(self) -> None:
        """Have in memory once what both the files and the whole need."""
        mapped = [file for file in self._inside if isinstance(file, MappedFile)]
        if self.memory_mapped == self.streams.keys() and len(mapped) == len(self._inside):
            self._spans = {name: one_map for name in self.streams if (one_map := _span(name, mapped))}
        for file, (start, stop) in zip(self._inside, pairwise(self._starts), strict=True):
            file.streams = {name: file.streams[name] for name in self.streams}  # further keys are not read
            file.lengths = {name: column[start:stop] for name, column in self.lengths.items()}
            for name, (frames, starts, step) in self._spans.items():
                if isinstance(file, MappedFile) and step == 1:
                    file.frames[name] = frames
                    file.starts[name] = starts[start:stop]

    def at_epoch(self, epoch: int) -> Self:
        return self

    def redrawn(self, draw: int) -> Self:
        return self

    def sequence(self, index: int) -> dict[str, Array]:
        number = bisect_right(self._starts, index) - 1
        arrays = self._inside[number].sequence(index - self._starts[number])
        return {
            name: values if (values := arrays[name]).dtype is stream.dtype else values.astype(stream.dtype, copy=False)
            for name, stream in self.streams.items()
        }

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        by_index = {index: self.sequence(index) for index in sorted(set(indices))}  # file by file, as few of them are open
        return [by_index[index] for index in indices]

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self.packed(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        """Short sequences that are memory-mapped are gathered at once."""
        lengths = {name: self.lengths[name][indices] for name in self._spans}
        if lengths.keys() != self.streams.keys() or not all(are_short(self.streams[name], lengths[name]) for name in lengths):
            return super().packed(indices, keys)
        return {
            name: (gather_packed if name in keys else gather)(frames, starts[indices], lengths[name], step)
            for name, (frames, starts, step) in self._spans.items()
        }

    def close(self) -> None:
        super().close()
        self._spans = {}

    def how_read(self) -> str:
        return "; ".join(sorted({file.how_read() for file in self._inside}))


def _span(name: str, files: Sequence[MappedFile]) -> tuple[Array, Array, int] | None:
    """`span` of a data key, with the places of all sequences."""
    if (mapped := span([file.frames[name] for file in files])) is None:
        return None
    frames, places, step = mapped
    starts = numpy.concatenate([file.starts[name] for file in files])
    ends = numpy.cumsum([len(file.starts[name]) for file in files]).tolist()
    for offset, begin, end in zip(places, [0, *ends], ends, strict=False):  # in place: there may be many
        if step != 1:
            starts[begin:end] *= step
        starts[begin:end] += offset
    return frames, starts, step


def open_files(where: str, paths: Sequence[str], open_file: Callable[[str], Dataset]) -> Dataset:
    """Files as one dataset. Raises: DataError, if one is bad or does not match the first one.

    Args:
        where: the config key, for messages.
    """
    if not paths:
        raise DataError(f"{where}: expected at least one file, got none")
    streams_once: dict[Stream, Stream] = {}  # the names of many classes are in memory once
    files = []
    for path in paths:
        file = open_file(path)
        file.streams = {name: streams_once.setdefault(stream, stream) for name, stream in file.streams.items()}
        files.append(file)
    if len(files) == 1:
        return files[0]
    names = [f"{path} (file {number})" for number, path in enumerate(paths)]
    by_name = {name: file.streams for name, file in zip(names, files, strict=True)}
    joined = FilesDataset(files, common_streams(where, by_name))
    joined.keep_once()
    return joined
