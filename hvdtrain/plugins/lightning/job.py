"""From a LightningModule to hvdtrain's keys: what `training_step` returns is a loss of `train_step`, and so on.

hvdtrain's engine runs the training. It calls, in this order, `get_model`, `make_optimizer`, then the callback's methods,
`train_step` and, in an update, `rate` and `change_gradients`; `of_ranks` when all steps of a dataset are done.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import torch

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.assembly import DividedOptimizer
from hvdtrain.plugins.lightning.arguments import KEY, Extent
from hvdtrain.plugins.lightning.checkpoint import hook_state, load_hooks, read_ckpt, write_ckpt
from hvdtrain.plugins.lightning.hooks import Hooks
from hvdtrain.plugins.lightning.loaders import Loaders, accumulated, loader_index_of
from hvdtrain.plugins.lightning.logged import Logged
from hvdtrain.plugins.lightning.manual import Manual
from hvdtrain.plugins.lightning.metrics import is_metric
from hvdtrain.plugins.lightning.schedules import Schedules, StepOnce
from hvdtrain.plugins.lightning.trainer import Trainer
from hvdtrain.plugins.lightning.user_objects import UserObjects, overrides
from hvdtrain.plugins.other_trainer.attributes import Attributes, saved
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer
from hvdtrain.runtime import log

CLIPPING = "configure_gradient_clipping"
DATA = ("datamodule", "items", "items inside")
"""Objects with attributes that go on in a resumed training, but for lists, in which they may hold the data."""

STEP_HOOKS = ("on_after_backward", "on_before_optimizer_step", CLIPPING)
"""Hooks that may change gradients and rates."""


class Job(OtherTrainer):
    """A module, with what Lightning's Trainer keeps for it.

    Args:
        values: the config's.

    Attributes:
        arguments: those of Lightning's Trainer, and `clip`: how it clips gradients: the value, and 'norm' or 'value'.
        user, loaders, hooks, schedules, logged: the module with its callbacks, their loaders and hooks, rates and logged values.
        trainer: what the module sees.
        stage: train, validation, test or predict.
        batch_idx: the index of the batch under way, or of the last one.
        manual: the steps of optimizers that the module takes itself; None: hvdtrain takes them.
        stops: whether the training is to end after this epoch.
    """

    name = "lightning"
    logged: Logged

    def __init__(self, values: Mapping[str, Any]) -> None:
        import_module("lightning_utilities.core.rank_zero").rank_zero_only.rank = hvdtrain.rank()  # it does not know Horovod
        self.arguments: Mapping[str, Any] = values.get(KEY) or {}
        self.extent = Extent(self.arguments)
        self.trainer = Trainer(self)
        self.user = UserObjects(values, self.trainer)
        self.loaders = Loaders(self.user, self.extent)
        self.hooks = Hooks(self.user, self.trainer)
        self.schedules = Schedules(self.user, self.trainer)
        self.accumulated = accumulated(values)
        self.stage = "train"
        self.batch_idx = -1
        self.stops = False
        self._batch_indices: dict[str, Iterator[int]] = defaultdict(count)  # of an evaluation or a prediction, by dataset
        self._ended: Any = None  # the arguments of on_train_batch_end for the step under way
        self._repeated: Any = None  # the last ones, on a rank that may have fewer batches than others
        self._is_idle = False  # in this step
        self._was_idle = False  # in this epoch
        self._updates = False
        self._num_batches = 0  # of the update under way
        self._begins_update = True
        self._skips = False
        self._is_within_epoch = False
        self.manual: Manual | None = None
        self._has_loss = bool(values.get("early_stopping_measure") or self.user.savers)  # by which the best epoch is known
        self._attributes: Attributes | None = None  # of the objects, when the first epoch began
        self._before_evaluation: Mapping[str, Any] = {}  # those that were changed then
        self._resumed: Any = None  # the modes, and the attributes of all ranks, that a resumed epoch begins with

    @property
    def module(self) -> Any:
        return self.user.module

    @property
    def clip(self) -> tuple[float | None, str | None]:
        if (value := self.arguments.get("gradient_clip_val")) is not None:
            return value, self.arguments.get("gradient_clip_algorithm")
        values = self.user.values
        norm = values.get("gradient_clip_global_norm")
        limit = values.get("gradient_clip")
        return (limit, "value") if norm is None and limit is not None else (norm, None)

    # The model and the optimizer

    def get_model(self, *, device: str, **_: Any) -> Any:
        self.loaders.set_up("fit")
        module = self.module
        module._device = torch.device(device)
        module.configure_model()
        if not module.strict_loading:
            vars(module)["load_state_dict"] = partial(module.load_state_dict, strict=False)
        if self.hooks.of(CLIPPING) and CLIPPING not in self.user.methods and self.arguments.get("gradient_clip_val"):
            raise ConfigError.of(
                "unsupported",
                f"lightning_module: expected the class of a module with {CLIPPING} beside gradient_clip_val, got a function",
            )
        validator = self.user.of_lightning("trainer.connectors.logger_connector.fx_validator")._FxValidator
        monitors = [saver.monitor for saver in self.user.savers]
        defaults = validator.check_logging_and_get_default_levels
        logged = self.logged = Logged(module, defaults, self.trainer.callback_metrics, monitors)

        def log(*args: Any, **kwargs: Any) -> None:  # a function, which copies of the module share
            logged.log(*args, **kwargs)

        vars(module)["log"] = log
        for callback in self.user.callbacks:
            vars(callback).update(log=log, log_dict=module.log_dict)
        self.hooks.note_modes()
        return module

    def make_optimizer(self, parameters: Any) -> Any:
        self.hooks.restore_modes()  # some of its modules may be in evaluation mode
        configured = self.hooks.within("configure_optimizers", self.module.configure_optimizers)
        changes = any(self.hooks.of(hook) for hook in STEP_HOOKS)
        self.optimizer = self.schedules.make(configured, parameters, lambda: self.batch_idx, changes)
        if not self.module.automatic_optimization:
            self.manual = Manual(self.user, self.hooks, self.trainer, self.schedules.members)
        return self.optimizer

    def rate(self, **_: Any) -> float:
        self._updates = True
        return self.schedules.next_rate()

    # Steps

    def train(self, batch: Any) -> None:
        context = hvdtrain.get_run_ctx()
        hooks = self.hooks
        self.stage = "train"
        index = self.batch_idx = context.step if self.training is None else self.training.epoch_step
        batch = hooks.transferred(batch, 0)
        size = self.num_items
        self.schedules.check_groups()
        self.logged.begin_step(size)
        hooks.call("on_train_batch_start", batch, index)
        if self.manual is not None:
            self.manual.num_items = size
        output = hooks.step("training_step", batch, index)
        if self.module.automatic_optimization != (self.manual is None):
            raise ConfigError.of(
                "unsupported", "automatic_optimization: expected it to be set in __init__, got another value later"
            )
        if self.manual is not None:
            loss = loss_of(output, size)[0]
            self._has_loss |= loss is not None
            self._mark(self.manual.end_step(loss), output, batch, size)
            return
        loss, size = loss_of(output, size)
        self._skips = output is None
        if not self._skips and not isinstance(loss, torch.Tensor):
            raise ConfigError.of(
                "wrong-result", f"training_step: expected a loss, a dict with one as 'loss', or None, got {output!r:.60}"
            )
        if self._skips:
            if hvdtrain.size() > 1 or self.accumulated > 1:
                raise ConfigError.of(
                    "wrong-result",
                    "training_step: expected a loss on several ranks and with accum_grad_multiple_step, got None (on "
                    "several ranks, Lightning refuses that, too)",
                )
            loss = sum(parameter.sum() * 0 for parameter in self.module.parameters() if parameter.requires_grad)
            size = 0
        if self._begins_update:
            hooks.call("on_before_zero_grad", self.optimizer)
            for function in hooks.of("optimizer_zero_grad"):
                function(self.trainer.current_epoch, index, StepOnce(self.optimizer, lambda: None, lambda: None))
        self._begins_update = False
        # Lightning's hooks see what a batch adds to the gradients of an update, of which each of N batches is 1/N.
        share = loss if self.accumulated == 1 else loss / self.accumulated
        self.schedules.loss = share.detach()
        if not self._skips:
            hooks.call("on_before_backward", share)
        ended = None if self._skips else {**(output if isinstance(output, Mapping) else {}), "loss": share}
        self._mark(loss, ended, batch, size)

    def _mark(self, loss: Any, output: Any, batch: Any, size: int) -> None:
        """The end of a step: its loss, and what on_train_batch_end gets."""
        self.mark_mean("loss", loss, size)
        self.logged.end_step()
        if self.hooks.of("on_train_batch_end"):
            outputs = {} if output is None else output if isinstance(output, Mapping) else {"loss": output}
            detached = {name: value.detach() if hasattr(value, "detach") else value for name, value in outputs.items()}
            self._ended = detached, batch, self.batch_idx
            self._repeated = self._ended if hvdtrain.size() > 1 else None

    def on_idle_step(self, training: Any) -> None:
        """A rank without a batch ends its last one again, as what a callback averages has to be alike on all ranks. Metrics
        count each batch once."""
        self.logged.end_batches()
        self._ended = self._repeated
        self._is_idle = self._was_idle = True

    def on_step_end(self, training: Any) -> None:
        number = training.epoch_step
        self._check_update(training.is_last_step)
        if self.manual is not None:
            self.manual.restore()
        if takes_step := self._updates and self.manual is None:
            self._begins_update = True
            self.trainer.global_step += 1
            self.schedules.step("step", False, number)
        if training.is_last_step:
            self.schedules.step_epoch(training.epoch)
        if self._ended is not None:
            with self.logged.metrics.unchanged() if self._is_idle else nullcontext():
                self.hooks.call("on_train_batch_end", *self._ended)
        self._ended = None
        self._is_idle = False
        is_evaluated = self.extent.is_evaluated_after(number, lambda: self.loaders.limited("train"), training.step)
        if takes_step:
            self.schedules.after_evaluation = number
        if not (self.loaders.num_val and (is_evaluated or training.is_last_step)):
            self.schedules.step_evaluated()
        self._updates = False
        if is_evaluated:
            training.evaluate()

    def _check_update(self, is_last_step: bool) -> None:
        """Raises: ConfigError, if an update has another number of batches than the hooks, and a module's own updates, go by."""
        self._num_batches += 1
        if self._updates != (self._num_batches == self.accumulated) and not is_last_step:
            raise ConfigError.of(
                "conflict", "keys_of_epoch: accum_grad_multiple_step: expected none with lightning_module, got another number"
            )
        if self._updates:
            self._num_batches = 0

    def change_gradients(self, **_: Any) -> None:
        if self._skips:
            for parameter in self.module.parameters():
                parameter.grad = None
        else:
            self.hooks.call("on_after_backward")
        self.hooks.call("on_before_optimizer_step", self.optimizer)
        if clips := self.hooks.of(CLIPPING):
            clips[0](self.optimizer, gradient_clip_val=self.clip[0], gradient_clip_algorithm=self.clip[1])
        self.schedules.note_rates()

    def evaluate(self, batch: Any) -> None:
        dataset = str(hvdtrain.get_run_ctx().dataset)
        self._begin_evaluation(dataset)
        stage = self.stage
        loader_index = loader_index_of(dataset)
        is_one_of_several = self.loaders.num_val > 1 and stage == "validation"
        index = next(self._batch_indices[dataset])
        batch = self.hooks.transferred(batch, loader_index)
        size = self.num_items
        self.logged.begin_step(size, loader_index, f"/dataloader_idx_{loader_index}" if is_one_of_several else "")
        # Lightning's defaults for dataloader_idx are 0, so that hooks get it only where there are several
        indices = (index, loader_index) if is_one_of_several else (index,)
        self.hooks.call(f"on_{stage}_batch_start", batch, *indices)
        output = self.hooks.step(f"{stage}_step", batch, *indices)
        self.hooks.call(f"on_{stage}_batch_end", output, batch, *indices)
        loss, size = loss_of(output, size)
        if hasattr(loss, "numel") and loss.numel() == 1:
            self._has_loss = True
            self.mark_mean("loss", loss.detach().float().reshape(()), size, is_score=True)
        self.logged.end_step()

    def forward_step(self, *, extern_data: Any, **_: Any) -> None:
        if self.stage != "predict":
            for hook in ("on_predict_epoch_end", "on_predict_end"):
                if self.hooks.of(hook):
                    raise ConfigError.of(
                        "unsupported",
                        f"lightning_module: expected none with {hook}, which the task forward does not call, got one "
                        "(output_file and forward_callback get all outputs)",
                    )
            self.stage = "predict"
            self.hooks.call("on_predict_start")
            self.hooks.call("on_predict_epoch_start")
        batch = self.hooks.transferred(extern_data, 0)
        index = next(self._batch_indices["predict"])
        self.hooks.call("on_predict_batch_start", batch, index)
        output = self.hooks.step("predict_step", batch, index)
        self.hooks.call("on_predict_batch_end", output, batch, index)
        outputs = output if isinstance(output, Mapping) else {"output": output}
        if isinstance(output, (list, tuple)):
            outputs = {f"output{number}": value for number, value in enumerate(output)}
        for name, value in outputs.items():
            hvdtrain.get_run_ctx().mark_as_output(value, str(name))

    # Evaluations

    def on_evaluation_begin(self, training: Any) -> None:
        if self.stage == "train":
            self.hooks.of_module("on_validation_model_zero_grad")
        self._begin_evaluation(training.dataset)

    def _begin_evaluation(self, dataset: str) -> None:
        """Before the first batch of the first dataset, on every rank that has one."""
        if self.stage in ("validation", "test"):
            return
        self._before_evaluation = self._changed()
        stage = self.stage = "test" if dataset == "eval" else "validation"
        self._batch_indices.clear()
        self.logged.begin_evaluation()
        self.hooks.begin_evaluation(stage)
        self.hooks.call(f"on_{stage}_start")
        self.hooks.call(f"on_{stage}_epoch_start")
        self.logged.metrics.end_hooks()

    def of_ranks(self, dataset: str, means: Mapping[str, float]) -> dict[str, float]:
        """Collective, after the last step of a dataset. Returns the scores that are no means, by name."""
        if dataset == "train":
            self.logged.take_errors(means)
            self._share_frozen()
            self.schedules.step_epoch(self.trainer.current_epoch + 1)  # of an epoch that ended early
            return {}
        self._begin_evaluation(dataset)
        stage = self.stage
        loader_index = loader_index_of(dataset)
        self.logged.take_errors(means, loader_index)
        if dataset != "eval" and loader_index < self.loaders.num_val - 1:
            return {}
        self.logged.gather()
        self.hooks.call(f"on_{stage}_epoch_end")
        scores: dict[str, float] = self.logged.take_scores()
        self.hooks.call(f"on_{stage}_end")
        self.hooks.end_evaluation(stage)
        self.stage = "train"
        self.schedules.step_evaluated()
        return scores

    def _share_frozen(self) -> None:
        """Collective. A rank without a batch missed what training_step does to frozen parameters, such as a target network's: it
        takes over those of a rank that had all batches."""
        idle = hvdtrain.all_gather(self._was_idle, name="lightning_idle")
        self._was_idle = False
        if not any(idle) or all(idle):
            return
        frozen = {name: tensor.detach() for name, tensor in self.module.named_parameters() if not tensor.requires_grad}
        sums = hvdtrain.all_gather(
            {name: float(tensor.double().sum()) for name, tensor in frozen.items()}, name="lightning_frozen"
        )
        first = idle.index(False)
        differing = [name for name in frozen if any(of_rank.get(name) != sums[first][name] for of_rank in sums)]
        values = {name: frozen[name].cpu() for name in differing}
        for name, tensor in hvdtrain.all_gather(values, name="lightning_frozen")[first].items():
            frozen[name].copy_(tensor)

    # The training

    def on_train_begin(self, training: Any) -> None:
        if self.hooks.of(CLIPPING) and isinstance(training.optimizer, DividedOptimizer):
            raise ConfigError.of("unsupported", f"{CLIPPING}: expected gradients on every rank, got a sharded optimizer")
        self.training = training
        self.trainer.current_epoch = training.finished_epoch
        self.hooks.call("on_fit_start")
        self.hooks.call("on_train_start")

    def on_epoch_begin(self, training: Any) -> None:
        self.trainer.current_epoch = training.epoch - 1
        self.batch_idx = -1
        self._updates = False
        self._begins_update = True
        if self._attributes is None:
            self._attributes = Attributes(self._objects(), without_lists=DATA)
        if self._resumed is not None:
            modes, attributes = self._resumed
            self.hooks.load(modes)
            self._attributes.load(attributes, hvdtrain.rank(), hvdtrain.size(), self.module.device)
            self._resumed = None
        if self.manual is not None:
            self.manual.restore()
            self.manual.check_batches(self.loaders.of_epoch(epoch=training.epoch), self.loaders.num_of_all("train"))
        if self._is_within_epoch:
            return
        self._is_within_epoch = True
        if not training.epoch_step:
            self.hooks.call("on_train_epoch_start")
            self.logged.metrics.end_hooks()
        elif training.epoch_step >= self.loaders.limited("train"):  # of a .ckpt, after all batches
            self.schedules.epoch = training.epoch

    def on_epoch_end(self, training: Any) -> None:
        self.logged.gather()
        self.hooks.call("on_train_epoch_end")
        for name, value in self.logged.take_scores().items():
            training.add_score(name, value)
        self.schedules.step("epoch", True, training.epoch)
        self._is_within_epoch = False
        if self.manual is not None and not self._has_loss:
            self._has_loss = True
            log.warning(
                "training_step: expected a loss, got None: each epoch has loss 0, so that the first one is the best (return it, "
                "or name a score in early_stopping_measure)"
            )
        if self.extent.ends_after(self.trainer.global_step):
            training.finish("max_steps")
        self.stop_if_due()

    def stop_if_due(self) -> None:
        """End the training after this epoch, if it was asked for and as many epochs are done as there are at least."""
        if self.stops and self.training is not None and self.trainer.current_epoch + 1 >= self.extent.min_epochs:
            self.training.finish("trainer.should_stop was set")

    def on_stop(self, training: Any) -> None:
        self.trainer.current_epoch = training.finished_epoch
        self.hooks.call("on_train_end")
        self.hooks.call("on_fit_end")
        if self.user.datamodule is not None:
            self.user.datamodule.teardown("fit")
        self.hooks.call("teardown", "fit")
        for logger in self.trainer.loggers:
            if training.rank == 0 and hasattr(logger, "finalize"):
                logger.finalize("success")

    def _objects(self) -> dict[str, Any]:
        """Whose attributes go on in a resumed training: modules, data, and callbacks that do not see to it themselves."""
        user = self.user
        items = self.loaders.items
        objects = {f"module {name}": module for name, module in user.module.named_modules() if not is_metric(module)}
        objects |= zip(DATA, (user.datamodule, items, getattr(items, "dataset", None)), strict=True)
        for number, callback in enumerate(user.callbacks):
            if not overrides("state_dict", callback):
                objects[f"callback {number}"] = callback
        return {name: user_object for name, user_object in objects.items() if hasattr(user_object, "__dict__")}

    # Checkpoints

    def on_save(self, training: Any) -> None:
        if self.user.values.get("save_ckpt"):
            self.save_ckpt(Path(training.checkpoint).with_suffix(".ckpt"))

    def save_ckpt(self, file: Any, *_: Any) -> None:
        """As the Trainer's `save_checkpoint`."""
        if hvdtrain.rank() == 0:
            write_ckpt(Path(file), self.user, self.trainer, self.training.finished_epoch)

    def read(self, path: Path) -> dict[str, Any] | None:
        """As the key checkpoint_reader. Raises: CheckpointError."""
        if path.suffix != ".ckpt":
            return None
        contents = read_ckpt(path, self.user, self.trainer)
        if self.optimizer is not None:
            self.schedules.note_rates()
        return contents

    def _changed(self) -> Mapping[str, Any]:
        """The attributes that a resumed training begins with: a stopped evaluation begins anew."""
        if self.stage in ("validation", "test") or self._attributes is None:
            return self._before_evaluation
        return self._attributes.changed()

    def state(self) -> dict[str, Any]:
        """Collective. What a checkpoint keeps besides the model and the optimizer."""
        hooks = hook_state(self.user, self.trainer, {"state_dict": self.module.state_dict()})
        del hooks["state_dict"]  # it is in the model's file; callbacks may read it
        return {
            "schedules": self.schedules.state(),
            "global_step": self.trainer.global_step,
            "is_within_epoch": self._is_within_epoch,
            "modes": self.hooks.state(),
            "attributes": hvdtrain.all_gather(saved(self._changed())),
            "callback_metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "logged": self.logged.state(),
            "manual": [] if self.manual is None else self.manual.state(),
            "hooks": hooks,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.schedules.load(state["schedules"])
        self.trainer.global_step = state["global_step"]
        self._is_within_epoch = state["is_within_epoch"]
        self._resumed = state["modes"], state["attributes"]
        self.trainer.callback_metrics.update({name: torch.tensor(value) for name, value in state["callback_metrics"].items()})
        self.logged.load(state["logged"])
        if self.manual is not None:
            self.manual.load(state["manual"])
        load_hooks(self.user, self.trainer, {**state["hooks"], "state_dict": self.module.state_dict()})


def loss_of(output: Any, num_items: int) -> tuple[Any, Any]:
    """The loss that a step returned, a mean, and the number of its elements."""
    if not isinstance(output, Mapping):
        return output, num_items
    return output.get("loss"), output.get("num_elements", num_items)
