"""An exponential moving average of the weights, with PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hvdtrain.learner.averaging import kept


class WeightAverage:
    """Follows the trainable parameters; buffers, such as BatchNorm's running mean, are averages already and have no other.

    Attributes:
        updates: how many it has followed.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self._others: list[torch.Tensor] = []  # the average; inside of `used`, the weights that are trained
        self._is_used = False
        self.updates = 0

    def start(self, updates: int = 0) -> None:
        """Begin with the present weights."""
        self._others = [parameter.detach().clone() for parameter in self._parameters]
        self.updates = updates

    @property
    def started(self) -> bool:
        return bool(self._others)

    def follow(self, updates: int) -> None:
        """Be told that the weights are what they are after so many updates more."""
        share = 1 - kept(self._decay, self.updates, updates)
        torch._foreach_lerp_(self._others, [parameter.detach() for parameter in self._parameters], share)
        self.updates += updates

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the `with` block the model has the average as its weights. Nothing is copied."""
        self._swap()
        self._is_used = True
        try:
            yield
        finally:
            self._swap()
            self._is_used = False

    def both(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The average, and the weights that are trained."""
        own = [parameter.detach() for parameter in self._parameters]
        return (own, self._others) if self._is_used else (self._others, own)

    def adopt(self, changed: set[int]) -> None:
        """Take over parameters, given by their ids, that were set from outside."""
        for parameter, other in zip(self._parameters, self._others, strict=bool(self._others)):
            if id(parameter) in changed:
                other.copy_(parameter.detach())

    def _swap(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.data, self._others[number] = self._others[number], parameter.data
