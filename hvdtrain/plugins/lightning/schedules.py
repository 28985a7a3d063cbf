"""The optimizer of a module, and the rates that its schedulers set."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.several_optimizers import SeveralOptimizers
from hvdtrain.plugins.lightning.user_objects import UserObjects, overrides
from hvdtrain.plugins.other_trainer.rates import GroupRates


class Schedules(GroupRates):
    """The optimizer of `configure_optimizers`, whose groups have the rates of its schedulers in every step.

    Args:
        trainer: has the values that schedulers look at.

    Attributes:
        members: the optimizers; several only where the module takes the steps itself.
        configs: Lightning's `LRSchedulerConfig`s.
        loss: the last one that training_step returned on this rank, which an optimizer's closure returns.
        epoch: the last one in which the schedulers of epochs have set the rates.
        after_evaluation: the batch for which schedulers that look at a value wait for the evaluation; 0: none.
    """

    def __init__(self, user: UserObjects, trainer: Any) -> None:
        super().__init__()
        self._user = user
        self._trainer = trainer
        self.members: list[Any] = []
        self.configs: list[Any] = []
        self.loss: Any = None
        self.epoch = 0
        self.after_evaluation = 0

    def make(self, configured: Any, parameters: Any, batch_idx: Callable[[], int], changes: bool) -> Any:
        """The optimizer of what `configure_optimizers` returned. Raises: ConfigError, if there are several.

        Args:
            batch_idx: returns the index of the batch under way.
            changes: whether hooks of the module's may change rates just before a step.
        """
        core = self._user.of_lightning("core.optimizer")
        optimizers, schedulers, monitor = ([], [], None) if configured is None else core._configure_optimizers(configured)
        is_manual = not self._user.module.automatic_optimization
        if len(optimizers) != 1 and not (optimizers and is_manual):
            raise ConfigError.of(
                "unsupported", f"lightning_module: expected one optimizer from configure_optimizers, got {len(optimizers)}"
            )
        self.members = optimizers
        optimizer: Any = optimizers[0] if len(optimizers) == 1 else SeveralOptimizers(optimizers)
        self.take(optimizer, parameters)
        if is_manual:  # the module takes all steps
            self.configs = core._configure_schedulers_manual_opt(schedulers)
        else:
            self.configs = core._configure_schedulers_automatic_opt(schedulers, monitor)
            if overrides("optimizer_step", self._user.module):
                optimizer.step = partial(self._step_of_module, optimizer.step, batch_idx)
            elif changes or len(optimizer.param_groups) > 1:
                optimizer.register_step_pre_hook(lambda *_: self.set_rates())
        core._validate_scheduler_api(self.configs, self._user.module)
        return optimizer

    def _step_of_module(self, step: Callable[[], Any], batch_idx: Callable[[], int]) -> None:
        """In place of the optimizer's own step: let the module take it, which may set rates before and after it."""
        self.set_rates()
        once = StepOnce(self.optimizer, step, self.note_rates, self.loss)
        self._user.module.optimizer_step(self._trainer.current_epoch, batch_idx(), once, once.closure)
        if not once.has_stepped:
            raise ConfigError.of(
                "wrong-result",
                "optimizer_step: expected one call of optimizer.step in each update, got none (accum_grad_multiple_step adds up "
                "the gradients of several batches)",
            )
        self.note_rates()

    def check_groups(self) -> None:
        """Raises: ConfigError, if the module has added groups of parameters."""
        if len(self.optimizer.param_groups) != len(self.rates):
            raise ConfigError.of(
                "wrong-result",
                f"lightning_module: expected the {len(self.rates)} groups of parameters that configure_optimizers made, got "
                f"{len(self.optimizer.param_groups)} (give all groups to the optimizer, and set requires_grad)",
            )

    def step(self, interval: str, on_plateau: bool, number: int) -> None:
        """Let the schedulers of an interval set the rates. `number`: that of the batch or epoch, counted from 1."""
        if not self._user.module.automatic_optimization:  # the module does
            return
        for config in self.configs:
            if (config.interval, config.reduce_on_plateau) != (interval, on_plateau) or number % config.frequency:
                continue
            value = self._trainer.callback_metrics.get(config.monitor) if on_plateau else None
            if on_plateau and value is None:
                if config.strict:
                    logged = ", ".join(self._trainer.callback_metrics)
                    raise ConfigError.of(
                        "unknown-value",
                        f"lr_scheduler: expected a monitor that was logged, got {config.monitor!r}, only: {logged}",
                    )
                continue
            self._user.module.lr_scheduler_step(config.scheduler, value)
            self.note_rates()

    def step_epoch(self, epoch: int) -> None:
        """Let the schedulers of epochs set the rates, once in an epoch."""
        if self.epoch < epoch:
            self.epoch = epoch
            self.step("epoch", False, epoch)

    def step_evaluated(self) -> None:
        """After an evaluation, let those schedulers of steps set the rates that look at a value."""
        if self.after_evaluation:
            self.step("step", True, self.after_evaluation)
        self.after_evaluation = 0

    def state(self) -> dict[str, Any]:
        self.note_rates()  # a hook after the last update may have set them
        of_module = {name: scheduler.state_dict() for name, scheduler in self._of_module().items()}
        plain = {name: getattr(self, name) for name in ("rates", "epoch", "after_evaluation")}
        return {"schedulers": [config.scheduler.state_dict() for config in self.configs], "of_module": of_module, **plain}

    def _of_module(self) -> dict[str, Any]:
        """The schedulers that the module keeps for itself, by the names of its attributes."""
        attributes = vars(self._user.module).items()
        return {name: value for name, value in attributes if isinstance(value, torch.optim.lr_scheduler.LRScheduler)}

    def load(self, state: Mapping[str, Any]) -> None:
        for config, scheduler_state in zip(self.configs, state["schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler_state)
        for name, scheduler in self._of_module().items():
            if name in state["of_module"]:
                scheduler.load_state_dict(state["of_module"][name])
        self.rates = list(state["rates"])
        self.epoch = state["epoch"]
        self.after_evaluation = state["after_evaluation"]
        self.set_rates()


class StepOnce:
    """The optimizer as the module's `optimizer_step` and `optimizer_zero_grad` see it: its step is taken once, as the gradients
    are those of all ranks already."""

    def __init__(self, optimizer: Any, step: Callable[[], Any], before: Callable[[], None], loss: Any = None) -> None:
        self.optimizer = optimizer
        self._step = step
        self._before = before
        self._loss = loss
        self.has_stepped = False

    def closure(self) -> Any:
        return self._loss

    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        loss = None if closure is None else closure()
        if not self.has_stepped:
            self._before()
            self._step()
        self.has_stepped = True
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """hvdtrain drops the gradients after each update. Raises: ConfigError, if zeros are wanted in their place."""
        if not set_to_none:
            raise ConfigError.of(
                "unsupported",
                "zero_grad: expected set_to_none = True, as hvdtrain drops the gradients after each update, got False",
            )

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)
