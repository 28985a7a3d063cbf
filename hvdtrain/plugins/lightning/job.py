"""From a LightningModule to hvdtrain's keys: what `training_step` returns is a loss of `train_step`, and so on.

hvdtrain's engine runs the training. It calls, in this order, `get_model`, `make_optimizer`, then the callback's methods,
`train_step` and, in an update, `rate` and `change_gradients`; `of_ranks` when all steps of a dataset are done.
"""

from __future__ import annotations

import base64
import inspect
import io
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from importlib import import_module
from itertools import takewhile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import hvdtrain
from hvdtrain.config.references import resolve
from hvdtrain.data.formats.objects import is_loader, read_loader
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.plugins.lightning.arguments import KEY, Extent, keys_of_arguments, keys_of_cli
from hvdtrain.plugins.lightning.trainer import Trainer
from hvdtrain.runtime import log

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

REFUSED = {
    "optimizer_step": "hvdtrain updates the parameters, after the gradients of all ranks are added up",
    "optimizer_zero_grad": "hvdtrain drops the gradients after each update",
    "backward": "hvdtrain computes the gradients, and sends them meanwhile",
    "configure_gradient_clipping": "gradient_clip and gradient_clip_global_norm clip, on_before_optimizer_step may change them",
    "transfer_batch_to_device": "batches come on the device",
    "configure_sharded_model": "hvdtrain has no sharded models",
}
"""Methods that a module may not override, and why."""


OF_HVDTRAIN = {
    *("Checkpoint", "ProgressBar", "StochasticWeightAveraging", "WeightAveraging", "GradientAccumulationScheduler"),
    *("LearningRateMonitor", "LearningRateFinder", "BatchSizeFinder", "BaseFinetuning"),
}
"""Callbacks of Lightning, and classes derived from them, that would change what hvdtrain does."""


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from `lightning_module`. Raises: ConfigError."""
    for name, reason in OURS.items():
        if values.get(name) is not None:
            raise ConfigError.of("conflict", f"{name}: expected none with lightning_module, got one ({reason})")
    followed, module = keys_of_arguments(values.get("lightning_trainer") or {}), values["lightning_module"]
    own = {name: value for name, value in values.items() if value is not None}
    if isinstance(module, str) and module.endswith((".yaml", ".yml")):
        followed = keys_of_cli(Path(module)) | followed
        del own["lightning_module"]
    job = Job(values := followed | own)
    keys: dict[str, Any] = {
        "get_model": job.get_model,
        "train_step": job.train_step,
        "forward_step": job.forward_step,
        "optimizer": job.make_optimizer,
        "learning_rate": 1.0,  # of which dynamic_learning_rate says what it is
        "dynamic_learning_rate": job.rate,
        "change_gradients": job.change_gradients,
        "checkpoint_reader": job.read_ckpt,
        "epoch_scores": {"lightning": job},
        "callbacks": [Events(job)],
    }
    keys = followed | keys
    task, number = values.get("task"), job.num_val_loaders
    if values.get("train") is None:
        keys["train"] = {"class": lambda: job.data("train"), "seq_ordering": job.order, "max_batches": job.batches_of_epoch}
    if number and task != "test":
        keys["dev"] = job.evaluated("val")
        keys["eval_datasets"] = {f"val{place}": job.evaluated("val", place) for place in range(1, number)}
    if task == "eval" and values.get("eval") is None and job.has_loader("test"):
        keys["eval"] = job.evaluated("test")
    if task in ("forward", "search"):
        keys["forward_data"] = job.evaluated("predict")
    return keys


class Job:
    """A module, with what Lightning's Trainer keeps for it.

    Args:
        values: the config's.

    Attributes:
        optimizer: None until it is made.
        schedulers: Lightning's `LRSchedulerConfig`s.
        rates: of the optimizer's groups, as the schedulers have set them.
        training: what hvdtrain's callbacks see; None: no training runs.
        trainer: what the module sees.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.extent = Extent(values.get(KEY) or {})
        number = values.get("num_val_loaders")
        self.num_val_loaders = int(self._defines("val_dataloader", "validation_step") if number is None else number)
        self.optimizer: Any = None
        self.schedulers: list[Any] = []
        self.rates: list[float] = []
        self.training: Any = None
        self.trainer = Trainer(self)
        self.evaluating: str | None = None  # the first dataset of the evaluation under way
        self.batch_index = 0
        self.output: Any = None  # of the step under way, and the batch
        self.updates_due = False
        self.begins_update = True
        self.scheduled_epoch = 0
        self.is_within_epoch = False
        self._kept: tuple[list[str], list[str]] = [], []
        self.skips = False
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._modes: dict[Any, bool] | None = None  # of the modules, while they are evaluated; None: before the first call

    # What the config gives

    def _defines(self, loader: str, step: str) -> bool:
        """Whether the classes that the config gives have these methods; True for a function, whose result is not known yet."""
        given = [self.values[name] for name in ("lightning_module", "datamodule") if self.values.get(name) is not None]
        found = [resolved(one) for one in given]
        kinds = [one if isinstance(one, type) else getattr(one, "kind", type(one)) for one in found]
        if not all(hasattr(kind, "prepare_data") for kind in kinds):
            return True
        own = [{name for one in takewhile(lambda one: not is_base(one), kind.__mro__) for name in vars(one)} for kind in kinds]
        return step in own[0] and (self.values.get("dev") is not None or any(loader in names for names in own))

    @cached_property
    def module(self) -> Any:
        """The module, attached to the trainer. Raises: ConfigError, if it is none, or one that cannot be trained here."""
        module = made(self.values["lightning_module"], "lightning_module")
        base = next((one for one in type(module).__mro__ if one.__name__ == "LightningModule"), None)
        if base is None:
            raise ConfigError.of("wrong-type", f"lightning_module: expected a LightningModule, got {type(module).__name__}")
        self.lightning = base.__module__.removesuffix(".core.module")  # lightning.pytorch, or pytorch_lightning
        if not module.automatic_optimization:
            raise ConfigError.of(
                "unsupported",
                f"lightning_module: expected automatic optimization, got {type(module).__name__}, whose training_step itself "
                "updates (hvdtrain first adds up the gradients of all ranks; losses of a GAN have scales of zero in turn, in a "
                "train_step: docs/cookbook.md)",
            )
        for name, reason in REFUSED.items():
            if self.is_overridden(name, module):
                raise ConfigError.of(
                    "unsupported", f"lightning_module: expected a module without {name}, got {type(module).__name__} ({reason})"
                )
        module.trainer = self.trainer
        return module

    @cached_property
    def datamodule(self) -> Any:
        """The datamodule; None: the module has the loaders."""
        given = self.values.get("datamodule")
        datamodule = None if given is None else made(given, "datamodule")
        if datamodule is not None:
            datamodule.trainer = self.trainer
        return datamodule

    @cached_property
    def callbacks(self) -> list[Any]:
        """The user's callbacks of Lightning, with those of the module. Raises: ConfigError, if one does what hvdtrain does."""
        own = self.module.configure_callbacks()
        callbacks = [*self.values.get("lightning_callbacks", []), *(own if isinstance(own, (list, tuple)) else [own])]
        for callback in callbacks:
            kinds = {one.__name__ for one in type(callback).__mro__}
            if kinds & OF_HVDTRAIN:
                raise ConfigError.of(
                    "unsupported",
                    f"lightning_callbacks: expected callbacks that watch a training, got {type(callback).__name__} (hvdtrain "
                    "saves, shows, averages, accumulates and finds rates: cleanup_old_models, ema_decay, "
                    "accum_grad_multiple_step, --find-learning-rate; instead of BaseFinetuning, give all parameters to the "
                    "optimizer and set requires_grad in on_train_epoch_start)",
                )
        return callbacks

    def is_overridden(self, name: str, one: Any) -> bool:
        """Whether an object overrides a method of Lightning's."""
        base = next((kind for kind in type(one).__mro__ if is_base(kind)), object)
        method = getattr(one, name, None)
        return method is not None and getattr(method, "__func__", method) is not getattr(base, name, None)

    @cached_property
    def logged(self) -> Any:
        """What the module logs."""
        from hvdtrain.plugins.lightning.logged import Logged  # here, as it imports torch

        validator = self.of_lightning("trainer.connectors.logger_connector.fx_validator")._FxValidator
        logged = Logged(self.module, validator.check_logging_and_get_default_levels, self.trainer.callback_metrics)
        for callback in self.callbacks:
            vars(callback).update(log=logged.log, log_dict=self.module.log_dict)
        vars(self.module).update(
            train=self.set_mode,
            log=logged.log,
            all_gather=all_gather,
            optimizers=lambda use_pl_optimizer=True: self.optimizer,
            print=self.print,
        )
        return logged

    def of_lightning(self, name: str) -> Any:
        """A module of the Lightning that the user's class is made with."""
        return import_module(f"{self.lightning}.{name}")

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on rank 0."""
        if self.trainer.is_global_zero:
            print(*args, **kwargs)  # noqa: T201  # what the module prints

    # The data

    @cached_property
    def _prepared(self) -> set[str]:
        owner = self.datamodule or self.module
        hvdtrain.run_on_main(lambda: owner.prepare_data(), once_per="host" if owner.prepare_data_per_node else "job")
        if self.datamodule is not None and self.is_overridden("prepare_data", self.module):
            hvdtrain.run_on_main(lambda: self.module.prepare_data(), once_per="host")
        return set()

    def set_up(self, stage: str) -> None:
        """Collective, the first time. Call `prepare_data` and `setup`."""
        if stage in self._prepared:
            return
        self._prepared.add(stage)
        if self.datamodule is not None:
            self.datamodule.setup(stage)
        for callback in self.callbacks:
            callback.setup(self.trainer, self.module, stage)
        self.module.setup(stage)

    @cached_property
    def _loaders(self) -> dict[str, list[Any]]:
        return {}

    def has_loader(self, kind: str) -> bool:
        """Whether the datamodule or the module has a method for the loaders of a kind."""
        return self._owner(kind) is not None

    def _owner(self, kind: str) -> Any:
        owners = [one for one in (self.datamodule, self.module) if one is not None]
        return next((one for one in owners if self.is_overridden(f"{kind}_dataloader", one)), None)

    def loaders(self, kind: str) -> list[Any]:
        """The loaders of train, val, test or predict. Collective, the first time. Raises: ConfigError, if there are none."""
        if kind not in self._loaders:
            given = self.values.get({"train": "train", "val": "dev"}.get(kind, ""))
            if given is None:
                self.set_up({"train": "fit", "val": "validate" if self.values.get("task") == "eval" else "fit"}.get(kind, kind))
                if (owner := self._owner(kind)) is None:
                    hint = " (without an evaluation: num_val_loaders = 0)" if kind == "val" else ""
                    raise ConfigError.of("missing", f"lightning_module: expected {kind}_dataloader, got none{hint}")
                given = getattr(owner, f"{kind}_dataloader")()
            if isinstance(given, Mapping):
                raise ConfigError.of("wrong-type", f"{kind}_dataloader: expected a loader, or a list of several, got a dict")
            loaders = list(given) if isinstance(given, (list, tuple)) else [given]
            expected = self.num_val_loaders if kind == "val" else 1
            if len(loaders) != expected:
                raise ConfigError.of(
                    "out-of-range",
                    f"lightning_module: expected {expected} from {kind}_dataloader, got {len(loaders)} (num_val_loaders says how "
                    "many there are to evaluate; for training, torch.utils.data.ConcatDataset joins several)",
                )
            self._loaders[kind] = loaders
        return self._loaders[kind]

    def data(self, kind: str, place: int = 0) -> Any:
        """What hvdtrain reads of one of them: the items of a DataLoader. Raises: ConfigError, if none can be planned."""
        loader = self.loaders(kind)[place]
        if not is_loader(loader):
            return loader
        objects, order = read_loader(f"{kind}_dataloader", loader)
        if kind == "train":
            self._order = order
        return objects

    def order(self, *, epoch: int, **_: Any) -> str:
        """The order of the training data."""
        return "default" if self.extent.overfits else self._order

    def evaluated(self, kind: str, place: int = 0) -> dict[str, Any]:
        """The keys of a dataset to evaluate."""

        def batches(**_: Any) -> int:
            return self.extent.batches(kind, self._num_batches(kind, place))

        return {"class": lambda: self.data(kind, place), "seq_ordering": "default", "max_batches": batches}

    def batches_of_epoch(self, *, epoch: int, **_: Any) -> int:
        """Those of a rank in an epoch of training."""
        return self.extent.batches_in(epoch, self._num_batches("train"), self.trainer.accumulate_grad_batches)

    @property
    def num_batches(self) -> int:
        """Those of a rank in an epoch of training; the last ones may be missing."""
        return self.extent.batches("train", self._num_batches("train"))

    def _num_batches(self, kind: str, place: int = 0) -> int:
        """Those that a rank has of a loader."""
        loader = self.loaders(kind)[place]
        size = (self.values.get("max_seqs_dev") if kind != "train" else None) or self.values.get("max_seqs") or loader.batch_size
        number = -(-len(loader.dataset) // size) if size else len(loader)
        return int(-(-number // hvdtrain.size()))

    # The model and the optimizer

    def get_model(self, *, device: str, **_: Any) -> Any:
        import torch

        self.set_up("fit")
        module = self.module
        module._device = torch.device(device)
        module.configure_model()
        self._hooks = {}
        _ = self.logged
        return module

    def make_optimizer(self, parameters: Any) -> Any:
        """The only optimizer of `configure_optimizers`, whose groups have the rates of its schedulers in every step."""
        core = self.of_lightning("core.optimizer")
        self._known_hook = self.module._current_fx_name = "configure_optimizers"
        made_of = self.module.configure_optimizers()
        self.module._current_fx_name = None
        optimizers, schedulers, monitor = ([], [], None) if made_of is None else core._configure_optimizers(made_of)
        if len(optimizers) != 1:
            raise ConfigError.of(
                "unsupported", f"lightning_module: expected one optimizer from configure_optimizers, got {len(optimizers)}"
            )
        self.optimizer = optimizer = optimizers[0]
        self.schedulers = core._configure_schedulers_automatic_opt(schedulers, monitor)
        core._validate_scheduler_api(self.schedulers, self.module)
        trained = {id(one) for group in optimizer.param_groups for one in group["params"]}
        for parameter in parameters:
            if id(parameter) not in trained:
                parameter.requires_grad_(False)
        optimizer.register_step_pre_hook(lambda *_: self.set_rates())
        self.note_rates()
        return optimizer

    def note_rates(self) -> None:
        """Take over the rates of the optimizer's groups."""
        self.rates = [float(group["lr"]) for group in self.optimizer.param_groups]

    def set_rates(self) -> None:
        """Set the rates of the optimizer's groups, each its own."""
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate

    def rate(self, **_: Any) -> float:
        """The rate of the next update: that of the first group. The module may have set it itself, as in a hook."""
        self.updates_due = True
        self.note_rates()
        return self.rates[0]

    def schedule(self, interval: str, on_plateau: bool, number: int) -> None:
        """Let the schedulers of an interval set the rates. `number`: that of the batch or epoch, counted from 1."""
        due = [one for one in self.schedulers if one.interval == interval and one.reduce_on_plateau == on_plateau]
        for config in due:
            if number % config.frequency:
                continue
            value = self.trainer.callback_metrics.get(config.monitor) if on_plateau else None
            if on_plateau and value is None:
                if config.strict:
                    known = ", ".join(self.trainer.callback_metrics)
                    raise ConfigError.of(
                        "unknown-value",
                        f"lr_scheduler: expected a monitor that was logged, got {config.monitor!r}, only: {known}",
                    )
                continue
            self.module.lr_scheduler_step(config.scheduler, value)
            self.note_rates()

    def schedule_epoch(self) -> None:
        """Let the schedulers of epochs set the rates, once in an epoch."""
        if self.scheduled_epoch < self.trainer.current_epoch + 1:
            self.scheduled_epoch = self.trainer.current_epoch + 1
            self.schedule("epoch", False, self.scheduled_epoch)

    # The hooks

    def call(self, hook: str, *args: Any, monitors: bool | None = None) -> None:
        """Call a hook of the callbacks, then of the module. `monitors`: only callbacks that stop early, or only others."""
        for callback in self.callbacks:
            is_monitor = "EarlyStopping" in {one.__name__ for one in type(callback).__mro__}
            if monitors is None or monitors == is_monitor:
                self._in(hook, partial(getattr(callback, hook, nothing), self.trainer, self.module), *args)
        if monitors is not True:
            self._in(hook, getattr(self.module, hook, nothing), *args)

    def call_step(self, hook: str, *args: Any) -> None:
        """The same in steps: nothing but methods that are overridden is called."""
        if hook not in self._hooks:
            of_callbacks = [one for one in self.callbacks if self.is_overridden(hook, one)]
            self._hooks[hook] = [partial(getattr(one, hook), self.trainer, self.module) for one in of_callbacks]
            if self.is_overridden(hook, self.module):
                self._hooks[hook].append(getattr(self.module, hook))
        for function in self._hooks[hook]:
            if self._in(hook, function, *args) == -1 and hook == "on_train_batch_start":
                raise ConfigError.of(
                    "wrong-result",
                    "on_train_batch_start: expected None, got -1, which would leave out the rest of the epoch (its batches are "
                    "planned for all ranks; partition_epoch makes shorter epochs)",
                )

    def _in(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        before, self.module._current_fx_name = self.module._current_fx_name, hook
        found = function(*args)
        self.module._current_fx_name = before
        return found

    def set_mode(self, mode: bool = True) -> Any:
        """`LightningModule.train`: modules that are evaluated in training, such as a frozen backbone, still are after an
        evaluation, as with Lightning."""
        if not mode and self.module.training:
            self._modes = {one: one.training for one in self.module.modules()}
        if not mode or (self._modes is not None and not self._modes):
            type(self.module).train(self.module, mode)
        elif self._modes:
            type(self.module).train(self.module, True)
            for one, training in self._modes.items():
                one.training = training
        if mode:
            self._modes = {}
        return self.module

    def _enter_evaluation(self, hook: str) -> None:
        """Call the hook that sets the mode, in the mode of training, as Lightning does. Raises: ConfigError, if that remains."""
        if not self.is_overridden(hook, self.module):
            return
        if not self.module.training:
            self.set_mode(True)
        self._call_own(hook)
        if self.module.training:
            raise ConfigError.of(
                "unsupported",
                f"{hook}: expected the model in evaluation mode after it, as hvdtrain evaluates in that, got training mode (set "
                "the mode of its parts in on_validation_start)",
            )

    def _call_own(self, hook: str) -> None:
        """Call a hook of the module's own. (Lightning's would set the modes of modules, which hvdtrain does.)"""
        if self.is_overridden(hook, self.module):
            self._in("", getattr(self.module, hook))

    # Steps

    def train_step(self, *, model: Any, extern_data: Any, **_: Any) -> None:
        context = hvdtrain.get_run_ctx()
        if context.train_flag:
            self._train(context, extern_data)
        else:
            self._evaluate(context, extern_data)

    def _train(self, context: Any, batch: Any) -> None:
        self.trainer.stage = "train"
        self.batch_index = index = context.step if self.training is None else self.training.epoch_step
        batch = self.transferred(batch, 0)
        size = len(context.seq_tags())
        if len(self.optimizer.param_groups) != len(self.rates):
            raise ConfigError.of(
                "wrong-result",
                f"lightning_module: expected the {len(self.rates)} groups of parameters that configure_optimizers made, got "
                f"{len(self.optimizer.param_groups)} (give all groups to the optimizer, and set requires_grad)",
            )
        self.logged.begin_step(size)
        self.call_step("on_train_batch_start", batch, index)
        output = self._in("training_step", self.module.training_step, *self._arguments("training_step", batch, index))
        loss = output.get("loss") if isinstance(output, Mapping) else output
        self.skips = loss is None
        if loss is None:
            if hvdtrain.size() > 1 or self.values.get("accum_grad_multiple_step") not in (None, 1):
                raise ConfigError.of(
                    "wrong-result",
                    "training_step: expected a loss on several ranks and with accum_grad_multiple_step, got None (on "
                    "several ranks, Lightning refuses that, too)",
                )
            loss, size = sum(parameter.sum() * 0 for parameter in self.module.parameters() if parameter.requires_grad), 0
        if self.begins_update:
            self.call_step("on_before_zero_grad", self.optimizer)
        self.begins_update = False
        self.call_step("on_before_backward", loss)
        context.mark_as_loss(loss * size, "loss", use_normalized_loss=True, custom_inv_norm_factor=size)
        self.logged.end_step()
        kept = output if isinstance(output, Mapping) else {} if output is None else {"loss": output}
        self.output = {name: detached(value) for name, value in kept.items()}, batch, index

    def end_step(self) -> None:
        """After a step, on every rank."""
        done, self.output = self.output, None
        number = self.training.epoch_step
        if self.updates_due:
            self.begins_update = True
            self.trainer.global_step += 1
            self.schedule("step", False, number)
        if self.training.is_last_step:
            self.schedule_epoch()
        if done is not None:
            self.call_step("on_train_batch_end", *done)
        if self.updates_due:
            self.schedule("step", True, number)
        self.updates_due = False

    def change_gradients(self, **_: Any) -> None:
        if self.skips:
            for parameter in self.module.parameters():
                parameter.grad = None
            return
        self.call_step("on_after_backward")
        self.call_step("on_before_optimizer_step", self.optimizer)
        self.note_rates()

    def _evaluate(self, context: Any, batch: Any) -> None:
        self.begin_evaluation(context.dataset)
        stage, place = self.trainer.stage, self._place(context.dataset)
        several = self.num_val_loaders > 1 and stage == "validation"
        index = self._indices[context.dataset] = self._indices.get(context.dataset, -1) + 1
        batch = self.transferred(batch, place)
        size = len(context.seq_tags())
        self.logged.begin_step(size, f"/dataloader_idx_{place}" if several else "")
        # Lightning's defaults for dataloader_idx are 0, so that it is given only where there are several
        given = (place,) if several else ()
        self.call_step(f"on_{stage}_batch_start", batch, index, *given)
        name = f"{stage}_step"
        output = self._in(name, getattr(self.module, name), *self._arguments(name, batch, index, *given))
        self.call_step(f"on_{stage}_batch_end", output, batch, index, *given)
        loss: Any = output.get("loss") if isinstance(output, Mapping) else output
        if hasattr(loss, "numel") and loss.numel() == 1:
            context.mark_as_loss(loss.detach().float().reshape(()) * size, "loss", as_error=True, custom_inv_norm_factor=size)
        self.logged.end_step()

    def forward_step(self, *, model: Any, extern_data: Any, **_: Any) -> None:
        context = hvdtrain.get_run_ctx()
        if self.trainer.stage != "predict":
            self._begin_prediction()
        batch, index = self.transferred(extern_data, 0), self.batch_index
        self.call_step("on_predict_batch_start", batch, index)
        output = self._in("predict_step", self.module.predict_step, *self._arguments("predict_step", batch, index))
        self.call_step("on_predict_batch_end", output, batch, index)
        self.batch_index += 1
        named = output if isinstance(output, Mapping) else {"output": output}
        if isinstance(output, (list, tuple)):
            named = {f"output{number}": value for number, value in enumerate(output)}
        for name, value in named.items():
            context.mark_as_output(value, str(name))

    def _begin_prediction(self) -> None:
        for one in (self.module, *self.callbacks):
            for hook in ("on_predict_epoch_end", "on_predict_end"):
                if self.is_overridden(hook, one):
                    raise ConfigError.of(
                        "unsupported",
                        f"{type(one).__name__}: expected no {hook}, which the task forward does not call, got one (output_file "
                        "and forward_callback get all outputs)",
                    )
        self.trainer.stage = "predict"
        self.call("on_predict_start")
        self.call("on_predict_epoch_start")

    def transferred(self, batch: Any, place: int) -> Any:
        """A batch after the hooks around its transfer to the device."""
        for hook in ("on_before_batch_transfer", "on_after_batch_transfer"):
            has_own = self.datamodule is not None and self.is_overridden(hook, self.datamodule)
            owner = self.datamodule if has_own else self.module
            if has_own or self.is_overridden(hook, owner):
                batch = getattr(owner, hook)(batch, place)
        return batch

    def _arguments(self, name: str, *args: Any) -> tuple[Any, ...]:
        """As many of them as the step takes."""
        if name not in self._taken:
            parameters = inspect.signature(getattr(self.module, name)).parameters.values()
            if any(one.name == "dataloader_iter" for one in parameters):
                raise ConfigError.of("unsupported", f"{name}: expected one that takes a batch, got dataloader_iter")
            takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
            self._taken[name] = len(args) if takes_all else sum(one.kind < one.VAR_POSITIONAL for one in parameters)
        return args[: self._taken[name]]

    @cached_property
    def _taken(self) -> dict[str, int]:
        return {}

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {}

    # Evaluations

    def _place(self, dataset: str) -> int:
        return int(dataset[3:]) if dataset.startswith("val") else 0

    def _is_last(self, dataset: str) -> bool:
        return dataset == "eval" or self._place(dataset) == self.num_val_loaders - 1

    def begin_evaluation(self, dataset: str) -> None:
        """Before the first batch of the first dataset, on every rank that has one."""
        if self.evaluating is not None:
            return
        stage = self.trainer.stage = "test" if dataset == "eval" else "validation"
        self.evaluating = dataset
        self._indices.clear()
        self.logged.begin_evaluation()
        self._enter_evaluation(f"on_{stage}_model_eval")
        self.call(f"on_{stage}_start")
        self.call(f"on_{stage}_epoch_start")

    def of_ranks(self, dataset: str, means: Mapping[str, float]) -> dict[str, float]:
        """Collective, after the last step of a dataset. Returns the scores that are no means, by name."""
        if dataset == "train":
            self.logged.gather_metrics()
            self.logged.take_means(means)
            self.schedule_epoch()  # of an epoch that ended early
            return {}
        self.begin_evaluation(dataset)
        several = self.num_val_loaders > 1 and self.trainer.stage == "validation"
        self.logged.take_means(means, f"/dataloader_idx_{self._place(dataset)}" if several else "")
        if not self._is_last(dataset):
            return {}
        stage = self.trainer.stage
        self.logged.gather_metrics()
        self.call(f"on_{stage}_epoch_end")
        scores: dict[str, float] = self.logged.take_scores()
        self.call(f"on_{stage}_end")
        self._call_own(f"on_{stage}_model_train")
        self.evaluating = None
        self.trainer.stage = "train"
        return scores

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Collective. What a checkpoint keeps besides the model and the optimizer."""
        self.note_rates()  # a hook after the last update may have set them
        return {
            "schedulers": [config.scheduler.state_dict() for config in self.schedulers],
            "rates": self.rates,
            "global_step": self.trainer.global_step,
            "scheduled_epoch": self.scheduled_epoch,
            "is_within_epoch": self.is_within_epoch,
            "evaluated": [name for name, one in self.module.named_modules() if not (self._modes or {}).get(one, one.training)],
            "frozen": [name for name, one in self.module.named_parameters() if not one.requires_grad],
            "callback_metrics": {name: float(value) for name, value in self.trainer.callback_metrics.items()},
            "logged": self.logged.state(),
            "hooks": {
                name: value
                for name, value in self.hook_state({"state_dict": self.module.state_dict()}).items()
                if name != "state_dict"  # it is in the model's file; callbacks may read it
            },
        }

    def hook_state(self, contents: dict[str, Any]) -> dict[str, Any]:
        """What the module, the datamodule and the callbacks add to a checkpoint."""
        named = {"epoch": self.trainer.current_epoch, "global_step": self.trainer.global_step, "callbacks": {}, **contents}
        for callback in self.callbacks:
            if found := callback.state_dict():
                named["callbacks"][callback.state_key] = found
            callback.on_save_checkpoint(self.trainer, self.module, named)
        if self.datamodule is not None and (found := self.datamodule.state_dict()):
            named[type(self.datamodule).__qualname__] = found
        self.module.on_save_checkpoint(named)
        return named

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned."""
        for config, one in zip(self.schedulers, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(one)
        self.rates = list(state["rates"])
        self.set_rates()
        self.trainer.global_step = state["global_step"]
        self.scheduled_epoch = state["scheduled_epoch"]
        self.is_within_epoch = state["is_within_epoch"]
        self._kept = state["evaluated"], state["frozen"]
        import torch

        self.trainer.callback_metrics.update({name: torch.tensor(one) for name, one in state["callback_metrics"].items()})
        self.logged.load(state["logged"])
        self.load_hooks({**state["hooks"], "state_dict": self.module.state_dict()})

    def load_hooks(self, contents: dict[str, Any]) -> None:
        """Give the module, the datamodule and the callbacks what `hook_state` returned."""
        self.module.on_load_checkpoint(contents)
        if self.datamodule is not None and type(self.datamodule).__qualname__ in contents:
            self.datamodule.load_state_dict(contents[type(self.datamodule).__qualname__])
        for callback in self.callbacks:
            callback.on_load_checkpoint(self.trainer, self.module, contents)
            if callback.state_key in contents.get("callbacks", {}):
                callback.load_state_dict(contents["callbacks"][callback.state_key])

    def read_ckpt(self, path: Path) -> dict[str, Any] | None:
        """As the key checkpoint_reader: a .ckpt, whose optimizer, schedulers and states of hooks are taken over here.

        Raises:
            CheckpointError: it has more than tensors and plain values, or is of another optimizer.
        """
        import torch

        if path.suffix != ".ckpt":
            return None
        try:
            contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            self.load_hooks(contents)
            if self.optimizer is not None and contents.get("optimizer_states"):
                self.optimizer.load_state_dict(contents["optimizer_states"][0])
                for config, state in zip(self.schedulers, contents["lr_schedulers"], strict=True):
                    config.scheduler.load_state_dict(state)
                self.note_rates()
            model = contents["state_dict"]
        except (KeyError, ValueError, RuntimeError, UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: expected a .ckpt of Lightning's with tensors and plain values, of this module and its optimizer, got "
                f"{type(error).__name__}: {error}"
            ) from error
        self.trainer.global_step = contents.get("global_step", 0)
        if not self.module.strict_loading:
            own = self.module.state_dict()
            model = {**own, **{name: value for name, value in model.items() if name in own}}
        return {"model": model, **position(path, contents, self.trainer.accumulate_grad_batches)}

    def resume_modes(self) -> None:
        """Give the modules the modes, and the parameters what is trained of them, that hooks had set before the stop."""
        evaluated, frozen = self._kept
        for name, module in self.module.named_modules():
            module.training = name not in evaluated
        for name, parameter in self.module.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def write_ckpt(self, file: Path) -> None:
        """Write what `load_from_checkpoint` reads."""
        import torch

        contents = {
            "pytorch-lightning_version": import_module(self.lightning.partition(".")[0]).__version__,
            "state_dict": self.module.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [config.scheduler.state_dict() for config in self.schedulers],
            "loops": {},
            "finished_epoch": self.training.finished_epoch,
        }
        if self.module.hparams:
            contents |= {"hparams_name": self.module._hparams_name, "hyper_parameters": dict(self.module.hparams)}
        if self.datamodule is not None and self.datamodule.hparams:
            contents["datamodule_hyper_parameters"] = dict(self.datamodule.hparams)
        torch.save(self.hook_state(contents), file)


class Events:
    """The callback of hvdtrain by which a job learns where the training is."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._resumes = False

    def on_train_begin(self, training: Any) -> None:
        self._job.training = training
        self._job.trainer.current_epoch = training.finished_epoch
        self._job.call("on_fit_start")
        self._job.call("on_train_start")

    def on_epoch_begin(self, training: Any) -> None:
        job = self._job
        job.trainer.current_epoch = training.epoch - 1
        job.updates_due = False
        job.begins_update = True
        if self._resumes:
            job.resume_modes()
        if not job.is_within_epoch:
            job.is_within_epoch = True
            if not training.epoch_step:  # else a .ckpt is from within the epoch
                job.call("on_train_epoch_start")
        self._resumes = False

    def on_step_end(self, training: Any) -> None:
        job = self._job
        job.end_step()
        if job.extent.is_evaluated_after(training.epoch_step, job.num_batches, training.step):
            training.evaluate()

    def on_evaluation_begin(self, training: Any) -> None:
        if self._job.evaluating is None:
            self._job._in("", self._job.module.on_validation_model_zero_grad)
        self._job.begin_evaluation(training.dataset)

    def on_epoch_end(self, training: Any) -> None:
        job = self._job
        job.call("on_train_epoch_end", monitors=False)
        job.call("on_train_epoch_end", monitors=True)
        for name, value in job.logged.take_scores().items():
            training.add_score(name, value)
        job.schedule("epoch", True, training.epoch)
        job.is_within_epoch = False
        if job.extent.ends_after(job.trainer.global_step):
            training.finish("max_steps")
        job.trainer.stop_if_due()

    def on_save(self, training: Any) -> None:
        if self._job.values.get("save_ckpt") and training.rank == 0:
            self._job.write_ckpt(Path(training.checkpoint).with_suffix(".ckpt"))

    def on_stop(self, training: Any) -> None:
        job = self._job
        job.trainer.current_epoch = training.finished_epoch
        job.call("on_train_end")
        job.call("on_fit_end")
        if job.datamodule is not None:
            job.datamodule.teardown("fit")
        job.call("teardown", "fit")

    def state_dict(self) -> dict[str, Any]:
        import torch

        file = io.BytesIO()
        torch.save(self._job.state(), file)
        return {"lightning": base64.b64encode(file.getvalue()).decode()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        import torch

        self._job.load(torch.load(io.BytesIO(base64.b64decode(state["lightning"])), weights_only=True))
        self._resumes = True


def position(path: Path, contents: Mapping[str, Any], accumulated: int) -> dict[str, int]:
    """The finished epochs and the steps of a training whose .ckpt this is, and the batches that it has done of the next one, if
    each step had as many items as now.

    Raises:
        CheckpointError: it was written between two updates.
    """
    if not (loop := contents.get("loops", {}).get("fit_loop")):
        epoch, step = contents.get("finished_epoch", contents.get("epoch", 0)), contents.get("global_step", 0)
        return {"epoch": int(epoch), "step": int(step) * accumulated}
    batches = loop["epoch_loop.batch_progress"]
    begun, finished = (int(loop["epoch_progress"]["current"][name]) for name in ("ready", "completed"))
    steps, done = int(batches["total"]["processed"]), int(batches["current"]["processed"])
    if begun == finished:
        return {"epoch": finished, "step": steps}
    if done % accumulated:
        raise CheckpointError(f"{path}: expected one with whole updates of {accumulated} batches, got one after batch {done}")
    log.info(f"{path} is from within epoch {begun}, which goes on after {done} of its batches on each rank.")
    return {"epoch": finished, "step": steps, "batches": done * hvdtrain.size()}


def resolved(given: Any) -> Any:
    """A value, or what 'file.py:Class' names. Raises: ConfigError."""
    try:
        return resolve(given) if isinstance(given, str) else given
    except (ImportError, ValueError) as error:
        raise ConfigError.of(
            "cannot-import", f"lightning_module: expected a name as 'file.py:Class', got {given!r}: {error}"
        ) from error


def is_base(kind: type) -> bool:
    """Whether a class is one that users derive theirs from."""
    return kind.__name__ in ("LightningModule", "LightningDataModule", "Callback") and "lightning" in kind.__module__


def made(given: Any, key: str) -> Any:
    """The object of a value: itself, or what a class or function returns. Raises: ConfigError."""
    value = resolved(given)
    is_maker = isinstance(value, type) or (callable(value) and not hasattr(value, "prepare_data"))
    return value() if is_maker else value


def nothing(*_: Any) -> None:
    """A hook that is not there."""


def detached(value: Any) -> Any:
    return value.detach() if hasattr(value, "detach") else value


def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
    """`LightningModule.all_gather`, without gradients. Raises: ConfigError."""
    import torch

    if sync_grads:
        raise ConfigError.of("unsupported", "all_gather: expected sync_grads = False, got True")
    tensor = torch.as_tensor(data)
    of_ranks = hvdtrain.all_gather(tensor.detach().cpu(), name="lightning_all_gather")
    return tensor if len(of_ranks) == 1 else torch.stack(of_ranks).to(tensor.device)
