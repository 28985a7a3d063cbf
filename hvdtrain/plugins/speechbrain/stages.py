"""The hooks of a Brain, called where SpeechBrain calls them, and its optimizers, whose rates the hooks set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from speechbrain import Brain, Stage

import hvdtrain
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, SeveralOptimizers
from hvdtrain.learner.torch.trees import without_numpy
from hvdtrain.plugins.other_trainer.rates import GroupRates, parameters_of
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer, overridden
from hvdtrain.plugins.speechbrain.states import (
    add_attributes,
    attributes_of,
    hparams_of,
    load_from,
    modules_with_state,
    restore,
    states_of,
)
from hvdtrain.plugins.speechbrain.statistics import Statistics, readable
from hvdtrain.runtime import log


class Stages(OtherTrainer):
    """A Brain, whose stages are hvdtrain's phases.

    What it keeps in checkpoints is what hooks have changed: the learning rate, schedulers, counters. While an epoch's datasets
    are evaluated it is what it was before, as a training that is resumed there evaluates again.
    """

    name = "brain"

    clips = False  # whether it clips gradients, by the groups of the optimizers
    has_their_batches = False  # whether the batches of an epoch are those of SpeechBrain
    optimizers: Optimizers
    _is_read = False  # whether a checkpoint of SpeechBrain's was loaded
    _updates = False  # whether the step under way ends with an update

    def __init__(self, maker: Any) -> None:
        self._maker = maker
        self._before: dict[str, Any] | None = None
        self._last: tuple[Any, Any, Any] | None = None
        self._stage: Stage | None = None
        self._stage_epoch: int | None = None
        self._statistics = Statistics()
        self._average = 0.0  # with which the next epoch begins: one that is resumed had steps before

    @property
    def brain(self) -> Any:
        return self._maker.brain

    def get_model(self, *, device: str, **_: Any) -> torch.nn.Module:
        if not self._maker.is_unused:
            self._maker.make()
        self._maker.is_unused = False
        self.brain.device = device
        self._maker.sums.of(self.brain.modules)
        return self.brain.modules  # type: ignore[no-any-return]

    def make_optimizer(self, _: Any) -> AnyOptimizer:
        self.optimizers = Optimizers(self.brain)
        self.optimizer = self.optimizers.optimizer
        return self.optimizer  # type: ignore[no-any-return]

    def change_gradients(self, **_: Any) -> None:
        if self.clips or type(self.brain).freeze_optimizers is not Brain.freeze_optimizers:
            self.optimizers.change_gradients(self.clips)

    def read(self, path: Path) -> dict[str, Any] | None:
        """As the key checkpoint_reader: a folder of the Checkpointer's. Raises: CheckpointError."""
        if not path.is_dir():
            return None
        contents = load_from(path, self.brain)
        self._is_read = True
        if self.brain.optimizer is not None and (batches := contents["batches"]) != 0:
            if batches is None or not self.has_their_batches or batches % self.brain.grad_accumulation_factor:
                where = "with no dataloader-TRAIN" if batches is None else f"after {batches} batches"
                raise CheckpointError(
                    f"{path}: expected a checkpoint from the end of an epoch, or its batches, got one from within an "
                    f"epoch, {where} (SpeechBrain's batches need the class's datasets and batch_size unchanged)"
                )
        return contents

    def on_train_begin(self, training: Any) -> None:
        self.training = training

    def on_epoch_begin(self, training: Any) -> None:
        self._updates = False
        if (counter := hparams_of(self.brain).get("epoch_counter")) is not None:
            counter.current = training.epoch
        self._begin(Stage.TRAIN, training.epoch)
        self.brain.step = training.epoch_step
        self.brain.avg_train_loss = self._average
        self._average = 0.0
        self._maker.sums.is_training = True

    def on_idle_step(self, _: Any) -> None:
        self._maker.sums.join()

    def rate(self, **_: Any) -> float:
        self._updates = True
        return self.optimizers.next_rate()

    def on_step_end(self, _: Any) -> None:
        brain = self.brain
        updates = self._updates
        self._updates = False
        brain.optimizer_step += updates
        if type(brain).on_fit_batch_end is not Brain.on_fit_batch_end:
            batch, outputs, loss = self._last or (None, None, None)
            brain.on_fit_batch_end(batch, outputs, loss, updates)
            if loss is not None:  # read after the hook, as there
                brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)
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
        summaries = self._statistics.gather(self.brain)
        loss = means.get("loss", math.nan)
        if self._stage is Stage.TRAIN:
            self.brain.avg_train_loss = loss
        elif self._stage is Stage.VALID:
            self.brain.step = 0  # as there, where it is the last batch's in the hooks of the other stages
        self.brain.on_stage_end(self._stage, loss, self._stage_epoch)
        self.brain.step = 0
        self.brain.avg_train_loss = 0.0
        self._stage = None
        return summaries

    def on_epoch_end(self, training: Any) -> None:
        self._before = None
        counter = hparams_of(self.brain).get("epoch_counter")
        if getattr(counter, "should_stop", False):
            training.finish(f"the {type(counter).__name__}")

    def state(self) -> dict[str, Any]:
        return self._before if self._before is not None else self._state()

    def load(self, state: Mapping[str, Any]) -> None:
        # one rate, in earlier releases
        self.optimizers.rates = state.get("rates") or [state["learning_rate"]] * len(self.optimizers.rates)
        self.optimizers.set_rates()
        self.brain.optimizer_step = state.get("optimizer_step", 0)
        self._statistics.resumed = state.get("statistics", [])
        self._average = state.get("avg_train_loss", 0.0)
        restore(self.brain, state["recoverables"])
        add_attributes(self.brain, state.get("attributes", {}))

    def train(self, batch: Any) -> None:
        brain = self.brain
        context = hvdtrain.get_run_ctx()
        if self._stage is not Stage.TRAIN:
            self._begin(Stage.TRAIN, context.epoch)  # a step that is tried before the training
        brain.step = 1 if self.training is None else self.training.epoch_step + 1
        if type(brain).on_fit_batch_start is not Brain.on_fit_batch_start:
            brain.on_fit_batch_start(batch, True)
        with self._maker.sums.step(is_training=True):
            outputs = brain.compute_forward(batch, Stage.TRAIN)
            loss = brain.compute_objectives(outputs, batch, Stage.TRAIN)
        self._last = batch, outputs, loss.detach()  # for on_fit_batch_end
        context.mark_as_loss(loss, "loss")  # one number: the mean over the items of a batch that was collated

    def evaluate(self, batch: Any) -> None:
        stage = self._evaluated_stage()
        in_fp32 = torch.autocast(torch.device(self.brain.device).type, enabled=False)
        with self._maker.sums.step(is_training=False), in_fp32 if self.brain.eval_precision == "fp32" else nullcontext():
            loss = self.brain.evaluate_batch(batch, stage)
        hvdtrain.get_run_ctx().mark_as_loss(loss, "loss")

    def _evaluated_stage(self) -> Stage:
        """The stage of an evaluation. One outside of a training, whose hooks must not change schedules, is a test."""
        if self._stage is None and not self._is_read and (modules := modules_with_state(self.brain)):
            raise ConfigError.of(
                "unsupported",
                f"brain: expected modules whose state is in the model's file, got {next(iter(modules))} (evaluate in the "
                "training, or a checkpoint of the Checkpointer's by `load`)",
            )
        if self._stage in (None, Stage.TRAIN):
            if methods := overridden(type(self.brain), Brain, ("evaluate", "on_evaluate_start")):
                log.warning(
                    f"brain: {methods[0]} of {type(self.brain).__name__} is not called: load_epoch says what is evaluated "
                    "(`python -m hvdtrain average` makes one of several)"
                )
            self._begin(Stage.TEST, None)
        self.brain.step += 1
        return self._stage

    def _begin(self, stage: Stage, epoch: int | None) -> None:
        self._stage = stage
        self._stage_epoch = epoch
        self.brain.step = 0
        with self._statistics.beginning(self.brain):
            self.brain.on_stage_start(stage, epoch)

    def _state(self) -> dict[str, Any]:
        self.optimizers.note_rates()
        state = {
            "rates": self.optimizers.rates,
            "optimizer_step": self.brain.optimizer_step,
            "recoverables": states_of(self.brain),
            "attributes": attributes_of(self.brain),
        }
        if self._stage is Stage.TRAIN and self.training is not None:
            state["statistics"] = readable(without_numpy(self._statistics.collected(self.brain)))
            state["avg_train_loss"] = float(self.brain.avg_train_loss)
        return state


class Optimizers(GroupRates):
    """What `init_optimizers` makes. Raises: ConfigError, if it makes none."""

    def __init__(self, brain: Any) -> None:
        super().__init__()
        self._brain = brain
        brain.optimizers_dict = None
        brain.init_optimizers()
        self._by_name = brain.optimizers_dict or {"optimizer": getattr(brain, "optimizer", None)}
        members = list(self._by_name.values())
        if None in members:
            raise ConfigError.of("unsupported", "brain: expected an optimizer from init_optimizers, got none")
        if not hasattr(brain, "optimizer"):
            brain.optimizer = members[0]
        self.take(members[0] if len(members) == 1 else SeveralOptimizers(members), brain.modules.parameters())
        if len(self.rates) > 1:
            for member in members:
                member.register_step_pre_hook(lambda *_: self.set_rates())

    def change_gradients(self, clips: bool) -> None:
        """Leave out those that are frozen, and clip the gradients of the first group of each of the others, as there."""
        active = self._brain.freeze_optimizers(self._by_name)
        for name, member in self._by_name.items():
            if name not in active:
                for parameter in parameters_of(member):
                    parameter.grad = None
            elif clips:
                torch.nn.utils.clip_grad_norm_(member.param_groups[0]["params"], self._brain.max_grad_norm)
