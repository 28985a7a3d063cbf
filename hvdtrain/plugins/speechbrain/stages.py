"""The hooks of a Brain, called where SpeechBrain calls them; statistics are those of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from copy import copy
from typing import Any

import torch
from speechbrain import Brain, Stage
from speechbrain.utils.Accuracy import AccuracyStats
from speechbrain.utils.metric_stats import ErrorRateStats, MetricStats

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.speechbrain.states import own_states, restore, states_of


class Stages:
    """A callback, and an entry of `epoch_scores`.

    What it keeps in checkpoints is what hooks have changed: the learning rate, schedulers, counters. While an epoch's datasets
    are evaluated it is what it was before, as a training that is resumed there evaluates again.
    """

    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self._first_step = 0
        self._epoch = 0
        self._before: dict[str, Any] | None = None
        self._last: tuple[Any, Any, Any] | None = None
        self._stage: Stage | None = None
        self._stage_epoch: int | None = None

    @property
    def brain(self) -> Any:
        return self._maker.brain

    def on_epoch_begin(self, training: Any) -> None:
        if self._epoch != training.epoch:
            self._epoch, self._first_step = training.epoch, training.step - -(-self._maker.resumed // hvdtrain.size())
            self._maker.resumed = 0
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

    def state_dict(self) -> dict[str, Any]:
        return self._before if self._before is not None else self._state()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for group in self.brain.optimizer.param_groups:
            group["lr"] = state["learning_rate"]
        self._epoch, self._first_step = state["epoch"], state["first_step"]
        restore(self.brain, state["recoverables"])

    def train(self, step: int, epoch: int) -> None:
        """Before a training step: the numbers that the Brain has for it.

        Args:
            step: the number of steps done in the whole training.
        """
        if self._stage is not Stage.TRAIN:
            self._begin(Stage.TRAIN, epoch)  # a step that is tried before the training
        self.brain.step = step - self._first_step + 1
        self.brain.optimizer_step = step // self.brain.grad_accumulation_factor

    def note(self, batch: Any, outputs: Any, loss: torch.Tensor) -> None:
        """What on_fit_batch_end gets after the update."""
        self._last = batch, outputs, loss.detach()

    def evaluate(self) -> Stage:
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
        rate = float(self.brain.optimizer.param_groups[0]["lr"])
        return {
            "learning_rate": rate,
            "epoch": self._epoch,
            "first_step": self._first_step,
            "recoverables": states_of(self.brain),
        }

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
