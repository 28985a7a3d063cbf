"""What happens between reduced gradients and new parameters, with PyTorch."""

from __future__ import annotations

import torch

from hvdtrain.learner.broken_updates import BrokenUpdates
from hvdtrain.learner.loss_scale import LossScale
from hvdtrain.learner.torch_noise import GradientNoise
from hvdtrain.learner.torch_parameter_groups import take_multipliers
from hvdtrain.learner.torch_sharded import ShardedOptimizer
from hvdtrain.learner.torch_tensors import trained_of

Optimizer = torch.optim.Optimizer | ShardedOptimizer


class Update:
    """The optimizer's step, and what comes before it: undoing the loss's scale, leaving broken gradients out, noise, clipping,
    the learning rate.

    Args:
        noise: what is added to gradients; None: nothing.
        scale: what the loss was multiplied by; None: nothing.
        broken: whether to leave an update out.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        *,
        clip_global_norm: float | None,
        clip_value: float | None,
        noise: GradientNoise | None,
        scale: LossScale | None,
        broken: BrokenUpdates,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trained = trained_of(model)
        self._multipliers = take_multipliers(optimizer.param_groups)
        self._clip_global_norm = clip_global_norm
        self._clip_value = clip_value
        self._noise = noise
        self._scale = scale
        self._broken = broken

    def apply(self, learning_rate: float, step: int) -> None:
        """Apply the reduced gradients, and drop them.

        Args:
            step: steps done before this one in the whole training.

        Raises:
            TrainingError: too many updates in a row were left out.
        """
        if self._scale is not None:
            torch._foreach_div_(self._gradients(), self._scale.scale)
        if not self._broken.may_be_left_out or self._broken.is_applied(self._is_finite(), step, self._broken_names):
            if self._noise is not None:
                self._noise.add(self._trained, step)
            self._clip()
            for group, multiplier in zip(self._optimizer.param_groups, self._multipliers, strict=True):
                group["lr"] = learning_rate * multiplier
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._trained, self._clip_value)
        if self._clip_global_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clip_global_norm)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._trained if parameter.grad is not None]

    def _is_finite(self) -> bool:
        """Whether all gradients are finite numbers. Where they were reduced, all ranks come to the same answer."""
        norms = torch._foreach_norm(self._gradients(), float("inf"))
        return bool(torch.stack(norms).isfinite().all())

    def _broken_names(self) -> list[str]:
        """The parameters whose gradients are not."""
        named = [(name, parameter.grad) for name, parameter in self._model.named_parameters()]
        return [name for name, gradient in named if gradient is not None and not bool(gradient.isfinite().all())]
