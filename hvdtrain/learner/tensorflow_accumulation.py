"""Gradients of several batches for one update, with TensorFlow: tensors that come out of one graph and go into the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from hvdtrain.learner.losses import TINY
from hvdtrain.learner.tensorflow_gradients import Exchange, Gradient, GraphGradients, added, divided, packed, unpacked

Pending = Any
"""Gradients of a rank's batches, as a graph can return them: a list of sets, and the counts of the losses that are to be means,
float64. Where there are several such losses, the first set is that of all other losses, then each has its own; otherwise there is
one."""


class PendingGradients:
    """What is done with gradients that wait for those of more batches."""

    def __init__(self, gradients: GraphGradients) -> None:
        self._gradients = gradients
        self._merge: Callable[..., Pending] | None = None

    def merged(self, pending: Pending, collected: Pending, exchange: Exchange) -> Pending:
        """The sums of both."""
        if self._merge is None:
            specs = self.specs(len(pending[0]), exchange)
            self._merge = tf.function(_add_up, autograph=False).get_concrete_function(specs, specs)
        return self._merge(pending, collected)

    def zeros(self, exchange: Exchange) -> Pending:
        """Those of a rank that had no batch."""
        return [packed(self._gradients.zeros(exchange))], tf.zeros([max(1, len(exchange.losses.names))], tf.float64)

    def specs(self, sets: int, exchange: Exchange) -> Any:
        """The types of what waits, for a function that takes it."""
        return [self._gradients.specs(exchange) for _ in range(sets)], tf.TensorSpec([None], tf.float64)


def combined(sets: Sequence[list[Any]], counts: tf.Tensor) -> list[Gradient]:
    """One set: those of the losses that are means are divided by their counts over all ranks. Part of a graph."""
    gradients = unpacked(sets[0])
    for number, of_loss in enumerate(sets[1:]):
        gradients = added(gradients, divided(unpacked(of_loss), tf.maximum(counts[number], TINY)))
    return gradients


def of_any_set(found: Sequence[Sequence[Any]]) -> list[Any]:
    """What a tape found for every variable, whatever the set: something dense before something sparse; or None."""

    def of_one(gradients: Sequence[Any]) -> Any:
        there = [gradient for gradient in gradients if gradient is not None]
        dense = [gradient for gradient in there if not isinstance(gradient, tf.IndexedSlices)]
        return next(iter([*dense, *there]), None)

    return [of_one(gradients) for gradients in zip(*found, strict=True)]


def _add_up(one: Pending, other: Pending) -> Pending:
    sets = [added(unpacked(first), unpacked(second)) for first, second in zip(one[0], other[0], strict=True)]
    return [packed(gradients) for gradients in sets], one[1] + other[1]
