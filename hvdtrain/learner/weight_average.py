"""The moving average of the trained weights, independent of the framework."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

from hvdtrain.comm.base import Tensor


class EvaluationWeights(ABC):
    """Weights for evaluations and for the model's file that differ from the trained ones. It alone puts one or the other into the
    model: `use` and `trained` may be entered within themselves and each other.

    Attributes:
        updates: the number of updates that they include.
    """

    def __init__(self) -> None:
        self.updates = 0
        self._are_in_model = False

    @property
    @abstractmethod
    def has_started(self) -> bool: ...

    @abstractmethod
    def start(self, updates: int = 0) -> None:
        """Begin with the current weights."""

    @abstractmethod
    def follow(self, updates: int) -> None:
        """Take N more updates into account."""

    def gather(self, keep: bool) -> None:  # noqa: B027 most weights are on all ranks
        """Collective. Compute what takes all ranks, before rank 0 alone saves these weights.

        Args:
            keep: whether this rank will save them.
        """

    @abstractmethod
    def exact(self) -> Mapping[str, Any]:
        """By name, these weights where they are wider than the model's."""

    @abstractmethod
    def restore(self, exact: Mapping[str, Any]) -> None:
        """Continue with what `exact` has returned."""

    @abstractmethod
    def adopt(self, changed: Collection[str]) -> None:
        """Take over the values of weights that were set from outside, given their names."""

    @abstractmethod
    def evaluated_and_trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """These weights and the trained ones, by name, while the model has the trained ones."""

    @contextmanager
    def use(self) -> Iterator[None]:
        """Inside the `with` block, the model has these weights."""
        with self._having(True):
            yield

    @contextmanager
    def trained(self) -> Iterator[None]:
        """Inside the `with` block, the model has the trained weights, and the optimizer is in its training mode."""
        with self._having(False):
            yield

    @contextmanager
    def _having(self, wanted: bool) -> Iterator[None]:
        before = self._are_in_model
        self._have(wanted)
        try:
            yield
        finally:
            self._have(before)

    def _have(self, wanted: bool) -> None:
        if wanted != self._are_in_model:
            (self._enter if wanted else self._leave)()
            self._are_in_model = wanted

    @abstractmethod
    def _enter(self) -> None:
        """Put these weights into the model, and keep the trained ones."""

    @abstractmethod
    def _leave(self) -> None:
        """Put the trained weights back."""


class WeightAverageBase(EvaluationWeights):
    """A moving average of the trained weights, in float32 or wider: in bfloat16, the small share of new weights would be rounded
    away. Buffers such as BatchNorm's running mean are averages already.

    Args:
        named: the trained weights by name, as objects of the framework.
    """

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        super().__init__()
        self._weights = dict(named)
        self._decay = decay
        self._averages: dict[str, Any] = {}
        self._trained: Mapping[str, Any] = {}  # inside of `use`

    @property
    def has_started(self) -> bool:
        return bool(self._averages)

    def start(self, updates: int = 0) -> None:
        averages = {name: self._wide(weight) for name, weight in self._weights.items()}
        if self._averages:
            self.restore(averages)  # a graph may have the present objects
        else:
            self._averages = averages
        self.updates = updates

    def adopt(self, changed: Collection[str]) -> None:
        self.restore({name: self._wide(self._weights[name]) for name in self._averages.keys() & changed})

    def follow(self, updates: int) -> None:
        self._approach(1 - retained_share(self._decay, self.updates, updates))
        self.updates += updates

    def evaluated_and_trained(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self._values(self._averages), self._values(self._weights)

    def exact(self) -> dict[str, Any]:
        """The averages of weights in 16 bits, by name, which are wider than those weights in a model's file."""
        return {name: average for name, average in self._averages.items() if average.dtype != self._weights[name].dtype}

    def _enter(self) -> None:
        self._trained = self._exchange(self._averages)

    def _leave(self) -> None:
        self._exchange(self._trained)
        self._trained = {}

    @abstractmethod
    def _wide(self, weight: Any) -> Any:
        """An average that begins with a weight, in float32 or wider."""

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
