"""From reduced gradients to new parameters: noise, clipping, the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch

from hvdtrain.learner.loss_scale import BrokenUpdates, LossScale
from hvdtrain.learner.seeds import noise_seeds
from hvdtrain.learner.torch.optimizer import take_multipliers
from hvdtrain.learner.torch.sharded import ShardedOptimizer
from hvdtrain.learner.torch.tensors import trained_of

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


WITHIN = 2.0
"""Noise beyond so many standard deviations is not drawn."""


class GradientNoise:
    """Adds to every element of a gradient a number from a normal distribution cut off at two standard deviations.

    (After Neelakantan et al., 2015; cut off and with a constant deviation as in RETURNN.) It has a generator of its own, so
    dropout draws the same numbers with noise as without.

    Args:
        deviation: the standard deviation before cutting off; what is left has 0.88 of it.
        seed: of the training, and the rank; None: the same noise on all ranks.
    """

    def __init__(self, deviation: float, seed: tuple[int, int | None], device: torch.device) -> None:
        self._deviation = deviation
        self._seed = seed
        self._generator = torch.Generator(device)

    def add(self, parameters: Iterable[torch.nn.Parameter], step: int) -> None:
        """To the gradients of the parameters that have one, in their order."""
        high, low = noise_seeds(*self._seed, step).tolist()
        self._generator.manual_seed((high << 32 | low) & (1 << 63) - 1)
        edge = torch.special.erf(torch.tensor(WITHIN / sqrt(2))).item()
        for parameter in parameters:
            if parameter.grad is not None:
                # By the inverse of the distribution function: exact, and one draw an element on every device.
                uniform = torch.empty_like(parameter.grad, dtype=torch.float32).uniform_(-edge, edge, generator=self._generator)
                noise = uniform.erfinv_().mul_(self._deviation * sqrt(2))
                parameter.grad.add_(noise.to(parameter.grad.dtype))
