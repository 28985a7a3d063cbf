"""Optimizers that a module steps itself (`automatic_optimization = False`), with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import KEY as ARGUMENTS
from hvdtrain.plugins.lightning.hooks import Hooks
from hvdtrain.plugins.lightning.user_objects import UserObjects
from hvdtrain.plugins.other_trainer.rates import parameters_of

KEYS = ("accum_grad_multiple_step", "gradient_clip", "gradient_clip_global_norm")
"""Those that change updates of hvdtrain's."""


class Manual:
    """What `manual_backward` and the optimizers' `step` do. hvdtrain has nothing to minimize then: its updates are empty.

    Each backward ends with the gradients of all ranks: the mean over their items.

    Attributes:
        num_items: that of the batch under way.
        stepped: the optimizers as the module gets them, which call `optimizer_step`.

    Raises:
        ConfigError: the config changes updates that are not hvdtrain's.
    """

    def __init__(self, user: UserObjects, hooks: Hooks, trainer: Any, optimizers: Sequence[Any]) -> None:
        unfit = [name for name in KEYS if user.values.get(name) not in (None, False, 1)]
        unfit += ["torch_distributed.sharded"] if (user.values.get("torch_distributed") or {}).get("sharded") else []
        unfit += ["mixed_precision"] if user.values.get("mixed_precision") == "float16" else []
        unfit += ["max_steps"] if (user.values.get(ARGUMENTS) or {}).get("max_steps", -1) not in (None, -1) else []
        if unfit:
            raise ConfigError.of(
                "conflict", f"{unfit[0]}: expected none with automatic_optimization = False, where training_step updates, got one"
            )
        self._hooks = hooks
        self._trainer = trainer
        self._optimizers = list(optimizers)
        self.lightning_module = user.module  # for `toggle_model`
        kind = user.of_lightning("core.optimizer").LightningOptimizer
        self.stepped = [kind._to_lightning_optimizer(optimizer, self) for optimizer in optimizers]
        self.num_items = 0
        self._gradients: list[tuple[Any, Any]] = []  # by parameter, those that hvdtrain's empty update would drop
        self._carried: WeakValueDictionary[Any, Any] = WeakValueDictionary()  # by parameter, its gradient of earlier batches
        self._accumulates = False  # whether a step used such gradients

    def check_batches(self, of_rank: int, of_all: int) -> None:
        """Before an epoch. Raises: ConfigError, if a rank has less batches, and so less updates, than others."""
        size = hvdtrain.size()
        if of_rank * size > of_all:
            raise ConfigError.of(
                "unsupported",
                f"automatic_optimization = False: expected as many batches on each of {size} ranks, got {of_all} in all "
                f"(lightning_trainer = {{'limit_train_batches': {of_all // size}}} leaves the last ones out)",
            )

    def backward(self, loss: Any, optimizer: Any, *args: Any, **more: Any) -> None:
        self._hooks.call("on_before_backward", loss)
        loss.backward(*args, **more)
        self._reduce()
        self._hooks.call("on_after_backward")

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], **more: Any) -> Any:
        def before_step() -> Any:
            result = closure()
            self._hooks.call("on_before_optimizer_step", optimizer)
            self._accumulates |= any(
                parameter.grad is not None and parameter.grad is self._carried.get(parameter)
                for parameter in parameters_of(optimizer)
            )
            self._check_alike(optimizer)
            return result

        result = optimizer.step(before_step, **more)
        self._trainer.global_step += 1
        return result

    def _reduce(self) -> None:
        """Collective. Give parameters the mean gradients of all ranks' items."""
        if hvdtrain.size() == 1:
            return
        parameters = parameters_of(*self._optimizers)
        gradients = [torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters]
        has_gradient = torch.tensor([float(parameter.grad is not None) for parameter in parameters], device=gradients[0].device)
        flat = torch.cat([*(gradient.float().flatten() for gradient in gradients), torch.ones_like(has_gradient[:1])])
        total = hvdtrain.all_reduce(torch.cat([flat * self.num_items, has_gradient]), name="lightning_gradients")
        means = total[: len(flat) - 1] / total[len(flat) - 1]
        split = torch.split(means, [parameter.numel() for parameter in parameters])
        for parameter, gradient, mean, count in zip(parameters, gradients, split, total[len(flat) :].tolist(), strict=True):
            if count:
                parameter.grad = gradient.copy_(mean.view_as(parameter))

    def _check_alike(self, optimizer: Any) -> None:
        """Collective. Raises: ConfigError, if the ranks would not take the same step."""
        if hvdtrain.size() == 1:
            return
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm()) if gradients else 0.0
        steps = hvdtrain.all_gather((self._optimizers.index(optimizer), norm), name="lightning_step")
        if any(step != steps[0] for step in steps):
            raise ConfigError.of(
                "wrong-result",
                "training_step: expected the same steps of optimizers on all ranks, by self.manual_backward(loss), got by rank "
                f"(optimizer, norm of its gradients) {', '.join(map(str, steps))}",
            )

    def end_step(self, loss: Any) -> torch.Tensor:
        """Take the gradients away before hvdtrain's update. Returns its loss: the number that training_step returned, or 0."""
        self._gradients = [(parameter, parameter.grad) for parameter in parameters_of(*self._optimizers)]
        for parameter, _ in self._gradients:
            parameter.grad = None
        nothing = torch.zeros((), device=self._gradients[0][0].device, requires_grad=True)
        return nothing if loss is None else nothing + loss.detach().reshape(())

    def restore(self) -> None:
        """After hvdtrain's update, and when a resumed epoch begins: the module may add to its gradients, or read them."""
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._carried = WeakValueDictionary({parameter: grad for parameter, grad in self._gradients if grad is not None})
        self._gradients = []

    def state(self) -> list[Any]:
        """The gradients to which later batches add theirs; empty: there are none."""
        parameters = parameters_of(*self._optimizers) if self._accumulates else []
        return [None if parameter.grad is None else parameter.grad.cpu() for parameter in parameters]

    def load(self, gradients: Sequence[Any]) -> None:
        pairs = zip(parameters_of(*self._optimizers), gradients, strict=False)
        self._gradients = [(parameter, None if grad is None else grad.to(parameter.device)) for parameter, grad in pairs]
        self._accumulates = bool(gradients)
