"""What a config gives of Lightning: the module, the datamodule and the callbacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from importlib import import_module
from itertools import takewhile
from typing import Any

from hvdtrain.config.references import resolve
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.logged import own_name
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


class Given:
    """The objects, which are made when they are first asked for.

    Args:
        values: the config's.
        trainer: what they see as their trainer.
    """

    def __init__(self, values: Mapping[str, Any], trainer: Any) -> None:
        self.values = values
        self._trainer = trainer

    @cached_property
    def _kinds(self) -> list[type] | None:
        """The classes of the module and the datamodule; None: one is made by a function, whose result is not known yet."""
        given = [self.values[name] for name in ("lightning_module", "datamodule") if self.values.get(name) is not None]
        found = [resolved(one) for one in given]
        kinds = [one if isinstance(one, type) else getattr(one, "kind", type(one)) for one in found]
        return kinds if all(hasattr(kind, "prepare_data") for kind in kinds) else None

    @property
    def methods(self) -> set[str]:
        """The names of the module's own methods, as far as they are known."""
        return own_methods(self._kinds[0]) if self._kinds else set()

    @property
    def is_validated(self) -> bool:
        """Whether there are a loader and a step for validation; True, if that is not known yet."""
        if self._kinds is None:
            return True
        has_loader = any("val_dataloader" in own_methods(kind) for kind in self._kinds)
        return "validation_step" in self.methods and (self.values.get("dev") is not None or has_loader)

    @cached_property
    def module(self) -> Any:
        """The module, attached to the trainer. Raises: ConfigError, if it is none, or one that cannot be trained here."""
        module = made(self.values["lightning_module"], "lightning_module")
        base = next((one for one in type(module).__mro__ if one.__name__ == "LightningModule"), None)
        if base is None:
            raise ConfigError.of("wrong-type", f"lightning_module: expected a LightningModule, got {type(module).__name__}")
        self.lightning = base.__module__.removesuffix(".core.module")  # lightning.pytorch, or pytorch_lightning
        for name, reason in REFUSED.items():
            if self.overrides(name, module):
                raise ConfigError.of(
                    "unsupported", f"lightning_module: expected a module without {name}, got {type(module).__name__} ({reason})"
                )
        module.trainer = self._trainer
        return module

    @cached_property
    def datamodule(self) -> Any:
        """The datamodule; None: the module has the loaders."""
        given = self.values.get("datamodule")
        datamodule = None if given is None else made(given, "datamodule")
        if datamodule is not None:
            datamodule.trainer = self._trainer
        return datamodule

    @cached_property
    def callbacks(self) -> list[Any]:
        """The user's callbacks of Lightning, with those of the module, which take the place of others of their class or of its
        base. Raises: ConfigError, if one does what hvdtrain does."""
        found = self.module.configure_callbacks()
        of_module = list(found) if isinstance(found, (list, tuple)) else [found]
        given = [one for one in self._given_callbacks if not any(issubclass(type(new), type(one)) for new in of_module)]
        return [callback for callback in [*given, *of_module] if self._is_called(callback)]

    @property
    def _given_callbacks(self) -> list[Any]:
        return list(self.values.get("lightning_callbacks", []))

    def _is_called(self, callback: Any) -> bool:
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

    @property
    def monitors(self) -> list[str]:
        """The names of the values of epochs by which ModelCheckpoints of the config choose."""
        return [one.monitor for one in self._savers]

    @property
    def _savers(self) -> list[Any]:
        savers = [one for one in self._given_callbacks if getattr(one, "monitor", None) and hasattr(one, "best_model_score")]
        return [one for one in savers if one.monitor not in ("step", "epoch") and not one.monitor.endswith("_step")]

    def best(self, num_val: int) -> dict[str, Any]:
        """The keys that choose the best epoch as the first ModelCheckpoint of the config does."""
        if not self._savers or self.values.get("early_stopping_measure"):
            return {}
        name = own_name(self._savers[0].monitor)
        datasets = [*(f"val{place}" if place else "dev" for place in range(num_val)), "train"]
        higher = {"higher_is_better": [name]} if self._savers[0].mode == "max" else {}
        return {"early_stopping_measure": [f"{dataset}_loss_{name}" for dataset in datasets], **higher}

    def overrides(self, name: str, one: Any) -> bool:
        """Whether an object overrides a method of Lightning's."""
        base = next((kind for kind in type(one).__mro__ if is_base(kind)), object)
        method = getattr(one, name, None)
        return method is not None and getattr(method, "__func__", method) is not getattr(base, name, None)

    def of_lightning(self, name: str) -> Any:
        """A module of the Lightning that the user's class is made with."""
        return import_module(f"{self.lightning}.{name}")


def resolved(given: Any) -> Any:
    """A value, or what 'file.py:Class' names. Raises: ConfigError."""
    try:
        return resolve(given) if isinstance(given, str) else given
    except (ImportError, ValueError) as error:
        raise ConfigError.of(
            "cannot-import", f"lightning_module: expected a name as 'file.py:Class', got {given!r}: {error}"
        ) from error


def stops_early(callback: Any) -> bool:
    """Whether it is an EarlyStopping, or derived from that."""
    return any(kind.__name__ == "EarlyStopping" for kind in type(callback).__mro__)


def own_methods(kind: type) -> set[str]:
    """The names that a class defines, without those of Lightning's base."""
    return {name for one in takewhile(lambda one: not is_base(one), kind.__mro__) for name in vars(one)}


def is_base(kind: type) -> bool:
    """Whether a class is one that users derive theirs from."""
    return kind.__name__ in ("LightningModule", "LightningDataModule", "Callback") and "lightning" in kind.__module__


def made(given: Any, key: str) -> Any:
    """The object of a value: itself, or what a class or function returns. Raises: ConfigError."""
    value = resolved(given)
    is_maker = isinstance(value, type) or (callable(value) and not hasattr(value, "prepare_data"))
    return value() if is_maker else value
