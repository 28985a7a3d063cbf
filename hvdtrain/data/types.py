"""What a dataset is, and what a batch is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy

Array = numpy.ndarray[Any, Any]

External = Literal["refuse", "follow"]
"""What to do where an HDF file leads to other files: a data file must not make the trainer read others unasked."""


@dataclass(frozen=True)
class Stream:
    """One data key of a dataset: an array for every sequence, frames on the first axis.

    Attributes:
        dtype: of the frames, as stored.
        shape: of one frame: () for sparse data (one class index a frame), (dim,) for vectors.
        dim: how many classes (sparse) or features (dense) there are.
        sparse: whether a frame is a class index.
        labels: the classes' names, where the source has them.
    """

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    dim: int
    sparse: bool
    labels: tuple[str, ...] = ()


class Dataset(Protocol):
    """A number of sequences, each a dict of arrays. Knows no epoch, no order and no rank.

    Beside what stands here, a dataset may have, and who asks uses it where it is there:

    - `padded(indices) -> {key: Padded}`, where it can make a batch faster than by padding its sequences one by one;
    - `sequences(indices) -> [{key: array}]`, where it can give several sequences faster than one by one;
    - `all_tags(start, stop) -> bytes array`, where it can read tags in bulk;
    - `mapped`, the data keys that are memory-mapped, and `how_read()`, words for the log;
    - `group_bounds`, where it consists of several files: where each file's sequences begin and where those of the last one end,
      int64 of shape (files + 1,);
    - `at_epoch(epoch) -> Dataset`, where it draws random numbers for its sequences: gives it those of an epoch, see epochs.py;
    - `drawn(full_epoch)`, where it takes other sequences in every full epoch: their indices, or None for all.
    """

    streams: Mapping[str, Stream]
    lengths: Mapping[str, Array]
    """By data key: every sequence's number of frames, int32 of shape (num_sequences,)."""

    @property
    def num_sequences(self) -> int: ...

    def sequence(self, index: int) -> dict[str, Array]:
        """The arrays of one sequence, by data key; perhaps read-only views of the file. Raises: DataError."""
        ...

    def tags(self, indices: Sequence[int]) -> list[str]:
        """The names of some sequences. Raises: DataError."""
        ...

    def close(self) -> None:
        """Let go of files."""
        ...


@dataclass(frozen=True)
class Padded:
    """One data key of a batch.

    Attributes:
        values: shape (batch, time, ...), zero after a sequence's end.
        seq_lens: int32 of shape (batch,).
    """

    values: Array
    seq_lens: Array


@dataclass(frozen=True)
class Batch:
    """Some sequences, padded to the longest.

    Attributes:
        data: by data key.
        indices: which sequences of the dataset these are, int64 of shape (batch,).
        seq_tags: reads their names, for who wants them.
    """

    data: Mapping[str, Padded]
    indices: Array
    seq_tags: Callable[[], list[str]] | None = None
