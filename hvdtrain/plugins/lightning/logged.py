"""What a module logs: means become errors of the step, which hvdtrain adds up exactly; the rest is gathered at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.metrics import Metrics, is_metric
from hvdtrain.runtime import log

MEAN = "mean"
AFTER_STEP = ("on_train_batch_end", "on_before_optimizer_step")
"""Hooks after a step that log values of its batch."""


class Number(NamedTuple):
    """A value of an epoch, so far on this rank.

    Attributes:
        total: the sum, minimum or maximum; of a mean, the weighted sum.
        is_of_all: whether the values of all ranks count; otherwise that of the first one.
        of_epoch: its name where the step's value has the other one.
    """

    total: torch.Tensor
    weight: float
    reduce: str
    is_of_all: bool
    of_epoch: str


@dataclass
class Phase:
    """What training has logged in an epoch, or an evaluation.

    Attributes:
        means: by name, those of steps: the index of the loader, the name among its errors, and `of_epoch`.
        numbers: by name, other values.
        metrics: by name, those of torchmetrics: the name in the module, whether the value of the epoch counts, and `of_epoch`.
        errors: by the index of a loader, the means of its errors over all ranks, when all steps are done.
    """

    means: dict[str, tuple[int, str, str]] = field(default_factory=dict)
    numbers: dict[str, Number] = field(default_factory=dict)
    metrics: dict[str, tuple[str, bool, str]] = field(default_factory=dict)
    errors: dict[int, Mapping[str, float]] = field(default_factory=dict)


class Logged:
    """The values of `self.log`, by name.

    Args:
        module: whose metrics they may be.
        defaults: Lightning's rule for on_step and on_epoch, given the name of the hook.
        values: receives the last value of each name, for callbacks and schedulers.
        monitors: names whose values are scores in any case.

    Attributes:
        loader_index: that of the batch under way; None: no step is.
    """

    def __init__(
        self, module: Any, defaults: Callable[..., tuple[bool, bool]], values: dict[str, Any], monitors: Sequence[str] = ()
    ) -> None:
        self._module = module
        self._defaults = cache(defaults)
        self._values = values
        self._monitors = monitors
        self.metrics = Metrics(module)
        self._train = Phase()
        self._evaluation: Phase | None = None
        self.loader_index: int | None = None
        self._size = 0  # of the batch under way, or of the last one
        self._suffix = ""  # of names, where there are several loaders
        self._of_step: dict[str, tuple[Any, float]] = {}  # by the name of an error, the weighted sum and the weight
        self._at_end: dict[str, torch.Tensor] = {}  # what is known in the hooks at the end
        self._scores: dict[str, torch.Tensor] = {}  # what of it is no error of steps
        self._warned: set[str] = set()

    @property
    def _phase(self) -> Phase:
        return self._evaluation or self._train

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
        """`LightningModule.log`. Means of steps are those over all ranks, with and without `sync_dist`. Raises: ConfigError."""
        hook = self._module._current_fx_name
        on_step, on_epoch = (False, True) if hook is None else self._defaults(hook, on_step=on_step, on_epoch=on_epoch)
        # Metrics have the states of all ranks then, and what is logged is known at once.
        is_at_end = str(hook).endswith("_epoch_end")
        suffix = self._suffix if add_dataloader_idx else ""
        key = name + suffix
        of_epoch = f"{name}_epoch{suffix}" if on_step and on_epoch else key
        if is_metric(value):
            path = metric_attribute or self.metrics.name_of(value)
            if path is None:
                raise wrong(name, "a metric that is an attribute of the module", type(value).__name__)
            self._phase.metrics[key] = path, on_epoch, of_epoch
            if on_step and isinstance(value._forward_cache, torch.Tensor):
                self._show_step(key, value._forward_cache.detach(), on_epoch)
            if is_at_end:
                self._take_metric(key)
            return
        number = value.detach() if isinstance(value, torch.Tensor) else torch.tensor(float(value))
        if number.ndim or not number.is_floating_point():
            if number.numel() != 1:
                raise wrong(name, "a single number", f"a tensor of shape {tuple(number.shape)}")
            number = number.reshape(()) if number.is_floating_point() else number.reshape(()).float()
        reduce = str(reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", reduce_fx)).replace("avg", MEAN)
        if reduce not in (MEAN, "sum", "min", "max"):
            raise wrong(name, "reduce_fx mean, sum, min or max", reduce)
        if on_step:
            self._show_step(key, number, on_epoch)
        is_of_batch = self.loader_index is not None or hook in AFTER_STEP
        weight = 1.0 if not is_of_batch else float(self._size if batch_size is None else batch_size)
        if self.loader_index is not None and reduce == MEAN:
            error = score_name(name)
            total, total_weight = self._of_step.get(error, (0.0, 0.0))
            self._of_step[error] = total + number * weight, total_weight + weight
            if on_epoch:
                self._phase.means.setdefault(key, (self.loader_index, error, of_epoch))
        elif on_epoch and hook == "on_after_backward":
            raise wrong(name, f"on_epoch = False in {hook}, or a call in training_step", "on_epoch = True")
        elif on_epoch and (self._size or not is_of_batch):
            weighted = number * weight if reduce == MEAN else number
            self._add(key, Number(weighted, weight, reduce, is_of_batch or sync_dist, of_epoch))
            if is_at_end:
                self._values[key] = number

    def _add(self, name: str, number: Number) -> None:
        numbers = self._phase.numbers
        numbers[name] = combined([numbers[name], number]) if name in numbers else number

    def _show_step(self, name: str, number: torch.Tensor, on_epoch: bool) -> None:
        """Make the value of a step known. (In evaluations, Lightning makes only those of the epoch known.)"""
        if self._evaluation is None:
            self._values[name] = number
            if on_epoch:
                self._values[f"{name}_step"] = number

    def begin_step(self, batch_size: int, loader_index: int = 0, suffix: str = "") -> None:
        """Values belong to a batch from here on. `suffix`: of names, where there are several loaders."""
        self._size = batch_size
        self.loader_index = loader_index
        self._suffix = suffix

    def end_step(self) -> None:
        """Mark the means of a batch as errors of the step."""
        context = hvdtrain.get_run_ctx()
        for name, (total, weight) in self._of_step.items():
            context.mark_as_loss(total, name, as_error=True, custom_inv_norm_factor=weight)
        if not context.losses:
            context.mark_as_loss(torch.zeros(()), "nothing", as_error=True)  # hvdtrain expects at least one
        self._of_step = {}
        self._suffix = ""
        self.loader_index = None

    def end_batches(self) -> None:
        """What hooks after a step log from here on is of no batch."""
        self._size = 0

    def begin_evaluation(self) -> None:
        """What is logged, and metrics that are updated from here on, belong to an evaluation."""
        self.metrics.begin_evaluation()
        self._evaluation = Phase()

    def take_errors(self, means: Mapping[str, float], loader_index: int = 0) -> None:
        self._phase.errors[loader_index] = means

    def gather(self) -> None:
        """Collective, before the hooks at the end of an epoch or an evaluation. Make known what was logged on all ranks, and give
        metrics the states of all ranks."""
        phase = self._phase
        by_rank = hvdtrain.all_gather((self.metrics.states(), phase), name="lightning_logged")
        self.metrics.put_together([states for states, _ in by_rank])
        self._at_end = {}
        self._scores = {}
        for _, of_rank in by_rank:
            phase.means.update(of_rank.means)
        for name, (loader_index, error, of_epoch) in phase.means.items():
            if (mean := phase.errors.get(loader_index, {}).get(error)) is not None:
                self._show(name, torch.tensor(mean), of_epoch)
        self._take([of_rank for _, of_rank in by_rank])
        phase.numbers = {}

    def take_scores(self) -> dict[str, float]:
        """Collective, after those hooks. What was logged and is no error of steps, by name. The logged metrics are reset."""
        phase = self._phase
        self._take(hvdtrain.all_gather(phase, name="lightning_scores"))
        for path, *_ in phase.metrics.values():
            self.metrics[path].reset()
        self.metrics.release()
        self._scores |= {name: self._at_end[name] for name in self._monitors if name in self._at_end}
        errors = {error for means in phase.errors.values() for error in means}
        if self._evaluation is None:
            self._train = Phase()
        self._evaluation = None
        return {score_name(name): float(value) for name, value in self._scores.items() if score_name(name) not in errors}

    def _show(self, name: str, value: torch.Tensor, of_epoch: str) -> None:
        for key in (name, of_epoch):
            self._values[key] = self._at_end[key] = value

    def _take(self, by_rank: Sequence[Phase]) -> None:
        """Make known the numbers that the ranks have logged, and the metrics."""
        for name in dict.fromkeys(name for of_rank in by_rank for name in of_rank.numbers):
            numbers = [of_rank.numbers[name] for of_rank in by_rank if name in of_rank.numbers]
            if not numbers[0].is_of_all:
                self._warn_of_differences(name, numbers)
                numbers = numbers[:1]
            number = combined(numbers)
            self._scores[name] = (number.total / number.weight if number.reduce == MEAN else number.total).cpu()
            self._show(name, self._scores[name], number.of_epoch)
        for of_rank in by_rank:
            self._phase.metrics.update(of_rank.metrics)
        for name in self._phase.metrics:
            self._take_metric(name)

    def _take_metric(self, name: str) -> None:
        path, on_epoch, of_epoch = self._phase.metrics[name]
        if not on_epoch:
            return
        value = self.metrics[path].compute()
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            raise wrong(name, "a metric whose compute() returns a single number", str(value)[:60])
        self._scores[name] = value.detach().cpu()
        self._show(name, self._scores[name], of_epoch)

    def _warn_of_differences(self, name: str, numbers: Sequence[Number]) -> None:
        values = [float(number.total) for number in numbers]
        if name not in self._warned and max(values) - min(values) > 1e-5 * max(map(abs, values)):
            self._warned.add(name)
            log.warning(
                f"self.log: {name!r} was logged at the end of an epoch, as {min(values):.6g} to {max(values):.6g} by the ranks, "
                "of which that of rank 0 counts (log it in the step, or as a metric of torchmetrics: these are of all ranks)"
            )

    def state(self) -> list[Any]:
        """Collective. What training has logged so far in the epoch, by rank, with plain values only."""
        train = self._train
        numbers = {name: tuple(number) for name, number in train.numbers.items()}
        return hvdtrain.all_gather((*self.metrics.state(), train.means, numbers, train.metrics), name="lightning_state")

    def load(self, by_rank: Sequence[Any]) -> None:
        """Continue from what `state` returned, also on another number of ranks."""
        rank = hvdtrain.rank()
        mine = [by_rank[rank]] if len(by_rank) == hvdtrain.size() else list(by_rank) if rank == 0 else []
        self.metrics.load(by_rank[0][0], [states for states, *_ in mine], {name for _, names, *_ in by_rank for name in names})
        for _, _, means, numbers, metrics in mine:
            self._train.means |= means
            self._train.metrics |= metrics
            for name, values in numbers.items():
                number = Number(*values)
                if number.is_of_all or name not in self._train.numbers:
                    self._add(name, number)


def combined(numbers: Sequence[Number]) -> Number:
    totals = torch.stack([number.total for number in numbers])
    reduce = numbers[0].reduce
    total = totals.sum() if reduce == MEAN else getattr(totals, reduce)()
    return numbers[0]._replace(total=total, weight=sum(number.weight for number in numbers))


def wrong(name: str, expected: str, got: str) -> ConfigError:
    return ConfigError.of("wrong-result", f"self.log: expected {expected} for {name!r}, got {got}")


def score_name(name: str) -> str:
    """The name among hvdtrain's scores: 'loss' is what training_step returns."""
    return f"logged_{name}" if name == "loss" else name
