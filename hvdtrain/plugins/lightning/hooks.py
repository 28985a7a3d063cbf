"""The hooks of a module and of callbacks, called where Lightning calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.given import Given


class Hooks:
    """Calls them.

    Args:
        trainer: what they get.
    """

    def __init__(self, given: Given, trainer: Any) -> None:
        self._given, self._trainer = given, trainer
        self._hooks: dict[str, list[Callable[..., Any]]] = {}
        self._transfers: list[Callable[..., Any]] | None = None  # the hooks of a batch; None: before the first one
        self._taken: dict[str, int] = {}  # by step, the number of its arguments
        self._modes: dict[Any, bool] | None = None  # of the modules, while they are evaluated; None: before the first call

    def call(self, hook: str, *args: Any, monitors: bool | None = None) -> None:
        """Call a hook of the callbacks, then of the module. `monitors`: only callbacks that stop early, or only others."""
        for callback in self._given.callbacks:
            is_monitor = "EarlyStopping" in {one.__name__ for one in type(callback).__mro__}
            if monitors is None or monitors == is_monitor:
                self.within(hook, partial(getattr(callback, hook, nothing), self._trainer, self._module), *args)
        if monitors is not True:
            self.within(hook, getattr(self._module, hook, nothing), *args)

    def call_step(self, hook: str, *args: Any) -> None:
        """The same in steps: nothing but methods that are overridden is called."""
        if hook not in self._hooks:
            of_callbacks = [one for one in self._given.callbacks if self._given.overrides(hook, one)]
            self._hooks[hook] = [partial(getattr(one, hook), self._trainer, self._module) for one in of_callbacks]
            if self._given.overrides(hook, self._module):
                self._hooks[hook].append(getattr(self._module, hook))
        for function in self._hooks[hook]:
            if self.within(hook, function, *args) == -1 and hook == "on_train_batch_start":
                raise ConfigError.of(
                    "wrong-result",
                    "on_train_batch_start: expected None, got -1, which would leave out the rest of the epoch (its batches are "
                    "planned for all ranks; partition_epoch makes shorter epochs)",
                )

    def within(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        values = vars(self._module)  # as a module's own way to set an attribute takes as long as a small layer
        before, values["_current_fx_name"] = values.get("_current_fx_name"), hook
        found = function(*args)
        values["_current_fx_name"] = before
        return found

    def set_mode(self, mode: bool = True) -> Any:
        """`LightningModule.train`: modules that are evaluated in training, such as a frozen backbone, still are after an
        evaluation, as with Lightning."""
        if not mode and self._module.training:
            self._modes = {one: one.training for one in self._module.modules()}
        if not mode or (self._modes is not None and not self._modes):
            type(self._module).train(self._module, mode)
        elif self._modes:
            type(self._module).train(self._module, True)
            for one, training in self._modes.items():
                one.training = training
        if mode:
            self._modes = {}
        return self._module

    def enter_evaluation(self, hook: str) -> None:
        """Call the hook that sets the mode, in the mode of training, as Lightning does. Raises: ConfigError, if that remains."""
        if not self._given.overrides(hook, self._module):
            return
        if not self._module.training:
            self.set_mode(True)
        self.call_own(hook)
        if self._module.training:
            raise ConfigError.of(
                "unsupported",
                f"{hook}: expected the model in evaluation mode after it, as hvdtrain evaluates in that, got training mode (set "
                "the mode of its parts in on_validation_start)",
            )

    def call_own(self, hook: str) -> None:
        """Call a hook of the module's own. (Lightning's would set the modes of modules, which hvdtrain does.)"""
        if self._given.overrides(hook, self._module):
            self.within("", getattr(self._module, hook))

    def transferred(self, batch: Any, place: int) -> Any:
        """A batch after the hooks around its transfer to the device."""
        if self._transfers is None:
            owners = [one for one in (self._given.datamodule, self._module) if one is not None]
            of_hooks = [
                [getattr(one, hook) for one in owners if self._given.overrides(hook, one)]
                for hook in ("on_before_batch_transfer", "on_after_batch_transfer")
            ]
            self._transfers = [functions[0] for functions in of_hooks if functions]
        for function in self._transfers:
            batch = function(batch, place)
        return batch

    def step(self, name: str, *args: Any) -> Any:
        """What a step of the module returns, which gets as many of the arguments as it takes."""
        if name not in self._taken:
            parameters = inspect.signature(getattr(self._module, name)).parameters.values()
            if any(one.name == "dataloader_iter" for one in parameters):
                raise ConfigError.of("unsupported", f"{name}: expected one that takes a batch, got dataloader_iter")
            takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
            self._taken[name] = len(args) if takes_all else sum(one.kind < one.VAR_POSITIONAL for one in parameters)
        return self.within(name, getattr(self._module, name), *args[: self._taken[name]])

    @property
    def _module(self) -> Any:
        return self._given.module

    def modes(self) -> dict[str, list[str]]:
        """The names of modules that are in evaluation mode in training, and of parameters that are not trained."""
        modes, module = self._modes or {}, self._module
        return {
            "evaluated": [name for name, one in module.named_modules() if not modes.get(one, one.training)],
            "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
        }

    def resume_modes(self, kept: Mapping[str, list[str]]) -> None:
        """Give the modules the modes, and the parameters what is trained of them, that `modes` returned."""
        for name, module in self._module.named_modules():
            module.training = name not in kept["evaluated"]
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name not in kept["frozen"])


def nothing(*_: Any) -> None:
    """A hook that is not there."""
