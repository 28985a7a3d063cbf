"""Gradients of several batches for one update, where they cannot simply be added up, with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from hvdtrain.context import Loss
from hvdtrain.learner.losses import nothing_to_minimize
from hvdtrain.learner.torch_losses import terms_of


class LossGradients:
    """Gradients of several losses of which some are to be means, one set for each of these until the last batch.

    A mean is the loss's sum over all batches and ranks divided by its count over all of them, which is known when the last
    batch has been counted. Where there is one loss, gradients of its sum can be divided afterwards; of several, each has another
    count. Costs a backward pass and the parameters' memory for each such loss, and one of both for all others.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._sums: dict[str | None, list[torch.Tensor | None]] = {}  # None: of the losses that are no means, together

    def add(self, losses: Mapping[str, Loss], means: Sequence[str], scale: float) -> None:
        """A batch's gradients. Raises: ConfigError, where no loss depends on a parameter.

        Args:
            means: the names of the losses that are to be means.
            scale: what all of them are multiplied by.
        """
        groups: dict[str | None, torch.Tensor] = {}
        for name, term in terms_of(losses, scale).items():
            key = name if name in means else None
            groups[key] = groups[key] + term if key in groups else term
        groups = {key: total for key, total in groups.items() if total.requires_grad}
        if not groups:
            raise nothing_to_minimize()
        for left, (key, total) in zip(reversed(range(len(groups))), groups.items(), strict=True):
            found = torch.autograd.grad(total, self._parameters, retain_graph=left > 0, allow_unused=True)
            before = self._sums.get(key, [None] * len(found))
            self._sums[key] = [_sum(one, other) for one, other in zip(before, found, strict=True)]

    def combine(self, divisors: Mapping[str, torch.Tensor]) -> None:
        """Divide each loss's gradients by its count, and add them to the parameters' own."""
        for key, gradients in self._sums.items():
            for parameter, gradient in zip(self._parameters, gradients, strict=True):
                if gradient is not None:
                    part = gradient if key is None else gradient / divisors[key].to(gradient.dtype)
                    parameter.grad = _sum(parameter.grad, part)
        self._sums = {}


def _sum(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    dense = other.to_dense() if other is not None and other.is_sparse else other
    return dense if one is None else one if dense is None else one + dense
