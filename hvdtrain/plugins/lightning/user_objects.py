"""The user's objects of Lightning: the module, the datamodule and the callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from typing import Any

from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.logged import score_name
from hvdtrain.runtime import log

REFUSED = {
    "backward": "hvdtrain computes the gradients, and sends them meanwhile",
    "configure_sharded_model": "hvdtrain has no sharded models",
    **{
        f"{before}_epoch_end": f"Lightning 2 calls on_{now}_epoch_end instead"
        for before, now in (("training", "train"), ("validation", "validation"), ("test", "test"))
    },
}
"""Methods that a module may not define, and why."""

OF_HVDTRAIN = {
    *("StochasticWeightAveraging", "WeightAveraging", "GradientAccumulationScheduler", "LearningRateFinder"),
    *("BatchSizeFinder", "BaseFinetuning"),
}
"""Callbacks of Lightning, and classes derived from them, that would change what hvdtrain does."""

LEFT_OUT = {
    "Checkpoint": "hvdtrain saves each model, cleanup_old_models removes some, and early_stopping_measure says which is best",
    "LearningRateMonitor": "rates are in the log and in reports",
    "DeviceStatsMonitor": "memory and speed are in the log",
    **dict.fromkeys(("ProgressBar", "ModelSummary"), ""),
}
"""Callbacks that show or save what hvdtrain shows and saves, and what to know about it."""


class UserObjects:
    """The objects that the values of a config name, which are made when they are first asked for."""

    def __init__(self, values: Mapping[str, Any], trainer: Any) -> None:
        self.values = values
        self._callbacks_of_config = list(values.get("lightning_callbacks", []))
        self._trainer = trainer

    @cached_property
    def _kinds(self) -> list[type] | None:
        """The classes of the module and the datamodule; None: one is made by a function, whose result is not known yet."""
        names = [name for name in ("lightning_module", "datamodule") if self.values.get(name) is not None]
        values = [as_function(self.values[name], name) for name in names]
        kinds = [value if isinstance(value, type) else getattr(value, "kind", type(value)) for value in values]
        return kinds if all(hasattr(kind, "prepare_data") for kind in kinds) else None

    @property
    def methods(self) -> set[str]:
        """The names of the module's own methods, as far as they are known."""
        return defined_methods(self._kinds[0]) if self._kinds else set()

    @property
    def is_validated(self) -> bool:
        """Whether there are a loader and a step for validation; True, if that is not known yet."""
        if self._kinds is None:
            return True
        has_loader = any("val_dataloader" in defined_methods(kind) for kind in self._kinds)
        return "validation_step" in self.methods and (self.values.get("dev") is not None or has_loader)

    @cached_property
    def module(self) -> Any:
        """The module, attached to the trainer. Raises: ConfigError, if it is none, or one that cannot be trained here."""
        module = self._object("lightning_module")
        base = next((kind for kind in type(module).__mro__ if kind.__name__ == "LightningModule"), None)
        if base is None:
            raise ConfigError.of("wrong-type", f"lightning_module: expected a LightningModule, got {type(module).__name__}")
        self.lightning = base.__module__.removesuffix(".core.module")  # lightning.pytorch, or pytorch_lightning
        for name, reason in REFUSED.items():
            if overrides(name, module):
                raise ConfigError.of(
                    "unsupported", f"lightning_module: expected a module without {name}, got {type(module).__name__} ({reason})"
                )
        module.trainer = self._trainer
        return module

    @cached_property
    def datamodule(self) -> Any:
        datamodule = self._object("datamodule")
        if datamodule is not None:
            datamodule.trainer = self._trainer
        return datamodule

    def _object(self, key: str) -> Any:
        """Itself, or what a class or function returns."""
        value = as_function(self.values.get(key), key)
        is_maker = isinstance(value, type) or (callable(value) and not hasattr(value, "prepare_data"))
        return value() if is_maker else value

    def owner_of(self, method: str) -> Any:
        """The datamodule or the module, whichever has a method of its own; None: none has."""
        owners = [owner for owner in (self.datamodule, self.module) if owner is not None]
        return next((owner for owner in owners if overrides(method, owner)), None)

    @cached_property
    def callbacks(self) -> list[Any]:
        """The user's callbacks of Lightning, with those of the module, which take the place of others of their class or of its
        base. Raises: ConfigError, if one does what hvdtrain does."""
        configured = self.module.configure_callbacks()
        of_module = list(configured) if isinstance(configured, (list, tuple)) else [configured]
        of_config = [
            callback
            for callback in self._callbacks_of_config
            if not any(issubclass(type(replacement), type(callback)) for replacement in of_module)
        ]
        return [callback for callback in [*of_config, *of_module] if is_called(callback)]

    @property
    def savers(self) -> list[Any]:
        """The ModelCheckpoints of the config that choose by the values of epochs."""
        return [
            callback
            for callback in self._callbacks_of_config
            if hasattr(callback, "best_model_score")
            and (monitor := getattr(callback, "monitor", None)) not in (None, "", "step", "epoch")
            and not monitor.endswith("_step")
        ]

    def best(self, num_val: int) -> dict[str, Any]:
        """The keys that choose the best epoch as the first ModelCheckpoint of the config does."""
        if not self.savers or self.values.get("early_stopping_measure"):
            return {}
        saver = self.savers[0]
        name = score_name(saver.monitor)
        datasets = [*(f"val{index}" if index else "dev" for index in range(num_val)), "train"]
        higher = {"higher_is_better": [name]} if saver.mode == "max" else {}
        return {"early_stopping_measure": [f"{dataset}_loss_{name}" for dataset in datasets], **higher}

    def of_lightning(self, name: str) -> Any:
        """A module of the Lightning that the user's class is made with."""
        return import_module(f"{self.lightning}.{name}")


def is_called(callback: Any) -> bool:
    """Whether hvdtrain calls a callback; it may do itself what the callback does. Raises: ConfigError, if it does not."""
    kinds = [kind.__name__ for kind in type(callback).__mro__]
    if OF_HVDTRAIN.intersection(kinds):
        raise ConfigError.of(
            "unsupported",
            f"lightning_callbacks: expected callbacks that watch a training, got {type(callback).__name__} (hvdtrain "
            "averages, accumulates and finds rates: ema_decay, accum_grad_multiple_step, --find-learning-rate; instead "
            "of BaseFinetuning, give all parameters to the optimizer and set requires_grad in on_train_epoch_start)",
        )
    remark = next((LEFT_OUT[name] for name in kinds if name in LEFT_OUT), None)
    if remark:
        log.info(f"lightning_callbacks: {kinds[0]} is left out: {remark}")
    return remark is None


def stops_early(callback: Any) -> bool:
    return any(kind.__name__ == "EarlyStopping" for kind in type(callback).__mro__)


def defined_methods(kind: type) -> set[str]:
    """The names that a class defines, without those of Lightning's base."""
    return {name for ancestor in takewhile(lambda base: not is_base(base), kind.__mro__) for name in vars(ancestor)}


def overrides(name: str, user_object: Any) -> bool:
    """Whether an object has a method of its own, in place of Lightning's."""
    base = next((kind for kind in type(user_object).__mro__ if is_base(kind)), object)
    method = getattr(user_object, name, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(base, name, None)


def is_base(kind: type) -> bool:
    return kind.__name__ in ("LightningModule", "LightningDataModule", "Callback") and "lightning" in kind.__module__
