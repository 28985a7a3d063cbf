"""What a module logs: means become errors of the step, which hvdtrain adds up exactly; the states of metrics are gathered."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

import hvdtrain
from hvdtrain.errors import ConfigError

MEAN = ("mean", "avg")
AFTER_STEPS = ("on_train_batch_end", "on_after_backward", "on_before_optimizer_step")
"""Hooks of a step that are called when its values are counted already."""

Reduced = tuple[torch.Tensor, str]
"""A value, and how it is reduced over ranks; '': that of rank 0 counts."""


class Logged:
    """The values of `self.log`, by name.

    Args:
        module: whose metrics they may be.
        defaults: Lightning's rule for on_step and on_epoch, given the name of the hook.
        values: receives the last value of each name, for callbacks and schedulers.
    """

    def __init__(self, module: Any, defaults: Callable[..., tuple[bool, bool]], values: dict[str, Any]) -> None:
        self._module = module
        self._defaults = cache(defaults)
        self._values = values
        self.metrics = {name: one for name, one in module.named_modules() if hasattr(one, "_reductions")}
        for metric in self.metrics.values():
            metric.sync_on_compute = metric._to_sync = False  # the states are put together here; `compute` reads the latter
        self._paths = {id(one): name for name, one in self.metrics.items()}
        self._batch_size: int | None = None  # of the step under way; None: there is none
        self._suffix = ""  # of the names of this loader, one of several
        self._of_step: dict[str, tuple[Any, float]] = {}  # by name, the weighted sum of the values, and the weight
        self._means: dict[str, tuple[str, bool]] = {}  # by the name of a mean of the epoch, the one for both step and epoch,
        # and whether the loader's suffix belongs to it
        self._of_epoch: dict[str, Reduced] = {}  # what is no mean of steps
        self._objects: dict[str, tuple[str, bool, bool]] = {}  # by name, the logged metric, on_step and on_epoch
        self._is_evaluating = False
        self._train: tuple[Any, Any] = {}, {}  # what training had logged then: values of the epoch, and metrics
        self._local: dict[str, dict[str, State]] = {"train": {}, "evaluation": {}}
        # this rank's states of the metrics that have those of all ranks

    def log(
        self,
        name: str,
        value: Any,
        prog_bar: bool = False,
        logger: bool | None = None,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Any = "mean",
        enable_graph: bool = False,
        sync_dist: bool = False,
        sync_dist_group: Any = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """`LightningModule.log`. Means of steps are those over all ranks, with and without `sync_dist`.

        Raises:
            ConfigError: the value is not a number or a metric of the module, or `reduce_fx` is a function of the module's own.
        """
        hook = self._module._current_fx_name
        on_step, on_epoch = (False, True) if hook is None else self._defaults(hook, on_step=on_step, on_epoch=on_epoch)
        if hasattr(value, "_reductions"):
            path = metric_attribute or self._paths.get(id(value))
            if path is None:
                raise wrong(name, "a metric that is an attribute of the module", type(value).__name__)
            self._objects[name] = path, on_step, on_epoch
            if on_step and isinstance(value._forward_cache, torch.Tensor):
                self._show(name, value._forward_cache.detach(), on_epoch, add_dataloader_idx)
            return
        number = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if number.ndim or not number.is_floating_point():
            if number.numel() != 1:
                raise wrong(name, "a single number", f"a tensor of shape {tuple(number.shape)}")
            number = number.reshape(()) if number.is_floating_point() else number.reshape(()).float()
        reduce = str(reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", reduce_fx))
        if reduce not in (*MEAN, "sum", "min", "max"):
            raise wrong(name, "reduce_fx mean, sum, min or max", reduce)
        if on_step:
            self._show(name, number, on_epoch, add_dataloader_idx)
        if self._batch_size is None:
            if on_epoch and hook in AFTER_STEPS:
                raise wrong(name, f"on_epoch = False in {hook}, or a call in training_step", "on_epoch = True")
            self._of_epoch[name] = number, reduce if sync_dist else ""
        elif reduce in MEAN:
            weight = float(self._batch_size if batch_size is None else batch_size)
            before = self._of_step.get(name)
            total = number * weight
            self._of_step[name] = (total, weight) if before is None else (before[0] + total, before[1] + weight)
            if on_epoch and name not in self._means:
                self._means[name] = f"{name}_epoch" if on_step else name, add_dataloader_idx
        elif on_epoch:
            self._extend(name, number, reduce)

    def _show(self, name: str, number: torch.Tensor, on_epoch: bool, has_suffix: bool) -> None:
        """Make the value of a step known. (In evaluations, Lightning makes only those of the epoch known.)"""
        key = name + (self._suffix if has_suffix else "")
        self._values[key] = number
        if on_epoch and not self._is_evaluating:
            self._values[f"{key}_step"] = number

    def _extend(self, name: str, number: torch.Tensor, reduce: str) -> None:
        """Add a value of a step to a sum, or to a minimum or maximum."""
        before = self._of_epoch.get(name)
        self._of_epoch[name] = (number if before is None else reduced(reduce, [before[0], number])), reduce

    def begin_step(self, batch_size: int, suffix: str = "") -> None:
        """Values belong to a batch from here on."""
        self._batch_size, self._suffix = batch_size, suffix

    def end_step(self) -> None:
        """Mark the means of a batch as errors of the step."""
        context = hvdtrain.get_run_ctx()
        for name, (total, weight) in self._of_step.items():
            context.mark_as_loss(total, own_name(name), as_error=True, custom_inv_norm_factor=weight)
        if not context.losses:
            context.mark_as_loss(torch.zeros(()), "nothing", as_error=True)  # hvdtrain expects at least one
        self._batch_size, self._suffix, self._of_step = None, "", {}

    def begin_evaluation(self) -> None:
        """Metrics that are updated from here on belong to an evaluation."""
        self._is_evaluating = True
        for metric in self.metrics.values():
            metric._update_count = Untouched(metric._update_count)
        self._train = self._of_epoch, self._objects
        self._of_epoch, self._objects = {}, {}

    @contextmanager
    def without_metrics(self) -> Iterator[None]:
        """After the `with` block, metrics are as before."""
        before = {name: state_of(one) for name, one in self.metrics.items()}
        yield
        for name, state in before.items():
            set_state(self.metrics[name], state)

    def take_means(self, means: Mapping[str, float], suffix: str = "") -> None:
        """Make the means of a dataset known, by the names with which they were logged."""
        for name, (both, has_suffix) in self._means.items():
            if own_name(name) in means:
                end = suffix if has_suffix else ""
                self._values[name + end] = self._values[both + end] = torch.tensor(means[own_name(name)])

    @property
    def _phase(self) -> str:
        return "evaluation" if self._is_evaluating else "train"

    def _is_updated(self, metric: Any) -> bool:
        """Whether a metric has a state of this phase."""
        count = metric._update_count
        return not isinstance(count, Untouched) if self._is_evaluating else bool(count)

    def gather_metrics(self) -> None:
        """Collective, after the last step. Give the metrics that were updated the states of all ranks."""
        own = {name: state_of(one) for name, one in self.metrics.items() if self._is_updated(one)}
        if hvdtrain.size() == 1:
            return
        of_ranks = hvdtrain.all_gather(own, name="lightning_metrics")
        for name in dict.fromkeys(name for one in of_ranks for name in one):
            self._local[self._phase][name] = own.get(name) or state_of(self.metrics[name])
            set_state(self.metrics[name], merged(self.metrics[name], [one[name] for one in of_ranks if name in one]))

    def take_scores(self) -> dict[str, float]:
        """Collective, after the hooks at the end of an epoch. What was logged and is no mean of steps, by name. The logged
        metrics are reset."""
        gathered = hvdtrain.all_gather((self._of_epoch, self._objects), name="lightning_scores")
        scores: dict[str, torch.Tensor] = {}
        for name in dict.fromkeys(name for values, _ in gathered for name in values):
            values = [one[name][0].cpu() for one, _ in gathered if name in one]
            reduce = next(one[name][1] for one, _ in gathered if name in one)
            scores[name] = reduced(reduce, values) if reduce else values[0]
        metrics = {name: found for _, objects in gathered for name, found in objects.items()}
        for name, (path, on_step, on_epoch) in metrics.items():
            if not on_epoch:
                continue
            value = self.metrics[path].compute()
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise wrong(name, "a metric whose compute() returns a single number", str(value)[:60])
            scores[name] = value.detach().cpu()
            if on_step:
                self._values[f"{name}_epoch"] = scores[name]
        for path, *_ in metrics.values():
            self.metrics[path].reset()
        for path, state in self._local[self._phase].items():
            if self.metrics[path]._update_count:  # it was not reset
                set_state(self.metrics[path], state)
        self._local[self._phase] = {}
        self._of_epoch, self._objects = self._train if self._is_evaluating else ({}, {})
        self._is_evaluating = False
        self._values.update(scores)
        return {name: float(value) for name, value in scores.items()}

    def show(self) -> None:
        """Before the hooks at the end of an epoch. Make known what was logged in it and is no mean of steps."""
        self._values.update({name: value for name, (value, _) in self._of_epoch.items()})

    def state(self) -> list[Any]:
        """Collective. What training has logged so far in the epoch, by rank."""
        of_epoch, objects = self._train if self._is_evaluating else (self._of_epoch, self._objects)
        states = {
            name: self._local["train"].get(name) or state_of(one)
            for name, one in self.metrics.items()
            if one._update_count and not (self._is_evaluating and self._is_updated(one))
        }
        return hvdtrain.all_gather((states, of_epoch, objects, self._means), name="lightning_state")

    def load(self, of_ranks: Sequence[Any]) -> None:
        """Continue from what `state` returned, also on another number of ranks."""
        rank, size = hvdtrain.rank(), hvdtrain.size()
        mine = [of_ranks[rank]] if len(of_ranks) == size else list(of_ranks) if rank == 0 else []
        for name, metric in self.metrics.items():
            if states := [states[name] for states, *_ in mine if name in states]:
                set_state(metric, states[0] if len(states) == 1 else merged(metric, states))
        for _, of_epoch, objects, means, *more in mine:  # more: of checkpoints before 2026-11-29, that of hooks between steps
            self._objects |= objects
            self._means |= means
            for name, (value, reduce) in (of_epoch | dict(*more)).items():
                if reduce:
                    self._extend(name, value, reduce)
                else:
                    self._of_epoch.setdefault(name, (value, reduce))


def wrong(name: str, expected: str, got: str) -> ConfigError:
    """The error about a value that cannot be logged."""
    return ConfigError.of("wrong-result", f"self.log: expected {expected} for {name!r}, got {got}")


def own_name(name: str) -> str:
    """The name among hvdtrain's scores: 'loss' is what training_step returns."""
    return f"logged_{name}" if name == "loss" else name


def reduced(reduce: str, values: Sequence[torch.Tensor]) -> torch.Tensor:
    """The mean, sum, minimum or maximum of numbers."""
    together = torch.stack(list(values))
    return together.mean() if reduce in MEAN else getattr(together, reduce)()


class Untouched(int):
    """A metric's number of updates as it was when an evaluation began: each update, and a reset, puts a plain number there."""


State = tuple[int, dict[str, Any]]
"""How often a metric was updated, and its states, on the CPU."""


def state_of(metric: Any) -> State:
    """A metric's state."""
    found = {name: getattr(metric, name) for name in metric._defaults}
    return int(metric._update_count), {
        name: [one.detach().cpu() for one in value] if isinstance(value, list) else value.detach().cpu().clone()
        for name, value in found.items()
    }


def set_state(metric: Any, state: State) -> None:
    """Give a metric a state."""
    metric._update_count, values = state
    metric._computed = None
    for name, value in values.items():
        moved = [one.to(metric.device) for one in value] if isinstance(value, list) else value.to(metric.device)
        setattr(metric, name, moved)


def merged(metric: Any, states: Sequence[State]) -> State:
    """The state of a metric that was updated on several ranks, as torchmetrics reduces it; means by the numbers of updates."""
    counts = [count for count, _ in states]
    values: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        parts = [state[name] for _, state in states]
        kind = getattr(reduction, "__name__", "")
        if isinstance(metric._defaults[name], list):
            values[name] = [one for part in parts for one in (part if isinstance(part, list) else [part])]
        elif kind == "dim_zero_mean":
            values[name] = sum(part * count for part, count in zip(parts, counts, strict=True)) / max(1, sum(counts))
        elif len(parts) == 1:
            values[name] = parts[0]
        else:
            together = torch.stack(parts)
            values[name] = together if reduction is None else reduction(together)
    return sum(counts), values
