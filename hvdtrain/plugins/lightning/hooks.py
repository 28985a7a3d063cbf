"""The hooks of a module and of callbacks, called where Lightning calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.given import Given, stops_early

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Hooks:
    """Calls them: those that a class overrides, as Lightning's own do nothing.

    Args:
        trainer: what they get.
    """

    def __init__(self, given: Given, trainer: Any) -> None:
        self._given = given
        self._trainer = trainer
        self._functions: dict[str, list[Callable[..., Any]]] = {}  # by hook
        self._transfer: list[tuple[str, Callable[..., Any]]] | None = None  # None: not looked up yet
        self._num_arguments: dict[str, int] = {}  # by step
        self._modes: dict[Any, bool] = {}  # those of the modules in training

    @property
    def _module(self) -> Any:
        return self._given.module

    def of(self, hook: str) -> list[Callable[..., Any]]:
        """The functions to call: those of the callbacks, then the module's."""
        if (functions := self._functions.get(hook)) is None:
            is_last = hook == "on_train_epoch_end"  # callbacks that stop early come after the module in it
            owners = sorted([*self._given.callbacks, self._module], key=lambda one: is_last and stops_early(one))
            functions = self._functions[hook] = [
                getattr(one, hook) if one is self._module else partial(getattr(one, hook), self._trainer, self._module)
                for one in owners
                if self._given.overrides(hook, one)
            ]
        return functions

    def call(self, hook: str, *args: Any) -> None:
        """Call a hook of the callbacks and of the module."""
        for function in self.of(hook):
            if self.within(hook, function, *args) == -1 and hook == "on_train_batch_start":
                raise ConfigError.of(
                    "wrong-result",
                    "on_train_batch_start: expected None, got -1, which would leave out the rest of the epoch (its batches are "
                    "planned for all ranks; partition_epoch makes shorter epochs)",
                )

    def within(self, hook: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call a function, while `self.log` knows that this is a hook."""
        attributes = vars(self._module)  # `setattr` of a module takes longer than a small step
        before, attributes["_current_fx_name"] = attributes["_current_fx_name"], hook
        result = function(*args)
        attributes["_current_fx_name"] = before
        return result

    def transferred(self, batch: Any, place: int) -> Any:
        """A batch, which is on the device, after the hooks around its transfer and its transfer by the user's code."""
        if self._transfer is None:
            owners = [one for one in (self._given.datamodule, self._module) if one is not None]
            first = {hook: [one for one in owners if self._given.overrides(hook, one)][:1] for hook in TRANSFER}
            self._transfer = [(hook, getattr(one, hook)) for hook, found in first.items() for one in found]
        for hook, function in self._transfer:
            device = (self._module.device,) if hook == "transfer_batch_to_device" else ()
            batch = function(batch, *device, place)
        return batch

    def step(self, name: str, *args: Any) -> Any:
        """What a step of the module returns, which gets as many of the arguments as it takes."""
        if name not in self._num_arguments:
            parameters = inspect.signature(getattr(self._module, name)).parameters.values()
            if any(one.name == "dataloader_iter" for one in parameters):
                raise ConfigError.of("unsupported", f"{name}: expected one that takes a batch, got dataloader_iter")
            takes_all = any(one.kind is one.VAR_POSITIONAL for one in parameters)
            self._num_arguments[name] = len(args) if takes_all else sum(one.kind < one.VAR_POSITIONAL for one in parameters)
        return self.within(name, getattr(self._module, name), *args[: self._num_arguments[name]])

    # Which modules are in evaluation mode

    def note_modes(self) -> None:
        """Note the modes of training, such as a frozen backbone's."""
        self._modes = {module: module.training for module in self._module.modules()}

    def begin_evaluation(self, stage: str) -> None:
        """Put the modules into the mode of evaluations, as the module does. Raises: ConfigError, if the whole is in none."""
        if self._module.training:
            self.note_modes()
        hook = f"on_{stage}_model_eval"
        self.within(hook, getattr(self._module, hook))
        if self._module.training:
            raise ConfigError.of(
                "unsupported",
                f"{hook}: expected the model in evaluation mode after it, as hvdtrain evaluates in that, got "
                "training mode (set the mode of its parts in on_validation_start)",
            )

    def end_evaluation(self, stage: str) -> None:
        """Put the modules into the mode of training again."""
        hook = f"on_{stage}_model_train"
        if self._given.overrides(hook, self._module):
            self.within(hook, getattr(self._module, hook))
        else:
            self.restore_modes()

    def restore_modes(self) -> None:
        for module, mode in self._modes.items():
            module.training = mode

    def state(self) -> dict[str, list[str]]:
        """The names of modules that are in evaluation mode in training, and of parameters that are not trained."""
        module = self._module
        modes = {} if module.training else self._modes
        return {
            "evaluated": [name for name, one in module.named_modules() if not modes.get(one, one.training)],
            "frozen": [name for name, one in module.named_parameters() if not one.requires_grad],
        }

    def load(self, kept: Mapping[str, list[str]]) -> None:
        """Give the modules the modes, and the parameters what is trained of them, that `state` returned."""
        for name, module in self._module.named_modules():
            module.training = name not in kept["evaluated"]
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name not in kept["frozen"])
