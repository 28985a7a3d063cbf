"""Losses and errors added up over batches and ranks, such that the order of adding cannot be seen in the result."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, nan


@dataclass(frozen=True)
class Sum:
    """The batches' sums of one loss or error, and over how many elements each sum goes."""

    totals: array[float] = field(default_factory=lambda: array("d"))
    counts: array[float] = field(default_factory=lambda: array("d"))


class Scores:
    """Named sums and counts.

    Every batch's sum is kept until the mean is asked for and then added exactly (`math.fsum`: the correctly rounded sum
    of the addends, whatever their order). So an evaluation that was dealt out to 1, 2 or 7 ranks gives the same numbers.

    >>> scores = Scores()
    >>> scores.add("ce", total=3.0, count=2)
    >>> scores.add("ce", total=5.0, count=2)
    >>> scores.means()
    {'ce': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}

    def add(self, name: str, total: float, count: float) -> None:
        """Count a batch in which the elements of `name` add up to `total`."""
        entry = self._sums.setdefault(name, Sum())
        entry.totals.append(total)
        entry.counts.append(count)

    def means(self) -> dict[str, float]:
        """The mean over all elements by name, names in alphabetical order; not a number where nothing was counted."""
        return {name: _divide(_sum(entry.totals), _sum(entry.counts)) for name, entry in sorted(self._sums.items())}

    def counts(self) -> dict[str, float]:
        """How many elements went into each mean."""
        return {name: _sum(entry.counts) for name, entry in sorted(self._sums.items())}

    @staticmethod
    def merged(parts: Iterable[Scores]) -> Scores:
        """All batches of all `parts`."""
        result = Scores()
        for part in parts:
            for name, entry in part._items():
                into = result._sums.setdefault(name, Sum())
                into.totals.extend(entry.totals)
                into.counts.extend(entry.counts)
        return result

    def compact(self) -> Scores:
        """The same sums in a few numbers each: their means are the same to the last bit, whatever is added later."""
        result = Scores()
        for name, entry in self._items():
            result._sums[name] = Sum(array("d", _partials(entry.totals)), array("d", _partials(entry.counts)))
        return result

    def state(self) -> dict[str, list[list[float]]]:
        """Everything as lists of numbers, for a checkpoint."""
        return {name: [list(entry.totals), list(entry.counts)] for name, entry in self._items()}

    @staticmethod
    def from_state(state: Mapping[str, list[list[float]]]) -> Scores:
        """What `state` returned."""
        result = Scores()
        for name, (totals, counts) in state.items():
            result._sums[name] = Sum(array("d", totals), array("d", counts))
        return result

    def _items(self) -> Iterator[tuple[str, Sum]]:
        return iter(self._sums.items())


def text(means: Mapping[str, float]) -> str:
    """Means for a log line: `ce 0.3215, fer 0.0512`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())


def _sum(values: Iterable[float]) -> float:
    """The exact sum; not a number where there is none: infinities of both signs, or beyond what a float can hold."""
    try:
        return fsum(values)
    except (ValueError, OverflowError):
        return nan


def _partials(values: Sequence[float]) -> list[float]:
    """A few numbers with exactly the same sum: addends that do not overlap in any bit (Shewchuk, 1997).

    Numbers that are not finite stay as they are, each kind once.
    """
    odd = sorted({repr(value): value for value in values if not isfinite(value)}.items())
    partials: list[float] = []
    for value in values:
        if not isfinite(value):
            continue
        kept = []
        for partial in partials:
            larger, smaller = (value, partial) if abs(value) >= abs(partial) else (partial, value)
            value = larger + smaller
            rest = smaller - (value - larger)
            if rest:
                kept.append(rest)
        partials = [*kept, value]
    if not all(map(isfinite, partials)):  # beyond what a float can hold on the way, perhaps not in the end
        return list(values)
    return [value for value in partials if value] + [value for _, value in odd]


def _divide(total: float, count: float) -> float:
    return total / count if count else nan
