"""What a Brain counts in a stage: at its end, its statistics have the entries of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from typing import Any

import numpy
import torch
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.metric_stats import ErrorRateStats, MetricStats, MultiMetricStats, WeightedErrorRateStats

import hvdtrain
from hvdtrain.runtime import log

Parts = dict[str, Any]
"""What a statistic has collected by part: a list, or a number."""


class Statistics:
    """The statistics of a Brain in a stage: in its attributes and its hyperparameters, and in lists and dicts there."""

    def __init__(self) -> None:
        self._begun: dict[int, Parts] = {}  # by statistic that was there before the stage, how much it had collected
        self._earlier: list[Any] = []
        self._own_sums: dict[str, Any] = {}
        self._has_warned = False

    @contextmanager
    def beginning(self, brain: Any) -> Iterator[None]:
        """Inside the `with` block, the Brain's hook at the beginning of a stage is called."""
        earlier, before = dict(self._all(brain)), dict(vars(brain))
        yield
        self._earlier = list(earlier.values())  # so that no later one has the id of one of these
        known = {id(one) for one in self._earlier}
        self._begun = {id(one): sizes_of(one) for _, one in self._all(brain) if id(one) in known}
        values = vars(brain).items()
        self._own_sums = {name: _copied(one) for name, one in values if _may_be_sum(name, one) and one is not before.get(name)}

    def gather(self, brain: Any) -> dict[str, float]:
        """Collective. Let each statistic have what all ranks collected; returns their summaries by name.

        One of an earlier stage, to which this stage has added nothing, stays as it is.
        """
        self._warn_of_sums(brain)
        own = dict(self._all(brain))
        begun = {name: self._begun.get(id(one), {}) for name, one in own.items()}
        collected = {name: new_parts(one, begun[name]) for name, one in sorted(own.items())}
        by_rank = hvdtrain.all_gather(collected, name="speechbrain.statistics")
        summaries: dict[str, float] = {}
        for name, one in own.items():
            several = [of_rank[name] for of_rank in by_rank if name in of_rank]
            if id(one) in self._begun and not any(any(entry.values()) for entry in several):
                continue
            _merge(one, begun[name], several)
            summaries |= _summary(name, one)
        return summaries

    def _all(self, brain: Any) -> list[tuple[str, Any]]:
        own = list(statistics_in(vars(brain)))
        known = {id(one) for _, one in own}
        further = statistics_in(vars(getattr(brain, "hparams", None) or Nothing()))
        return [*own, *((name, one) for name, one in further if id(one) not in known)]

    def _warn_of_sums(self, brain: Any) -> None:
        """Name what the class itself seems to add up, of which each rank has its own."""
        present = vars(brain)
        sums = [name for name, one in self._own_sums.items() if name in present and not _is_same(one, present[name])]
        if sums and hvdtrain.size() > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"brain: on_stage_end gets {', '.join(sums)} of each rank's own batches (add up what is needed: "
                f"self.{sums[0]} = hvdtrain.all_reduce(self.{sums[0]}))"
            )


class Nothing:
    """No hyperparameters."""


KINDS = (MetricStats, MultiMetricStats, AccuracyStats)


def statistics_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """By name, the statistics among some values, and in lists and dicts among them."""
    for name, value in values.items():
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, one in ((f"{name}_{key}", one) for key, one in inside):
            if isinstance(one, KINDS):
                yield key, one
        if isinstance(value, WeightedErrorRateStats):
            yield f"{name}_base", value.base_stats
        elif isinstance(value, KINDS):
            yield name, value


def parts_of(one: Any) -> Parts:
    """What a statistic has collected: its counts, or the lists that `clear` empties."""
    if isinstance(one, AccuracyStats):
        return {"correct": one.correct, "total": one.total}
    if isinstance(one, MultiMetricStats):
        several = one.metrics.items()
        return {"ids": one.ids} | {f"{key}/{name}": part for key, each in several for name, part in parts_of(each).items()}
    cleared = copy(one)
    cleared.clear()
    return {name: getattr(one, name) for name, value in vars(cleared).items() if isinstance(value, list) and not value}


def sizes_of(one: Any) -> Parts:
    """By part, how much has been collected."""
    return {name: len(part) if isinstance(part, list) else part for name, part in parts_of(one).items()}


def new_parts(one: Any, before: Parts) -> Parts:
    """What was collected since it had so much, unless it was cleared since then."""
    found = {}
    for name, part in parts_of(one).items():
        if isinstance(part, list):
            new = part[_begin(part, before.get(name, 0)) :]
            found[name] = [entry.cpu() if isinstance(entry, torch.Tensor) else entry for entry in new]
        else:
            found[name] = part - before.get(name, 0)
    return found


def _begin(values: list[Any], before: int) -> int:
    """Where a stage's values begin in a list that had so many before it."""
    return before if len(values) >= before else 0


def _merge(one: Any, before: Parts, by_rank: list[Parts]) -> None:
    """Let a statistic have what all ranks collected, sorted by the ids of its entries."""
    present, merged = parts_of(one), {}
    for name in {name: None for entry in by_rank for name in entry}:
        new = [entry[name] for entry in by_rank if name in entry]
        if isinstance(one, AccuracyStats):
            merged[name] = before.get(name, 0) + sum(new)
        else:
            part = present.get(name, [])
            merged[name] = [*part[: _begin(part, before.get(name, 0))], *(value for values in new for value in values)]
    ids = merged.get("ids", ())
    order = sorted(range(len(ids)), key=lambda place: str(ids[place]))
    for name, part in merged.items():
        if isinstance(part, list) and len(part) == len(order):
            part = [part[place] for place in order]
        key, _, inner = name.rpartition("/")
        setattr(_metric(one, key) if key else one, inner, part)


def _metric(one: MultiMetricStats, key: str) -> MetricStats:
    """One of several metrics, which is made with the first batch."""
    if key not in one.metrics:
        one.metrics[key] = MetricStats(lambda scores: scores, batch_eval=True)
    found: MetricStats = one.metrics[key]
    return found


def _summary(name: str, one: Any) -> dict[str, float]:
    if isinstance(one, AccuracyStats):
        return {name: one.summarize()} if one.total else {}
    if isinstance(one, MultiMetricStats):
        return {found: mean for key, each in one.metrics.items() for found, mean in _summary(f"{name}_{key}", each).items()}
    if not one.ids or type(one) not in (ErrorRateStats, MetricStats):
        return {}
    return {name: float(one.summarize("error_rate" if type(one) is ErrorRateStats else "average"))}


def _may_be_sum(name: str, value: Any) -> bool:
    """Whether an attribute that a hook has set at the beginning of a stage may count what its batches have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    is_several = isinstance(value, (list, dict, numpy.ndarray, torch.Tensor)) and not any(statistics_in({name: value}))
    return name not in ("step", "optimizer_step") and (is_number or is_several)


def _copied(value: Any) -> Any:
    return deepcopy(value) if isinstance(value, dict) else copy(value)


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, (list, dict)):
        return type(other) is type(one) and len(one) == len(other) and (isinstance(one, list) or repr(one) == repr(other))
    return bool(numpy.array_equal(one, other))
