"""The hooks of a Brain, called where SpeechBrain calls them; statistics are those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from copy import copy
from typing import Any

import torch
from speechbrain import Brain, Stage
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.metric_stats import ErrorRateStats, MetricStats

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.other_trainer import OtherTrainer
from hvdtrain.plugins.speechbrain.states import own_states, restore, states_of


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
        self.brain.on_stage_start(stage, epoch)

    def _state(self) -> dict[str, Any]:
        return {"learning_rate": self.rate_of_optimizer(), "recoverables": states_of(self.brain)}

    def _gather(self) -> dict[str, float]:
        """Collective. Let each statistic of the Brain have what all ranks collected; returns their summaries by name."""
        own = {name: one for name, one in vars(self.brain).items() if isinstance(one, (MetricStats, AccuracyStats))}
        collected = {name: _collected(one) for name, one in sorted(own.items())}
        by_rank = hvdtrain.all_gather(collected, name="speechbrain.statistics")
        found: dict[str, float] = {}
        for name, one in own.items():
            several = [of_rank[name] for of_rank in by_rank if name in of_rank]
            if isinstance(one, AccuracyStats):
                one.correct, one.total = (sum(entry[part] for entry in several) for part in ("correct", "total"))
                found |= {name: one.summarize()} if one.total else {}
                continue
            ids = [key for entry in several for key in entry["ids"]]
            order = sorted(range(len(ids)), key=lambda place: str(ids[place]))
            for part in several[0]:
                joined = [value for entry in several for value in entry[part]]
                setattr(one, part, [joined[place] for place in order] if len(joined) == len(ids) else joined)
            if ids and isinstance(one, ErrorRateStats):
                found[name] = float(one.summarize("error_rate"))
            elif ids and type(one) is MetricStats:
                found[name] = float(one.summarize("average"))
        return found


def _collected(one: Any) -> dict[str, Any]:
    """What a statistic has collected: its counts, or the lists that `clear` empties."""
    if isinstance(one, AccuracyStats):
        return {"correct": one.correct, "total": one.total}
    cleared = copy(one)
    cleared.clear()
    found = {}
    for name, value in vars(cleared).items():
        if isinstance(value, list) and not value:
            found[name] = [entry.cpu() if isinstance(entry, torch.Tensor) else entry for entry in getattr(one, name)]
    return found
