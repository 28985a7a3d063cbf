"""Noise on gradients with PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

import torch

from hvdtrain.learner.noise import noise_seeds

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
