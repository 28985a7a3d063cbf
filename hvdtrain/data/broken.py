"""Broken sequences, which a training continues without if the config allows it (`skip_broken`).

The plan of an epoch does not change: each rank leaves the broken sequences out of its own batches, without a message to the
others, so the ranks stay in step. A rank whose whole batch is broken takes part in the step as a rank that has no batch left.
Scores and gradients are sums over the sequences that were read, divided by their number of elements.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from hvdtrain.data.types import Array, Batch, Broken, arrays_in
from hvdtrain.errors import BrokenSequence

LISTED = 5
"""How many broken sequences a message lists."""


class BrokenSequences:
    """The broken sequences of a dataset that this rank knows of, at most `limit`.

    Args:
        name: the config key of the dataset, for messages.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self.limit = limit
        self._absent: list[str] = []
        self._messages: dict[int, str] = {}
        self._new: list[Broken] = []

    @property
    def number(self) -> int:
        """The number of broken sequences so far; each counts once in a training, no matter how often it is read."""
        return len(self._absent) + len(self._messages)

    def leave_out(self, messages: Iterable[str], num_others: int) -> None:
        """Count sequences that are left out of the dataset itself, as its files do not describe them completely.

        Args:
            num_others: the number of the others.

        Raises:
            BrokenSequence: there are too many, or no others.
        """
        self._absent += messages
        self._check(self._absent)
        if self._absent and not num_others:
            raise self._only_broken(self._absent)

    def check_any(self, has_read: bool) -> None:
        """Raises: BrokenSequence, on all ranks, if none of them has read a sequence, as all are broken."""
        if self._messages and not has_read:
            raise self._only_broken(list(self._messages.values())).on_all_ranks()

    def add(self, broken: Sequence[Broken]) -> None:
        """Count broken sequences of a batch. Raises: BrokenSequence, if there are too many."""
        for index, message in broken:
            if index not in self._messages:
                self._messages[index] = message
                self._new.append((index, message))
        self._check([message for _, message in broken])

    def take(self) -> list[Broken]:
        """Those that are new since the last call, for the other ranks."""
        new, self._new = self._new, []
        return new

    def merge(self, by_rank: Sequence[Sequence[Broken]]) -> list[str]:
        """Count those that all ranks `take`. Returns lines for the log.

        Raises:
            BrokenSequence: there are too many; on all ranks alike.
        """
        all_broken = [broken for of_rank in by_rank for broken in of_rank]
        if not all_broken:
            return []
        self._messages |= dict(all_broken)
        try:
            self._check([message for _, message in all_broken])
        except BrokenSequence as error:
            raise error.on_all_ranks() from None
        return [
            f"{self._name}: {self.number} broken sequences so far, at most {self.limit} are left out (skip_broken): "
            + _listing([message for _, message in all_broken])
        ]

    def warnings(self) -> list[str]:
        """Lines for the log about sequences that are left out of the dataset."""
        if not self._absent:
            return []
        number = len(self._absent)
        return [f"{number} broken sequences are left out, at most {self.limit} may be (skip_broken): {_listing(self._absent)}"]

    def _only_broken(self, messages: Sequence[str]) -> BrokenSequence:
        return BrokenSequence(f"{self._name}: expected sequences that can be read, got only broken ones: {_listing(messages)}")

    def _check(self, latest: Sequence[str]) -> None:
        if self.number > self.limit:
            hint = "" if self.limit else " (skip_broken = N lets a training continue without N of them)"
            most = f"at most {self.limit} broken sequences (skip_broken)" if self.limit else "sequences that can be read"
            raise BrokenSequence(f"{self._name}: expected {most}, got {self.number} broken: {_listing(latest)}{hint}")


def check_finite(batch: Batch) -> None:
    """Raises: BrokenSequence, if a number in a batch is NaN or infinite."""
    for key, padded in batch.data.items():
        if not finite_problem(padded.values):
            continue
        for row, sequence in enumerate(padded.sequences()):
            if problem := finite_problem(sequence):
                tag = "" if batch.row_tags is None else f"sequence {batch.row_tags()[row]!r}, "
                raise BrokenSequence(f"{tag}data key {key!r}: {problem}")


def finite_problem(values: Array) -> str:
    """The first frame with a number that is NaN or infinite, for messages; '': there is none."""
    import numpy  # here, as `--help` imports this file

    if values.dtype.kind == "O":  # texts, or items of any kind
        inside = (arrays_in(item) for item in values.flat if not isinstance(item, str))
        return next(filter(None, map(finite_problem, chain.from_iterable(inside))), "")
    if values.dtype.kind not in "fc" or numpy.isfinite(values.sum(dtype=numpy.result_type(values.dtype, numpy.float64))):
        return ""
    wrong = ~numpy.isfinite(values)
    return f"expected finite numbers, got {values[wrong][0]} in frame {numpy.argwhere(wrong)[0][0]}" if wrong.any() else ""


def _listing(messages: Sequence[str]) -> str:
    more = f"; and {len(messages) - LISTED} more" if len(messages) > LISTED else ""
    return "; ".join(messages[:LISTED]) + more
