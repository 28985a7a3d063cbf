"""From reduced gradients to new parameters: the loss scale, the check for finite gradients, noise, clipping, the optimizer's
step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import sqrt

import torch

from hvdtrain.learner.optimizer import Clipping
from hvdtrain.learner.precision import GradientCheck, LossScale
from hvdtrain.learner.seeds import noise_seeds
from hvdtrain.learner.torch.optimizer import take_multipliers
from hvdtrain.learner.torch.sharded import ShardedOptimizer
from hvdtrain.learner.torch.tensors import trained_of

Optimizer = torch.optim.Optimizer | ShardedOptimizer


class Update:
    """One optimizer step, and what is done to the gradients before it.

    Args:
        clipping: limits of the gradients.
        check: decides whether an update is skipped.
        scale: of the loss; None: it is not scaled.
        noise: is added to gradients; None: nothing is.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        clipping: Clipping,
        check: GradientCheck,
        scale: LossScale | None = None,
        noise: GradientNoise | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._trained = trained_of(model)
        self._multipliers = take_multipliers(optimizer.param_groups)
        self._clipping = clipping
        self._check = check
        self._scale = scale
        self._noise = noise

    def apply(self, learning_rate: float, step: int) -> None:
        """Apply the reduced gradients and drop them.

        Args:
            step: steps done in the whole training before the last step of this update.

        Raises:
            TrainingError: too many updates in a row were skipped.
        """
        if self._scale is not None:
            torch._foreach_div_(self._gradients(), self._scale.scale)
        if not self._check.is_needed or self._check.is_applied(self._are_finite(), step, self._invalid_names):
            if self._noise is not None:
                self._noise.add(self._trained, step)
            self._clip()
            for group, multiplier in zip(self._optimizer.param_groups, self._multipliers, strict=True):
                group["lr"] = learning_rate * multiplier
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _clip(self) -> None:
        if self._clipping.value is not None:
            torch.nn.utils.clip_grad_value_(self._trained, self._clipping.value)
        if self._clipping.global_norm is None:
            return
        if isinstance(self._optimizer, ShardedOptimizer):
            total = torch.linalg.vector_norm(torch.stack(self._norms(2.0)))
            torch.nn.utils.clip_grads_with_norm_(self._trained, self._clipping.global_norm, total)
        else:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clipping.global_norm)

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._trained if parameter.grad is not None]

    def _are_finite(self) -> bool:
        """Whether all gradients are finite. If they were reduced, this is the same on all ranks."""
        return bool(torch.stack(self._norms(float("inf"))).isfinite().all())

    def _invalid_names(self) -> list[str]:
        """The names of the parameters whose gradients are not finite."""
        named = self._model.named_parameters()
        names = [name for name, parameter in named if parameter.requires_grad and parameter.grad is not None]
        norms = self._norms(float("inf"))
        return [name for name, norm in zip(names, norms, strict=True) if not bool(norm.isfinite())]

    def _norms(self, order: float) -> list[torch.Tensor]:
        """Collective, if the optimizer is sharded. The norm of each gradient."""
        if isinstance(self._optimizer, ShardedOptimizer):
            return self._optimizer.norms(self._trained, order)
        return list(torch._foreach_norm(self._gradients(), order))


MAX_DEVIATIONS = 2.0
"""The normal distribution of the noise is truncated at this number of standard deviations."""


class GradientNoise:
    """Adds noise from a truncated normal distribution to every element of the gradients.

    (After Neelakantan et al., 2015; truncated and with a constant deviation as in RETURNN.) It has its own generator, so that
    dropout draws the same numbers with noise as without.

    Args:
        deviation: the standard deviation before truncation; afterwards it is 0.88 of this.
        seed: gives the training's seed and the rank; with None as the rank, all ranks add the same noise.
    """

    def __init__(self, deviation: float, seed: Callable[[], tuple[int, int | None]], device: torch.device) -> None:
        self._deviation = deviation
        self._seed = seed
        self._generator = torch.Generator(device)

    def add(self, parameters: Iterable[torch.nn.Parameter], step: int) -> None:
        """Add noise to the gradients of those parameters that have one, in their order."""
        high, low = noise_seeds(*self._seed(), step).tolist()
        self._generator.manual_seed((high << 32 | low) & (1 << 63) - 1)
        edge = torch.special.erf(torch.tensor(MAX_DEVIATIONS / sqrt(2))).item()
        for parameter in parameters:
            if parameter.grad is not None:
                # By the inverse of the distribution function: exact, and one draw per element on every device.
                uniform = torch.empty_like(parameter.grad, dtype=torch.float32).uniform_(-edge, edge, generator=self._generator)
                noise = uniform.erfinv_().mul_(self._deviation * sqrt(2))
                parameter.grad.add_(noise.to(parameter.grad.dtype))
