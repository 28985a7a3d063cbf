"""From a LightningModule to hvdtrain's keys: what `training_step` returns is a loss of `train_step`, and so on.

hvdtrain's engine runs the training. It calls, in this order, `get_model`, `make_optimizer`, then the callback's methods,
`train_step` and, in an update, `rate` and `change_gradients`; `of_ranks` when all steps of a dataset are done.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import KEY, Extent, keys_of_arguments, keys_of_cli
from hvdtrain.plugins.lightning.checkpoint import hook_state, load_hooks, read_ckpt, write_ckpt
from hvdtrain.plugins.lightning.given import Given
from hvdtrain.plugins.lightning.hooks import Hooks
from hvdtrain.plugins.lightning.loaders import Loaders
from hvdtrain.plugins.lightning.logged import Logged
from hvdtrain.plugins.lightning.schedules import Schedules
from hvdtrain.plugins.lightning.trainer import Trainer
from hvdtrain.plugins.other_trainer.trainer import OtherTrainer, refuse_keys

OURS = {
    "get_model": "lightning_module is the model",
    "train_step": "training_step is",
    "optimizer": "configure_optimizers makes it",
    **dict.fromkeys(
        ("learning_rate", "learning_rates", "learning_rate_schedule", "dynamic_learning_rate", "horovod_scale_lr"),
        "configure_optimizers decides on it",
    ),
}
"""Keys that a config with a module does not have, and why."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `lightning_module`. Raises: ConfigError."""
    refuse_keys("lightning_module", values, OURS)
    followed, module = keys_of_arguments(values.get(KEY) or {}), values["lightning_module"]
    own = {name: value for name, value in values.items() if value is not None}
    if isinstance(module, str) and module.endswith((".yaml", ".yml")):
        followed = keys_of_cli(Path(module)) | followed
        del own["lightning_module"]
    job = Job(followed | own)
    return followed | job.keys() | job.loaders.keys()


class Job(OtherTrainer):
    """A module, with what Lightning's Trainer keeps for it.

    Args:
        values: the config's.

    Attributes:
        given, loaders, hooks, schedules, logged: the module with its callbacks, their loaders and hooks, rates and logged values.
        trainer: what the module sees.
    """

    name = "lightning"
    logged: Logged

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.extent = Extent(values.get(KEY) or {})
        self.trainer = Trainer(self)
        self.given = Given(values, self.trainer)
        self.loaders = Loaders(self.given, self.extent)
        self.hooks = Hooks(self.given, self.trainer)
        self.schedules = Schedules(self.given, self.trainer)
        self._evaluating: str | None = None  # the first dataset of the evaluation under way
        self._indices: dict[str, int] = {}  # of its batches, by dataset
        self._predicted = 0  # batches
        self._output: Any = None  # of the step under way, and the batch
        self._updates = False
        self._begins_update = True
        self._skips = False
        self._is_within_epoch = False
        self._modes: Any = None  # that a resumed epoch begins with

    @property
    def module(self) -> Any:
        return self.given.module

    def _log(self) -> Logged:
        """What the module logs, from here on."""
        given = self.given
        validator = given.of_lightning("trainer.connectors.logger_connector.fx_validator")._FxValidator
        logged = Logged(given.module, validator.check_logging_and_get_default_levels, self.trainer.callback_metrics)
        for callback in given.callbacks:
            vars(callback).update(log=logged.log, log_dict=given.module.log_dict)
        vars(given.module).update(
            train=self.hooks.set_mode,
            log=logged.log,
            all_gather=all_gather,
            optimizers=lambda use_pl_optimizer=True: self.optimizer,
            print=self.print,
        )
        return logged

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.trainer.is_global_zero:
            print(*args, **kwargs)  # noqa: T201  # what the module prints

    # The model and the optimizer

    def get_model(self, *, device: str, **_: Any) -> Any:
        self.loaders.set_up("fit")
        self.module._device = torch.device(device)
        self.module.configure_model()
        if not self.module.strict_loading:
            vars(self.module)["load_state_dict"] = partial(self.module.load_state_dict, strict=False)
        self.logged = self._log()
        return self.module

    def make_optimizer(self, parameters: Any) -> Any:
        given = self.hooks.within("configure_optimizers", self.module.configure_optimizers)
        self.optimizer = self.schedules.make(given, parameters)
        return self.optimizer

    def rate(self, **_: Any) -> float:
        """The rate of the next update: that of the first group."""
        self._updates = True
        self.schedules.note_rates()
        return self.schedules.rates[0]

    # Steps

    def train(self, batch: Any) -> None:
        context = hvdtrain.get_run_ctx()
        self.trainer.stage = "train"
        index = context.step if self.training is None else self.training.epoch_step
        batch = self.hooks.transferred(batch, 0)
        size = self.num_items
        self.schedules.check_groups()
        self.logged.begin_step(size)
        self.hooks.call_step("on_train_batch_start", batch, index)
        output = self.hooks.step("training_step", batch, index)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self._skips = loss is None
        if loss is None:
            if hvdtrain.size() > 1 or self.trainer.accumulate_grad_batches > 1:
                raise ConfigError.of(
                    "wrong-result",
                    "training_step: expected a loss on several ranks and with accum_grad_multiple_step, got None (on "
                    "several ranks, Lightning refuses that, too)",
                )
            loss, size = sum(parameter.sum() * 0 for parameter in self.module.parameters() if parameter.requires_grad), 0
        if self._begins_update:
            self.hooks.call_step("on_before_zero_grad", self.optimizer)
        self._begins_update = False
        self.hooks.call_step("on_before_backward", loss)
        self.mark_mean("loss", loss, size)
        self.logged.end_step()
        kept = output if isinstance(output, Mapping) else {} if output is None else {"loss": output}
        self.schedules.batch_idx = index
        self._output = {name: detached(value) for name, value in kept.items()}, batch, index

    def on_step_end(self, training: Any) -> None:
        done, self._output = self._output, None
        number = training.epoch_step
        if self._updates:
            self._begins_update = True
            self.trainer.global_step += 1
            self.schedules.step("step", False, number)
        if training.is_last_step:
            self.schedules.step_epoch(training.epoch)
        if done is not None:
            self.hooks.call_step("on_train_batch_end", *done)
        if self._updates:
            self.schedules.step("step", True, number)
        self._updates = False
        if self.extent.is_evaluated_after(number, lambda: self.loaders.num_batches, training.step):
            training.evaluate()

    def change_gradients(self, **_: Any) -> None:
        if self._skips:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        self.hooks.call_step("on_after_backward")
        self.hooks.call_step("on_before_optimizer_step", self.optimizer)
        self.schedules.note_rates()

    def evaluate(self, batch: Any) -> None:
        dataset = str(hvdtrain.get_run_ctx().dataset)
        self._begin_evaluation(dataset)
        stage, place = self.trainer.stage, place_of(dataset)
        several = self.loaders.num_val > 1 and stage == "validation"
        index = self._indices[dataset] = self._indices.get(dataset, -1) + 1
        batch = self.hooks.transferred(batch, place)
        size = self.num_items
        self.logged.begin_step(size, f"/dataloader_idx_{place}" if several else "")
        # Lightning's defaults for dataloader_idx are 0, so that it is given only where there are several
        given = (place,) if several else ()
        self.hooks.call_step(f"on_{stage}_batch_start", batch, index, *given)
        output = self.hooks.step(f"{stage}_step", batch, index, *given)
        self.hooks.call_step(f"on_{stage}_batch_end", output, batch, index, *given)
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if hasattr(loss, "numel") and loss.numel() == 1:
            self.mark_mean("loss", loss.detach().float().reshape(()), size, is_score=True)
        self.logged.end_step()

    def forward_step(self, *, extern_data: Any, **_: Any) -> None:
        if self.trainer.stage != "predict":
            self._begin_prediction()
        batch, index = self.hooks.transferred(extern_data, 0), self._predicted
        self.hooks.call_step("on_predict_batch_start", batch, index)
        output = self.hooks.step("predict_step", batch, index)
        self.hooks.call_step("on_predict_batch_end", output, batch, index)
        self._predicted += 1
        named = output if isinstance(output, Mapping) else {"output": output}
        if isinstance(output, (list, tuple)):
            named = {f"output{number}": value for number, value in enumerate(output)}
        for name, value in named.items():
            hvdtrain.get_run_ctx().mark_as_output(value, str(name))

    def _begin_prediction(self) -> None:
        for one in (self.module, *self.given.callbacks):
            for hook in ("on_predict_epoch_end", "on_predict_end"):
                if self.given.overrides(hook, one):
                    raise ConfigError.of(
                        "unsupported",
                        f"{type(one).__name__}: expected no {hook}, which the task forward does not call, got one (output_file "
                        "and forward_callback get all outputs)",
                    )
        self.trainer.stage = "predict"
        self.hooks.call("on_predict_start")
        self.hooks.call("on_predict_epoch_start")

    # Evaluations

    def on_evaluation_begin(self, training: Any) -> None:
        if self._evaluating is None:
            self.hooks.within("", self.module.on_validation_model_zero_grad)
        self._begin_evaluation(training.dataset)

    def _begin_evaluation(self, dataset: str) -> None:
        """Before the first batch of the first dataset, on every rank that has one."""
        if self._evaluating is not None:
            return
        stage = self.trainer.stage = "test" if dataset == "eval" else "validation"
        self._evaluating = dataset
        self._indices.clear()
        self.logged.begin_evaluation()
        self.hooks.enter_evaluation(f"on_{stage}_model_eval")
        self.hooks.call(f"on_{stage}_start")
        self.hooks.call(f"on_{stage}_epoch_start")

    def of_ranks(self, dataset: str, means: Mapping[str, float]) -> dict[str, float]:
        """Collective, after the last step of a dataset. Returns the scores that are no means, by name."""
        if dataset == "train":
            self.logged.gather_metrics()
            self.logged.take_means(means)
            self.schedules.step_epoch(self.trainer.current_epoch + 1)  # of an epoch that ended early
            return {}
        self._begin_evaluation(dataset)
        stage, place, number = self.trainer.stage, place_of(dataset), self.loaders.num_val
        self.logged.take_means(means, f"/dataloader_idx_{place}" if number > 1 and stage == "validation" else "")
        if dataset != "eval" and place < number - 1:
            return {}
        self.logged.gather_metrics()
        self.logged.show()
        self.hooks.call(f"on_{stage}_epoch_end")
        scores: dict[str, float] = self.logged.take_scores()
        self.hooks.call(f"on_{stage}_end")
        self.hooks.call_own(f"on_{stage}_model_train")
        self._evaluating = None
        self.trainer.stage = "train"
        return scores

    # The training

    def on_train_begin(self, training: Any) -> None:
        self.training = training
        self.trainer.current_epoch = training.finished_epoch
        self.hooks.call("on_fit_start")
        self.hooks.call("on_train_start")

    def on_epoch_begin(self, training: Any) -> None:
        self.trainer.current_epoch = training.epoch - 1
        self._updates = False
        self._begins_update = True
        if self._modes is not None:
            self.hooks.resume_modes(self._modes)
            self._modes = None
        if self._is_within_epoch:
            return
        self._is_within_epoch = True
        if not training.epoch_step:
            self.hooks.call("on_train_epoch_start")
        elif training.epoch_step >= self.loaders.num_batches:  # of a .ckpt, after all batches
            self.schedules.epoch = training.epoch

    def on_epoch_end(self, training: Any) -> None:
        self.logged.show()
        self.hooks.call("on_train_epoch_end", monitors=False)
        self.hooks.call("on_train_epoch_end", monitors=True)
        for name, value in self.logged.take_scores().items():
            training.add_score(name, value)
        self.schedules.step("epoch", True, training.epoch)
        self._is_within_epoch = False
        if self.extent.ends_after(self.trainer.global_step):
            training.finish("max_steps")
        self.trainer.stop_if_due()

    def on_stop(self, training: Any) -> None:
        self.trainer.current_epoch = training.finished_epoch
        self.hooks.call("on_train_end")
        self.hooks.call("on_fit_end")
        if self.given.datamodule is not None:
            self.given.datamodule.teardown("fit")
        self.hooks.call("teardown", "fit")

    # Checkpoints

    def on_save(self, training: Any) -> None:
        if self.given.values.get("save_ckpt") and training.rank == 0:
            write_ckpt(Path(training.checkpoint).with_suffix(".ckpt"), self.given, self.trainer, training.finished_epoch)

    def read(self, path: Path) -> dict[str, Any] | None:
        """As the key checkpoint_reader. Raises: CheckpointError."""
        if path.suffix != ".ckpt":
            return None
        contents = read_ckpt(path, self.given, self.trainer)
        if self.optimizer is not None:
            self.schedules.note_rates()
        return contents

    def state(self) -> dict[str, Any]:
        """Collective. What a checkpoint keeps besides the model and the optimizer."""
        hooks = hook_state(self.given, self.trainer, {"state_dict": self.module.state_dict()})
        del hooks["state_dict"]  # it is in the model's file; callbacks may read it
        return {
            "schedules": self.schedules.state(),
            "global_step": self.trainer.global_step,
            "is_within_epoch": self._is_within_epoch,
            "modes": self.hooks.modes(),
            "callback_metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "logged": self.logged.state(),
            "hooks": hooks,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        self.schedules.load(state["schedules"])
        self.trainer.global_step = state["global_step"]
        self._is_within_epoch = state["is_within_epoch"]
        self._modes = state["modes"]
        self.trainer.callback_metrics.update({name: torch.tensor(one) for name, one in state["callback_metrics"].items()})
        self.logged.load(state["logged"])
        load_hooks(self.given, self.trainer, {**state["hooks"], "state_dict": self.module.state_dict()})


def place_of(dataset: str) -> int:
    """The number of a loader."""
    return int(dataset[3:]) if dataset.startswith("val") else 0


def detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """`LightningModule.all_gather`, without gradients. Raises: ConfigError."""
    if sync_grads:
        raise ConfigError.of("unsupported", "all_gather: expected sync_grads = False, got True")
    tensor = torch.as_tensor(data)
    of_ranks = hvdtrain.all_gather(tensor.detach().cpu(), name="lightning_all_gather")
    return tensor if len(of_ranks) == 1 else torch.stack(of_ranks).to(tensor.device)
