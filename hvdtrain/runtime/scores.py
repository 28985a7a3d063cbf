"""Sums of losses and errors over batches and ranks. They are exact, so the result does not depend on the order of summation."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, isfinite, nan

from hvdtrain.context import STATISTIC


@dataclass
class Sum:
    """The sum of one loss or error in each batch, and the number of elements in each sum.

    Attributes:
        scale: the weight with which the loss was minimized in the last of these batches; 0.0: it was not minimized.
    """

    totals: array[float] = field(default_factory=lambda: array("d"))
    counts: array[float] = field(default_factory=lambda: array("d"))
    scale: float = 0.0


class Scores:
    """Named sums and counts.

    The sum of every batch is kept until a mean is requested, and then they are added exactly (`math.fsum`: the correctly
    rounded sum, independent of the order). So an evaluation on 1, 2 or 7 ranks gives the same numbers.

    >>> scores = Scores()
    >>> scores.add("ce", total=3.0, count=2)
    >>> scores.add("ce", total=5.0, count=2)
    >>> scores.means()
    {'ce': 2.0}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Sum] = {}

    def add(self, name: str, total: float, count: float, scale: float = 0.0) -> None:
        """Add a batch: `total` is the sum of `name` over `count` elements, minimized with `scale` unless that is zero."""
        entry = self._sums.get(name)
        if entry is None:
            entry = self._sums[name] = Sum()
        entry.scale = scale or entry.scale
        entry.totals.append(total)
        entry.counts.append(count)

    def means(self) -> dict[str, float]:
        """The mean over all elements by name, in alphabetical order; NaN if there are no elements."""
        return {name: _divide(_sum(entry.totals), _sum(entry.counts)) for name, entry in self._losses()}

    def first(self) -> dict[str, float]:
        """The mean of the first batch that has elements, by name.

        >>> scores = Scores()
        >>> scores.add("ce", total=6.0, count=2)
        >>> scores.add("ce", total=5.0, count=2)
        >>> scores.first()
        {'ce': 3.0}
        """
        means = {}
        for name, entry in self._losses():
            pairs = zip(entry.totals, entry.counts, strict=True)
            if (first := next((total / count for total, count in pairs if count), None)) is not None:
                means[name] = first
        return means

    def counts(self) -> dict[str, float]:
        """The number of elements of each mean."""
        return {name: _sum(entry.counts) for name, entry in self._losses()}

    def scales(self) -> dict[str, float]:
        """The losses that were minimized, each with its scale."""
        return {name: entry.scale for name, entry in self._losses() if entry.scale}

    def statistics(self) -> dict[str, list[float]]:
        """The sums of statistics (`epoch_scores`), which are no means, by name: one number or several."""
        statistics: dict[str, dict[int, float]] = {}
        for name, entry in self._sums.items():
            if STATISTIC in name:
                statistic, _, column = name.rpartition(STATISTIC)
                statistics.setdefault(statistic, {})[int(column)] = _sum(entry.totals)
        return {name: [total for _, total in sorted(sums.items())] for name, sums in sorted(statistics.items())}

    def _losses(self) -> list[tuple[str, Sum]]:
        """What is not of statistics, in alphabetical order."""
        return sorted((name, entry) for name, entry in self._sums.items() if STATISTIC not in name)

    @staticmethod
    def merge(all_scores: Iterable[Scores]) -> Scores:
        """Combine the batches of several scores."""
        result = Scores()
        for scores in all_scores:
            for name, entry in scores._sums.items():
                into = result._sums.setdefault(name, Sum())
                into.totals.extend(entry.totals)
                into.counts.extend(entry.counts)
                into.scale = entry.scale or into.scale
        return result

    def compact(self) -> Scores:
        """Reduce each sum to a few numbers. Means stay identical to the last bit, whatever is added later."""
        result = Scores()
        for name, entry in self._sums.items():
            result._sums[name] = Sum(array("d", _partials(entry.totals)), array("d", _partials(entry.counts)), entry.scale)
        return result

    def state(self) -> dict[str, list[list[float]]]:
        """Return all sums and counts as lists, for a checkpoint."""
        return {name: [list(entry.totals), list(entry.counts), [entry.scale]] for name, entry in self._sums.items()}

    @staticmethod
    def from_state(state: Mapping[str, list[list[float]]]) -> Scores:
        result = Scores()
        for name, (totals, counts, *scale) in state.items():  # earlier releases stored no scale
            result._sums[name] = Sum(array("d", totals), array("d", counts), scale[0][0] if scale else 0.0)
        return result


def name_scores(name: str, means: Mapping[str, float]) -> dict[str, float]:
    """The scores of a dataset by their names in scores.jsonl and in keys.

    >>> name_scores("dev", {"ce": 2.0})
    {'dev_loss_ce': 2.0}
    """
    return {f"{name}_loss_{score}": mean for score, mean in means.items()}


def text(means: Mapping[str, float]) -> str:
    """Format means for a log line: `ce 0.3215, fer 0.0512`."""
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())


def _sum(values: Iterable[float]) -> float:
    """The exact sum; NaN if there are infinities of both signs, or if the sum overflows."""
    try:
        return fsum(values)
    except (ValueError, OverflowError):
        return nan


def _partials(values: Sequence[float]) -> list[float]:
    """A few numbers with exactly the same sum: the rounded sum, the rounded sum of what is left, and so on.

    Of the values that are not finite (inf, -inf, nan), each is kept once.
    """
    finite = values if isfinite(_sum(values)) else [value for value in values if isfinite(value)]
    not_finite = sorted({repr(value): value for value in values if not isfinite(value)}.items()) if finite is not values else []
    partials: list[float] = []
    while remainder := _sum([*finite, *(-partial for partial in partials)]):
        if not isfinite(remainder):  # an intermediate sum overflows, though the final sum might not
            return list(values)
        partials.append(remainder)
    return partials + [value for _, value in not_finite]


def _divide(total: float, count: float) -> float:
    return total / count if count else nan
