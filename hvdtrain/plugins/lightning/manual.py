"""Optimizers that a module steps itself (`automatic_optimization = False`), with the gradients of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.lightning.arguments import KEY as ARGUMENTS
from hvdtrain.plugins.lightning.given import Given
from hvdtrain.plugins.lightning.hooks import Hooks

KEYS = ("accum_grad_multiple_step", "gradient_clip", "gradient_clip_global_norm")
"""Those that change updates of hvdtrain's."""


class Manual:
    """What `manual_backward` and the optimizers' `step` do. hvdtrain has nothing to minimize then: its updates are empty.

    Each backward ends with the gradients of all ranks: the mean over their items.

    Args:
        trainer: counts the steps of all optimizers, as with Lightning.
        optimizers: of PyTorch.

    Attributes:
        num_items: that of the batch under way.
        stepped: the optimizers as the module gets them, which call `optimizer_step`.

    Raises:
        ConfigError: the config changes updates that are not hvdtrain's.
    """

    def __init__(self, given: Given, hooks: Hooks, trainer: Any, optimizers: Sequence[Any]) -> None:
        unfit = [name for name in KEYS if given.values.get(name) not in (None, False, 1)]
        unfit += ["torch_distributed.sharded"] if (given.values.get("torch_distributed") or {}).get("sharded") else []
        unfit += ["mixed_precision"] if given.values.get("mixed_precision") == "float16" else []
        unfit += ["max_steps"] if (given.values.get(ARGUMENTS) or {}).get("max_steps", -1) not in (None, -1) else []
        if unfit:
            raise ConfigError.of(
                "conflict", f"{unfit[0]}: expected none with automatic_optimization = False, where training_step updates, got one"
            )
        self._hooks = hooks
        self._trainer = trainer
        self._optimizers = list(optimizers)
        self.lightning_module = given.module  # for `toggle_model`
        kind = given.of_lightning("core.optimizer").LightningOptimizer
        self.stepped = [kind._to_lightning_optimizer(one, self) for one in optimizers]
        self.num_items = 0
        self._kept: list[tuple[Any, Any]] = []  # parameters with their gradients, which hvdtrain's empty update would drop
        self._carried: dict[Any, Any] = {}  # by parameter, a weak reference to its gradient of earlier batches
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
            if not self._accumulates:
                stepped = [one for group in optimizer.param_groups for one in group["params"] if one in self._carried]
                self._accumulates = any(one.grad is not None and one.grad is self._carried[one]() for one in stepped)
            self._check_alike(optimizer)
            return result

        result = optimizer.step(before_step, **more)
        self._trainer.global_step += 1
        return result

    def _parameters(self) -> list[Any]:
        return [parameter for one in self._optimizers for group in one.param_groups for parameter in group["params"]]

    def _reduce(self) -> None:
        """Collective. Give parameters the mean gradients of all ranks' items."""
        if hvdtrain.size() == 1:
            return
        parameters = self._parameters()
        gradients = [torch.zeros_like(one) if one.grad is None else one.grad for one in parameters]
        has_gradient = torch.tensor([float(one.grad is not None) for one in parameters], device=gradients[0].device)
        flat = torch.cat([*(gradient.float().flatten() for gradient in gradients), torch.ones_like(has_gradient[:1])])
        total = hvdtrain.all_reduce(torch.cat([flat * self.num_items, has_gradient]), name="lightning_gradients")
        means = total[: len(flat) - 1] / total[len(flat) - 1]
        sizes = [parameter.numel() for parameter in parameters]
        for parameter, mean, count in zip(parameters, torch.split(means, sizes), total[len(flat) :].tolist(), strict=True):
            if count:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad.copy_(mean.view_as(parameter))

    def _check_alike(self, optimizer: Any) -> None:
        """Collective. Raises: ConfigError, if the ranks would not take the same step."""
        if hvdtrain.size() == 1:
            return
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
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
        self._kept = [(one, one.grad) for one in self._parameters()]
        for parameter, _ in self._kept:
            parameter.grad = None
        nothing = torch.zeros((), device=self._kept[0][0].device, requires_grad=True)
        return nothing if loss is None else nothing + loss.detach().reshape(())

    def restore(self) -> None:
        """After hvdtrain's update, and when a resumed epoch begins: the module may add to its gradients, or read them."""
        for parameter, gradient in self._kept:
            parameter.grad = gradient
        self._carried = {parameter: ref(gradient) for parameter, gradient in self._kept if gradient is not None}
        self._kept = []

    def state(self) -> list[Any]:
        """The gradients to which later batches add theirs; empty: there are none."""
        return [None if one.grad is None else one.grad.cpu() for one in self._parameters()] if self._accumulates else []

    def load(self, gradients: Sequence[Any]) -> None:
        pairs = list(zip(self._parameters(), gradients, strict=False))
        self._kept = [(one, None if gradient is None else gradient.to(one.device)) for one, gradient in pairs]
        self._accumulates = bool(gradients)
