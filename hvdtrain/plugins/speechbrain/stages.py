"""The hooks of a Brain, called where SpeechBrain calls them; statistics are those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import numpy
import torch
from speechbrain import Brain, Stage
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.metric_stats import ErrorRateStats, MetricStats

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer
from hvdtrain.plugins.speechbrain.states import own_states, restore, states_of
from hvdtrain.runtime import log


class Stages(OtherTrainer):
    """A Brain, whose stages are hvdtrain's phases.

    What it keeps in checkpoints is what hooks have changed: the learning rate, schedulers, counters. While an epoch's datasets
    are evaluated it is what it was before, as a training that is resumed there evaluates again.
    """

    name = "brain"

    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self.get_model, self.read = maker.get_model, maker.read
        self._before: dict[str, Any] | None = None
        self._last: tuple[Any, Any, Any] | None = None
        self._stage: Stage | None = None
        self._stage_epoch: int | None = None
        self._begun: dict[str, dict[str, Any]] = {}
        self._own_sums: dict[str, Any] = {}
        self._has_warned = False

    @property
    def brain(self) -> Any:
        return self._maker.brain

    def make_optimizer(self, _: Any) -> torch.optim.Optimizer:
        self.optimizer = optimizer = self._maker.optimizer()
        return optimizer  # type: ignore[no-any-return]

    def on_train_begin(self, training: Any) -> None:
        self.training = training

    def on_epoch_begin(self, training: Any) -> None:
        counter = getattr(getattr(self.brain, "hparams", None), "epoch_counter", None)
        if counter is not None:
            counter.current = training.epoch
        self._begin(Stage.TRAIN, training.epoch)
        self._maker.sums.is_training = True

    def on_idle_step(self, _: Any) -> None:
        self._maker.sums.join()

    def on_step_end(self, _: Any) -> None:
        if type(self.brain).on_fit_batch_end is not Brain.on_fit_batch_end:
            batch, outputs, loss = self._last or (None, None, None)
            self.brain.on_fit_batch_end(batch, outputs, loss, True)
        self._last = None

    def on_evaluation_begin(self, training: Any) -> None:
        """Raises: ConfigError, if the evaluation is one within an epoch."""
        if training.is_within_epoch:
            raise ConfigError.of(
                "unsupported",
                "brain: expected evaluations after epochs only, as its hooks decide by them, got one within an epoch",
            )
        is_valid = training.dataset == "dev"
        self._begin(Stage.VALID if is_valid else Stage.TEST, training.epoch if is_valid else None)

    def of_ranks(self, dataset: str, means: Mapping[str, float]) -> dict[str, float]:
        """Collective. End a stage, whose hook gets the exact loss and statistics of all ranks. Returns their summaries."""
        if dataset == "train":
            self._before = self._state()
            self._maker.sums.is_training = False
        if self._stage is None:
            return {}
        found = self._gather()
        self.brain.on_stage_end(self._stage, means.get("loss", math.nan), self._stage_epoch)
        self._stage = None
        return found

    def on_epoch_end(self, _: Any) -> None:
        self._before = None

    def state(self) -> dict[str, Any]:
        return self._before if self._before is not None else self._state()

    def load(self, state: Mapping[str, Any]) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = state["learning_rate"]
        restore(self.brain, state["recoverables"])

    def train(self, batch: Any) -> None:
        brain, context = self.brain, hvdtrain.get_run_ctx()
        if self._stage is not Stage.TRAIN:
            self._begin(Stage.TRAIN, context.epoch)  # a step that is tried before the training
        brain.step = 1 if self.training is None else self.training.epoch_step + 1
        brain.optimizer_step = context.step // brain.grad_accumulation_factor
        with self._maker.sums.step(is_training=True):
            outputs = brain.compute_forward(batch, Stage.TRAIN)
            loss = brain.compute_objectives(outputs, batch, Stage.TRAIN)
        self._last = batch, outputs, loss.detach()  # for on_fit_batch_end
        context.mark_as_loss(loss, "loss")  # one number: the mean over the items of a batch that was collated

    def evaluate(self, batch: Any) -> None:
        brain, stage = self.brain, self._evaluated_stage()
        without = torch.autocast(torch.device(brain.device).type, enabled=False)
        with self._maker.sums.step(is_training=False), without if brain.eval_precision == "fp32" else nullcontext():
            loss = brain.evaluate_batch(batch, stage)
        hvdtrain.get_run_ctx().mark_as_loss(loss, "loss")

    def _evaluated_stage(self) -> Stage:
        """The stage of an evaluation. One outside of a training, whose hooks must not change schedules, is a test."""
        if self._stage is None and not self._maker.is_read and (named := own_states(self.brain)):
            raise ConfigError.of(
                "unsupported",
                f"brain: expected modules whose state is in the model's file, got {next(iter(named))} (evaluate in the training, "
                "or a checkpoint of the Checkpointer's by `load`)",
            )
        if self._stage in (None, Stage.TRAIN):
            self._begin(Stage.TEST, None)
        self.brain.step += 1
        return self._stage

    def _begin(self, stage: Stage, epoch: int | None) -> None:
        self._stage, self._stage_epoch = stage, epoch
        self.brain.step = 0
        before = dict(vars(self.brain))
        self.brain.on_stage_start(stage, epoch)
        values = vars(self.brain).items()
        self._begun = {name: _counted(one) for name, one in values if _is_statistic(one) and one is before.get(name)}
        self._own_sums = {name: copy(one) for name, one in values if _may_be_sum(name, one) and one is not before.get(name)}

    def _state(self) -> dict[str, Any]:
        return {"learning_rate": self.rate_of_optimizer(), "recoverables": states_of(self.brain)}

    def _gather(self) -> dict[str, float]:
        """Collective. Let each statistic of the Brain have what all ranks collected; returns their summaries by name.

        One of an earlier stage, to which this stage has added nothing, stays as it is.
        """
        self._warn_of_sums()
        own = {name: one for name, one in vars(self.brain).items() if _is_statistic(one)}
        begun = {name: self._begun.get(name, {}) for name in own}
        collected = {name: _collected(one, begun[name]) for name, one in sorted(own.items())}
        by_rank = hvdtrain.all_gather(collected, name="speechbrain.statistics")
        summaries: dict[str, float] = {}
        for name, one in own.items():
            several = [of_rank[name] for of_rank in by_rank if name in of_rank]
            if name in self._begun and not any(any(entry.values()) for entry in several):
                continue
            if isinstance(one, AccuracyStats):
                for part in several[0]:
                    setattr(one, part, begun[name].get(part, 0) + sum(entry[part] for entry in several))
                summaries |= {name: one.summarize()} if one.total else {}
                continue
            for part in several[0]:
                kept = getattr(one, part)[: _begin(getattr(one, part), begun[name].get(part, 0))]
                setattr(one, part, [*kept, *(value for entry in several for value in entry[part])])
            order = sorted(range(len(one.ids)), key=lambda place: str(one.ids[place]))
            for part in several[0]:
                if len(values := getattr(one, part)) == len(order):
                    setattr(one, part, [values[place] for place in order])
            if one.ids and isinstance(one, ErrorRateStats):
                summaries[name] = float(one.summarize("error_rate"))
            elif one.ids and type(one) is MetricStats:
                summaries[name] = float(one.summarize("average"))
        return summaries

    def _warn_of_sums(self) -> None:
        """Name what the class itself seems to add up, of which each rank has its own."""
        present = vars(self.brain)
        sums = [name for name, one in self._own_sums.items() if name in present and not _is_same(one, present[name])]
        if sums and hvdtrain.size() > 1 and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"brain: on_stage_end gets {', '.join(sums)} of each rank's own batches (add up what is needed: "
                f"self.{sums[0]} = hvdtrain.all_reduce(self.{sums[0]}))"
            )


def _is_statistic(value: Any) -> bool:
    return isinstance(value, (MetricStats, AccuracyStats))


def _may_be_sum(name: str, value: Any) -> bool:
    """Whether an attribute that a hook has set at the beginning of a stage may count what its batches have."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and value == 0
    return name not in ("step", "optimizer_step") and (is_number or isinstance(value, (list, numpy.ndarray, torch.Tensor)))


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one, other)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other)
    return bool(numpy.array_equal(one, other))


def _counted(one: Any) -> dict[str, Any]:
    """By part of a statistic, how much it has collected."""
    return {part: len(value) if isinstance(value, list) else value for part, value in _collected(one, {}).items()}


def _collected(one: Any, before: Mapping[str, Any]) -> dict[str, Any]:
    """What a statistic has collected: its counts, or the lists that `clear` empties.

    Args:
        before: what is left out, by part: its count, unless it was cleared since then.
    """
    if isinstance(one, AccuracyStats):
        return {part: getattr(one, part) - before.get(part, 0) for part in ("correct", "total")}
    cleared = copy(one)
    cleared.clear()
    parts = {}
    for name, value in vars(cleared).items():
        if isinstance(value, list) and not value:
            values = getattr(one, name)
            new = values[_begin(values, before.get(name, 0)) :]
            parts[name] = [entry.cpu() if isinstance(entry, torch.Tensor) else entry for entry in new]
    return parts


def _begin(values: list[Any], before: int) -> int:
    """Where a stage's values begin in a list that had so many before it, unless it was cleared within the stage."""
    return before if len(values) >= before else 0
