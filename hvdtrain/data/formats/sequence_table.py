"""What is known about the sequences of a source that is read in one order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy

from hvdtrain.data.types import Array, Stream

VARIES = "varies"
"""The part whose file records that lengths differ between epochs."""

EVERYTHING = 1 << 62

Question = tuple[Any, ...]
"""The name of a method of the reading process, and its arguments."""


@dataclass(frozen=True)
class ScannedSequences:
    """Consecutive sequences of an epoch, without their data.

    Attributes:
        lengths: by data key.
        checksums: of tag and data.
        total: the number of sequences of the epoch, if known.
        ended: whether the epoch has no more sequences.
    """

    tags: list[str]
    lengths: dict[str, list[int]]
    checksums: list[int]
    total: int | None
    ended: bool


FAR = 1000
"""Skipping at least this many sequences, which must be read for that, is announced in the log."""


@dataclass(frozen=True)
class SourceTraits:
    """Properties of a source, known once it was read for the first time.

    Attributes:
        name: of the dataset, for messages.
        streams: by data key, what a sequence's array holds.
        by_corpus: whether the lengths are those of a whole corpus, whose order in each epoch is known in advance; otherwise every
            epoch is read to find its lengths.
        skips: whether a sequence can be read without those before it.
        repeats: whether an epoch yields the same sequences when it begins again.
    """

    name: str
    streams: Mapping[str, Stream]
    by_corpus: bool
    skips: bool
    repeats: bool

    def as_json(self) -> dict[str, Any]:
        """The properties as JSON can hold them."""
        streams = {
            key: [stream.dtype.str, list(stream.shape), stream.dim, stream.sparse, list(stream.labels)]
            for key, stream in self.streams.items()
        }
        return {"name": self.name, "streams": streams, "flags": [self.by_corpus, self.skips, self.repeats]}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> SourceTraits:
        """The properties that `as_json` returned."""
        streams = {
            key: Stream(numpy.dtype(dtype), tuple(shape), dim, sparse, tuple(labels))
            for key, (dtype, shape, dim, sparse, labels) in read["streams"].items()
        }
        return cls(read["name"], streams, *read["flags"])


@dataclass(frozen=True)
class SequenceTable:
    """The sequences of an epoch or of a whole corpus.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (num_sequences,).
        lengths: by data key, the number of frames, int32 of shape (num_sequences,); -1: unknown.
    """

    tags: Array
    lengths: Mapping[str, Array]

    def select(self, indices: Array) -> SequenceTable:
        """Some of the sequences, in the order of the indices."""
        return SequenceTable(self.tags[indices], {key: column[indices] for key, column in self.lengths.items()})

    @property
    def is_complete(self) -> bool:
        """Whether all lengths are known."""
        return all(bool((column >= 0).all()) for column in self.lengths.values())


@dataclass(frozen=True)
class Streamed:
    """A source that is read from beginning to end.

    Attributes:
        reading: returns the object that answers questions in a reading process, such as `Reading`.
        identity: identifies the source of saved lengths.
        can_skip: whether it may be possible to read a sequence without those before it.
        constant: whether all epochs have the same sequences, so that the lengths of the first one apply to all.
        window: the number of sequences that are ordered together; None: they stay in the order of the source.
        advice: what to do if the source does not repeat itself.
    """

    reading: Callable[[], Callable[[Question], Any]]
    identity: str
    can_skip: bool = True
    constant: bool = False
    window: int | None = None
    advice: str = "seed the random numbers of its functions by their rng"
