"""The moving average of the trained weights, whatever the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol

from hvdtrain.comm.base import Tensor


class EvaluationWeights(Protocol):
    """Weights for evaluations and for the model's file that are not those that are trained.

    Attributes:
        updates: the number of updates that they have followed.
    """

    updates: int

    @property
    def started(self) -> bool: ...

    def start(self, updates: int = 0) -> None:
        """Begin with the present weights."""

    def follow(self, updates: int) -> None:
        """Follow the weights after N more updates."""

    def used(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the model has these weights."""

    def left(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the optimizer is as in training, also inside of `used`."""

    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """These weights and the trained ones, by name."""

    def adopt(self, changed: Collection[str]) -> None:
        """Copy the values of weights, given by their names, that were set from outside."""


class WeightAverageBase(ABC):
    """A moving average of the trained weights. Buffers such as BatchNorm's running mean are averages already.

    Args:
        named: the trained weights by name, as the framework has them.
    """

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        self._weights = dict(named)
        self._decay = decay
        self._others: dict[str, Any] = {}  # the average; inside of `used`, the trained weights
        self._is_used = False
        self.updates = 0

    @property
    def started(self) -> bool:
        return bool(self._others)

    @abstractmethod
    def start(self, updates: int = 0) -> None: ...

    def follow(self, updates: int) -> None:
        self._approach(1 - kept_share(self._decay, self.updates, updates))
        self.updates += updates

    @contextmanager
    def used(self) -> Iterator[None]:
        self._swap()
        self._is_used = True
        try:
            yield
        finally:
            self._swap()
            self._is_used = False

    def left(self) -> AbstractContextManager[None]:
        """The optimizer's state does not depend on which weights the model has."""
        return nullcontext()

    def both(self) -> tuple[dict[str, Any], dict[str, Any]]:
        own, others = self._values(self._weights), self._values(self._others)
        return (own, others) if self._is_used else (others, own)

    @abstractmethod
    def adopt(self, changed: Collection[str]) -> None: ...

    @abstractmethod
    def _values(self, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """The values of weights, as a checkpoint takes them."""

    @abstractmethod
    def _approach(self, share: float) -> None:
        """Move the average towards the weights, by a share of the distance."""

    @abstractmethod
    def _swap(self) -> None:
        """Exchange the model's weights and the others."""


def kept_share(decay: float, done: int, updates: int) -> float:
    """The share of a moving average that is kept when it follows N more updates; the rest comes from the new weights.

    After update n (from 0) it is min(decay, (1 + n) / (10 + n)), so that the first weights are soon forgotten: the rule of
    tf.train.ExponentialMovingAverage with num_updates. For several updates at once it is the product, as if the weights had
    changed with the last of them only. The number of updates that the average looks back over thus does not depend on how often
    ranks average their parameters.

    Args:
        done: the number of updates that the average has followed before.
        updates: the number of updates since then.

    >>> kept_share(0.5, 0, 1), kept_share(0.5, 100, 1), kept_share(0.5, 100, 3)
    (0.1, 0.5, 0.125)
    """
    return prod(min(decay, (1 + number) / (10 + number)) for number in range(done, done + updates))
