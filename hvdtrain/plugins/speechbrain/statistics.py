"""What a Brain counts in a stage: at its end, its statistics have the entries of all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import copy, deepcopy
from pickle import PicklingError, UnpicklingError
from typing import Any

import numpy
import torch
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.metric_stats import ErrorRateStats, MetricStats, MultiMetricStats, WeightedErrorRateStats

import hvdtrain
from hvdtrain.plugins.other_trainer.trainer import from_bytes, to_bytes
from hvdtrain.plugins.speechbrain.states import hparams_of
from hvdtrain.runtime import log

Parts = dict[str, Any]
"""What a statistic has collected by part: a list, or a number."""


class Statistics:
    """The statistics of a Brain in a stage: in its attributes and its hyperparameters, and in lists and dicts there."""

    def __init__(self) -> None:
        self.resumed: list[dict[str, Parts]] = []  # what `collected` returned, with which the next stage that begins goes on
        self._begun: dict[Any, Parts] = {}  # by statistic that was there before the stage, how much it had collected
        self._sums: dict[str, Any] = {}  # attributes that the hook at the beginning has set, and that may count batches
        self._has_warned = False

    @contextmanager
    def beginning(self, brain: Any) -> Iterator[None]:
        """Inside the `with` block, the Brain's hook at the beginning of a stage is called."""
        earlier = {statistic for _, statistic in self._all(brain)}
        before = dict(vars(brain))
        yield
        self._begun = {statistic: sizes_of(statistic) for _, statistic in self._all(brain) if statistic in earlier}
        self._sums = {
            name: _copied(value)
            for name, value in vars(brain).items()
            if _may_be_sum(name, value) and value is not before.get(name)
        }
        for name, statistic in self._all(brain) if hvdtrain.rank() == 0 else ():
            if by_rank := [of_rank[name] for of_rank in self.resumed if name in of_rank]:
                _merge(statistic, self._begun.get(statistic, {}), by_rank)
        self.resumed = []

    def collected(self, brain: Any) -> list[dict[str, Parts]]:
        """Collective. What each rank has collected in this stage, by name."""
        parts = {name: new_parts(statistic, self._begun.get(statistic, {})) for name, statistic in sorted(self._all(brain))}
        return hvdtrain.all_gather(parts, name="speechbrain.statistics")

    def gather(self, brain: Any) -> dict[str, float]:
        """Collective. Let each statistic have what all ranks collected; returns their summaries by name.

        One of an earlier stage, to which this stage has added nothing, stays as it is.
        """
        self._warn_of_sums(brain)
        statistics = dict(self._all(brain))
        by_rank = self.collected(brain)
        summaries: dict[str, float] = {}
        for name, statistic in statistics.items():
            parts_by_rank = [of_rank[name] for of_rank in by_rank if name in of_rank]
            if statistic in self._begun and not any(any(parts.values()) for parts in parts_by_rank):
                continue
            _merge(statistic, self._begun.get(statistic, {}), parts_by_rank)
            summaries |= _summary(name, statistic)
        return summaries

    def _all(self, brain: Any) -> list[tuple[str, Any]]:
        attributes = list(statistics_in(vars(brain)))
        present = {statistic for _, statistic in attributes}
        return attributes + [entry for entry in statistics_in(hparams_of(brain)) if entry[1] not in present]

    def _warn_of_sums(self, brain: Any) -> None:
        """Name what the class itself seems to add up, of which each rank has its own."""
        present = vars(brain)
        sums = [name for name, value in self._sums.items() if name in present and not _is_same(value, present[name])]
        if sums and hvdtrain.size() > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"brain: on_stage_end gets {', '.join(sums)} of each rank's own batches (add up what is needed: "
                f"self.{sums[0]} = hvdtrain.all_reduce(self.{sums[0]}))"
            )


KINDS = (MetricStats, MultiMetricStats, AccuracyStats)


def statistics_in(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """By name, the statistics among some values, and in lists and dicts among them."""
    for name, value in values.items():
        inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, (list, tuple)) else ()
        for key, entry in inside:
            if isinstance(entry, KINDS):
                yield f"{name}_{key}", entry
        if isinstance(value, WeightedErrorRateStats):
            yield f"{name}_base", value.base_stats
        elif isinstance(value, KINDS):
            yield name, value


def parts_of(statistic: Any) -> Parts:
    """What a statistic has collected: its counts, or the lists that `clear` empties."""
    if isinstance(statistic, AccuracyStats):
        return {"correct": statistic.correct, "total": statistic.total}
    if isinstance(statistic, MultiMetricStats):
        parts: Parts = {"ids": statistic.ids}
        for key, metric in statistic.metrics.items():
            parts |= {f"{key}/{name}": part for name, part in parts_of(metric).items()}
        return parts
    cleared = copy(statistic)
    cleared.clear()
    return {name: getattr(statistic, name) for name, value in vars(cleared).items() if isinstance(value, list) and not value}


def sizes_of(statistic: Any) -> Parts:
    """By part, how much has been collected."""
    return {name: len(part) if isinstance(part, list) else part for name, part in parts_of(statistic).items()}


def readable(by_rank: list[dict[str, Parts]]) -> list[dict[str, Parts]]:
    """Without the statistics that a checkpoint could not be read with."""
    left_out = set()
    for name, parts in [entry for of_rank in by_rank for entry in of_rank.items()]:
        try:
            from_bytes(to_bytes(parts))
        except (UnpicklingError, PicklingError, AttributeError, TypeError):
            left_out.add(name)
    return [{name: parts for name, parts in of_rank.items() if name not in left_out} for of_rank in by_rank]


def new_parts(statistic: Any, before: Parts) -> Parts:
    """What was collected since it had so much, unless it was cleared since then."""
    collected: Parts = {}
    for name, part in parts_of(statistic).items():
        if isinstance(part, list):
            new = part[_begin(part, before.get(name, 0)) :]
            collected[name] = [entry.cpu() if isinstance(entry, torch.Tensor) else entry for entry in new]
        else:
            collected[name] = part - before.get(name, 0)
    return collected


def _begin(values: list[Any], before: int) -> int:
    """Where a stage's values begin in a list that had so many before it."""
    return before if len(values) >= before else 0


def _merge(statistic: Any, before: Parts, by_rank: list[Parts]) -> None:
    """Let a statistic have what all ranks collected, sorted by the ids of its entries."""
    present = parts_of(statistic)
    merged: Parts = {}
    for name in dict.fromkeys(name for parts in by_rank for name in parts):
        new = [parts[name] for parts in by_rank if name in parts]
        if isinstance(statistic, AccuracyStats):
            merged[name] = before.get(name, 0) + sum(new)
        else:
            part = present.get(name, [])
            merged[name] = [*part[: _begin(part, before.get(name, 0))], *(value for values in new for value in values)]
    ids = merged.get("ids", ())
    order = sorted(range(len(ids)), key=lambda index: str(ids[index]))
    for name, part in merged.items():
        if isinstance(part, list) and len(part) == len(order):
            part = [part[index] for index in order]
        key, _, inner = name.rpartition("/")
        setattr(_metric(statistic, key) if key else statistic, inner, part)


def _metric(statistic: MultiMetricStats, key: str) -> MetricStats:
    """One of several metrics, which is made with the first batch."""
    if key not in statistic.metrics:
        statistic.metrics[key] = MetricStats(lambda scores: scores, batch_eval=True)
    return statistic.metrics[key]


def _summary(name: str, statistic: Any) -> dict[str, float]:
    if isinstance(statistic, AccuracyStats):
        return {name: statistic.summarize()} if statistic.total else {}
    if isinstance(statistic, MultiMetricStats):
        summaries = [_summary(f"{name}_{key}", metric) for key, metric in statistic.metrics.items()]
        return {score: mean for summary in summaries for score, mean in summary.items()}
    if not statistic.ids or type(statistic) not in (ErrorRateStats, MetricStats):
        return {}
    return {name: float(statistic.summarize("error_rate" if type(statistic) is ErrorRateStats else "average"))}


def _may_be_sum(name: str, value: Any) -> bool:
    """Whether an attribute that a hook has set at the beginning of a stage may count what its batches have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    is_several = isinstance(value, (list, dict, numpy.ndarray, torch.Tensor)) and not any(statistics_in({name: value}))
    return name not in ("step", "optimizer_step") and (is_number or is_several)


def _copied(value: Any) -> Any:
    return deepcopy(value) if isinstance(value, dict) else copy(value)


def _is_same(before: Any, now: Any) -> bool:
    if isinstance(before, torch.Tensor):
        return isinstance(now, torch.Tensor) and torch.equal(before, now)
    if isinstance(before, (list, dict)):
        return type(now) is type(before) and len(before) == len(now) and (isinstance(before, list) or repr(before) == repr(now))
    return bool(numpy.array_equal(before, now))
