"""Sequences whose tags and lengths are known before they are read: rows of a source, without the broken ones."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence

import numpy

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError

UNREADABLE = -1
"""The length of a row that cannot be read."""


class IndexedDataset(Dataset):
    """Rows of a source, each compared with its length when it is read.

    Args:
        tags: of all rows, as UTF-8: numpy bytes; None: they have none.
        lengths: by data key, of all rows.
        used: the numbers of the rows that are sequences; None: all.
    """

    advice = ""
    """What to do if a row has another length."""

    unnamed = "seq"
    """What rows without tags are called, besides their numbers."""

    def __init__(
        self, streams: Mapping[str, Stream], tags: Array | None, lengths: Mapping[str, Array], used: Array | None = None
    ) -> None:
        self._tags = tags
        self._used = numpy.arange(len(next(iter(lengths.values())))) if used is None else used
        self.streams = streams
        self.lengths = {name: lengths[name][self._used].astype(numpy.int32, copy=False) for name in streams}

    @abstractmethod
    def row(self, number: int) -> dict[str, Array]:
        """The arrays of a row. Raises: BrokenSequence."""

    @abstractmethod
    def where(self, number: int) -> str:
        """The place of a row, for messages."""

    @property
    def num_sequences(self) -> int:
        return len(self._used)

    def sequence(self, index: int) -> dict[str, Array]:
        number = int(self._used[index])
        arrays = self.row(number)
        for name, values in arrays.items():
            if len(values) != (expected := self.lengths[name][index]):
                raise self.wrong_length(number, name, expected, len(values))
        return arrays

    def wrong_length(self, number: int, name: str, expected: int, got: int) -> DataError:
        """The error for a row that is not as long as expected."""
        return BrokenSequence(
            f"{self.where(number)}: expected {expected} frames in {name!r}, as its length was given or found, got {got}"
            f"{self.advice}"
        )

    def tags(self, indices: Sequence[int]) -> list[str]:
        numbers = self._used[list(indices)]
        if self._tags is None:
            return [f"{self.unnamed}-{number}" for number in numbers.tolist()]
        return [tag.decode("utf-8") for tag in self._tags[numbers].tolist()]

    def tag_bytes(self, start: int, stop: int) -> Array:
        return super().tag_bytes(start, stop) if self._tags is None else self._tags[self._used[start:stop]]


def rows_to_use(lengths: Iterable[Array], broken: BrokenSequences, messages: Iterable[str]) -> Array:
    """The numbers of the rows that can be read. Raises: BrokenSequence, if too many are broken."""
    used = numpy.flatnonzero(numpy.all([column >= 0 for column in lengths], axis=0))
    broken.leave_out(messages, len(used))
    return used
