"""The hooks of a module and of callbacks, called where Lightning calls them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.user_objects import UserObjects, overrides, stops_early

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Hooks:
    """Calls them: those that a class overrides, as Lightning's own do nothing."""

    def __init__(self, user: UserObjects, trainer: Any) -> None:
        self._user = user
        self._trainer = trainer
        self._functions: dict[str, list[Callable[..., Any]]] = {}  # by hook
        self._num_arguments: dict[str, int] = {}  # by step
        self._modes: dict[Any, bool] = {}  # those of the modules in training

    @property
    def _module(self) -> Any:
        return self._user.module

    def of(self, hook: str) -> list[Callable[..., Any]]:
        """The functions to call: those of the callbacks, then the module's."""
        if (functions := self._functions.get(hook)) is None:
            is_last = hook == "on_train_epoch_end"  # callbacks that stop early come after the module in it
            owners = sorted([*self._user.callbacks, self._module], key=lambda owner: is_last and stops_early(owner))
            functions = self._functions[hook] = [
                getattr(owner, hook) if owner is self._module else partial(getattr(owner, hook), self._trainer, self._module)
                for owner in owners
                if overrides(hook, owner)
            ]
        return functions

    def call(self, hook: str, *args: Any) -> None:
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

    def of_module(self, hook: str) -> None:
        """Call a hook that only the module has."""
        self.within(hook, getattr(self._module, hook))

    def transferred(self, batch: Any, loader_index: int) -> Any:
        """A batch, which is on the device, after the hooks around its transfer and its transfer by the user's code."""
        for hook, function in self._transfer_functions:
            device = (self._module.device,) if hook == "transfer_batch_to_device" else ()
            batch = function(batch, *device, loader_index)
        return batch

    @cached_property
    def _transfer_functions(self) -> list[tuple[str, Callable[..., Any]]]:
        """By hook, the function of the datamodule or the module."""
        owners = {hook: self._user.owner_of(hook) for hook in TRANSFER}
        return [(hook, getattr(owner, hook)) for hook, owner in owners.items() if owner is not None]

    def step(self, name: str, *args: Any) -> Any:
        """Call a step of the module with as many of the arguments as it takes."""
        if name not in self._num_arguments:
            parameters = inspect.signature(getattr(self._module, name)).parameters.values()
            if any(parameter.name == "dataloader_iter" for parameter in parameters):
                raise ConfigError.of("unsupported", f"{name}: expected one that takes a batch, got dataloader_iter")
            kinds = [parameter.kind for parameter in parameters]
            takes_all = inspect.Parameter.VAR_POSITIONAL in kinds
            self._num_arguments[name] = len(args) if takes_all else sum(kind < inspect.Parameter.VAR_POSITIONAL for kind in kinds)
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
        self.of_module(hook)
        if self._module.training:
            raise ConfigError.of(
                "unsupported",
                f"{hook}: expected the model in evaluation mode after it, as hvdtrain evaluates in that, got "
                "training mode (set the mode of its parts in on_validation_start)",
            )

    def end_evaluation(self, stage: str) -> None:
        hook = f"on_{stage}_model_train"
        if overrides(hook, self._module):
            self.of_module(hook)
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
            "evaluated": [name for name, submodule in module.named_modules() if not modes.get(submodule, submodule.training)],
            "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        }

    def load(self, state: Mapping[str, list[str]]) -> None:
        """Give the modules the modes, and the parameters what is trained of them, that `state` returned."""
        for name, module in self._module.named_modules():
            module.training = name not in state["evaluated"]
        for name, parameter in self._module.named_parameters():
            parameter.requires_grad_(name not in state["frozen"])
