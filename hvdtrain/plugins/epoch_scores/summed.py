"""Metrics of torchmetrics as functions of sums: the key `epoch_scores`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch

from hvdtrain.errors import ConfigError


class SummedMetric:
    """A metric whose states are sums over batches. After every batch, they are taken out of it and added up with those of others.

    So its sums are exact on any number of ranks, and part of checkpoints. The package torchmetrics is not imported.

    Attributes:
        statistics: the names of its states among the statistics.
    """

    def __init__(self, name: str, metric: Any, device: torch.device) -> None:
        if (problem := _problem(metric)) is not None:
            raise ConfigError.of(
                "wrong-result",
                f"epoch_scores.{name}: expected a metric whose states are sums over batches, got {type(metric).__name__} with "
                f"{problem} (mark statistics and give a function, or collect outputs with forward_callback)",
            )
        for sync in ("sync_on_compute", "dist_sync_on_step", "_to_sync"):
            setattr(metric, sync, False)  # over torch.distributed; what is computed is of this rank, or the sums are of all
        self._metric = metric.to(device)
        self._states = {f"{name}.{state}": state for state in metric._defaults}
        self.statistics = list(self._states)

    def states(self) -> dict[str, torch.Tensor]:
        """The states since `reset`, as rows; empty, if it was not updated since then."""
        if not self._metric.update_called:
            return {}
        return {
            name: (getattr(self._metric, state) - self._metric._defaults[state].to(getattr(self._metric, state).device)).reshape(
                1, -1
            )
            for name, state in self._states.items()
        }

    def reset(self) -> None:
        """Begin a batch. (The metrics of a MetricCollection may share their tensors, also with one that is not in the key.)"""
        for state in self._states.values():
            getattr(self._metric, state).copy_(self._metric._defaults[state])
        self._metric.reset()

    def __call__(self, **sums: Any) -> Any:
        metric = deepcopy(self._metric).cpu()
        metric.reset()  # else `compute` returns what it did for the last batch, if train_step called it
        metric._update_count = 1  # else `compute` warns
        for name, state in self._states.items():
            first = metric._defaults[state].cpu()
            total = torch.as_tensor(sums[name], dtype=torch.float64).reshape(first.shape) + first
            setattr(metric, state, total.to(first.dtype))
        return metric.compute()


def is_metric(value: Any) -> bool:
    """Whether a value of the key is such an object."""
    return isinstance(value, torch.nn.Module) and hasattr(value, "update") and hasattr(value, "compute")


def _problem(metric: Any) -> str | None:
    """What of a metric is no sum over batches, in words; None: nothing."""
    within = [type(module).__name__ for module in metric.modules() if module is not metric and is_metric(module)]
    if within:  # a metric within a wrapper has sums of its own
        return f"{within[0]} within"
    if not hasattr(metric, "_reductions"):
        return "no states (add_state)"
    for state, reduce in metric._reductions.items():
        if getattr(reduce, "__name__", "") != "dim_zero_sum" or not isinstance(metric._defaults[state], torch.Tensor):
            return f"the state {state!r}"
    return None


def open_scores(metrics: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """The values of the key, with metrics as functions; those of a MetricCollection one by one. Raises: ConfigError."""
    scores: dict[str, Any] = {}
    for name, value in metrics.items():
        is_collection = is_metric(value) and isinstance(value, torch.nn.ModuleDict)
        members = {f"{name}_{member}": metric for member, metric in value.items()} if is_collection else {name: value}
        if both := sorted(scores.keys() & members.keys()):
            raise ConfigError.of("duplicate", f"epoch_scores: expected different names, got {', '.join(both)} twice")
        scores |= members
    return {name: SummedMetric(name, value, device) if is_metric(value) else value for name, value in scores.items()}
