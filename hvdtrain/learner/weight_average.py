"""The moving average of the trained weights, independent of the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any, Protocol

from hvdtrain.comm.base import Tensor


class EvaluationWeights(Protocol):
    """Weights for evaluations and for the model's file that differ from the trained ones.

    Attributes:
        updates: the number of updates that they include.
    """

    updates: int

    @property
    def has_started(self) -> bool: ...

    def start(self, updates: int = 0) -> None:
        """Begin with the current weights."""

    def follow(self, updates: int) -> None:
        """Take N more updates into account."""

    def use(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the model has these weights."""

    def training_mode(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the optimizer is in its training mode, even within `use`."""

    def evaluated_and_trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """These weights and the trained ones, by name."""

    def exact(self) -> Mapping[str, Any]:
        """By name, these weights where they are wider than the model's."""

    def restore(self, exact: Mapping[str, Any]) -> None:
        """Continue with what `exact` has returned."""

    def adopt(self, changed: Collection[str]) -> None:
        """Take over the values of weights that were set from outside, given their names."""


class WeightAverageBase(ABC):
    """A moving average of the trained weights, in float32 or wider: in bfloat16, the small share of new weights would be rounded
    away. Buffers such as BatchNorm's running mean are averages already.

    Args:
        named: the trained weights by name, as objects of the framework.
    """

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        self._weights = dict(named)
        self._decay = decay
        self._averages: dict[str, Any] = {}
        self._trained: Mapping[str, Any] | None = None  # inside of `use`
        self.updates = 0

    @property
    def has_started(self) -> bool:
        return bool(self._averages)

    @abstractmethod
    def start(self, updates: int = 0) -> None: ...

    def follow(self, updates: int) -> None:
        self._approach(1 - retained_share(self._decay, self.updates, updates))
        self.updates += updates

    @contextmanager
    def use(self) -> Iterator[None]:
        self._trained = self._exchange(self._averages)
        try:
            yield
        finally:
            self._exchange(self._trained)
            self._trained = None

    def training_mode(self) -> AbstractContextManager[None]:
        """The optimizer has no modes: its state does not depend on the weights in the model."""
        return nullcontext()

    def evaluated_and_trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._values(self._averages), self._values(self._weights if self._trained is None else self._trained)

    def exact(self) -> dict[str, Any]:
        """The averages of weights in 16 bits, by name, which are wider than those weights in a model's file."""
        return {name: one for name, one in self._averages.items() if one.dtype != self._weights[name].dtype}

    @abstractmethod
    def restore(self, exact: Mapping[str, Any]) -> None:
        """Set some averages to what `exact` has returned."""

    @abstractmethod
    def adopt(self, changed: Collection[str]) -> None: ...

    @abstractmethod
    def _values(self, weights: Mapping[str, Any]) -> dict[str, Tensor]:
        """The values of weights in the model's types, for a checkpoint."""

    @abstractmethod
    def _approach(self, share: float) -> None:
        """Move the average towards the weights by a share of the distance."""

    @abstractmethod
    def _exchange(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Give the model other weights, and return its own."""


def retained_share(decay: float, done: int, updates: int) -> float:
    """The share of a moving average that remains after N more updates; the rest comes from the new weights.

    After update n (from 0) it is min(decay, (1 + n) / (10 + n)), so that the initial weights fade quickly: the rule of
    tf.train.ExponentialMovingAverage with num_updates. For several updates at once it is the product, as if the weights had
    changed only in the last of them. So the time span of the average does not depend on how often ranks average their parameters.

    Args:
        done: the number of updates that the average includes already.
        updates: the number of updates since then.

    >>> retained_share(0.5, 0, 1), retained_share(0.5, 100, 1), retained_share(0.5, 100, 3)
    (0.1, 0.5, 0.125)
    """
    return prod(min(decay, (1 + number) / (10 + number)) for number in range(done, done + updates))
