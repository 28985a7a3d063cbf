"""Gradients between a network's losses and RETURNN's optimizers: tensors that can be fed.

A session can replace the value of each of these tensors. So one graph serves every kind of step: nothing is fed where one rank
updates after every batch, and the whole step is one call as in RETURNN's engine; what was computed or accumulated elsewhere is
fed where a rank has no batch, where an update takes several batches, and where an update may be skipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy
import tensorflow as tf
from returnn.tf.updater import Updater

from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError
from hvdtrain.learner.meter import TINY, NormalizedLosses
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.returnn.network.objective import Objective
from hvdtrain.plugins.tensorflow.gradients import Exchange, GraphGradients, map_values, tensors_in
from hvdtrain.plugins.tensorflow.graph import time_exchange

v1 = tf.compat.v1

Compute = Callable[[Any], list[Any]]
"""The gradients of a loss with respect to the trained variables; None for those that it does not depend on."""


@dataclass
class GradientPoints:
    """The tensors of an update's gradients, each list in the order of the trained variables. None: no gradient.

    Attributes:
        local: of this rank's batch, to be fed: what the ranks exchange; empty: they do not.
        reduced: what the optimizers get, to be fed.
        counts: of the normalized losses of this rank's batch, to be fed; None: they are not exchanged.
        totals: the same over all ranks.
        divides_afterwards: whether the reduced gradients are divided by the total, as there is no other loss.
        waited: the seconds of waiting for the totals.
        traffic: as in `Reduced` of `plugins/tensorflow/graph.py`, without these seconds; None: nothing is exchanged.
        scale: multiplies the gradients that are exchanged, to be fed; None: they are not scaled.
        helper: a variable that belongs to no optimizer, although it is made while these are.
    """

    variables: list[Any] = field(default_factory=list)
    local: list[Any] = field(default_factory=list)
    reduced: list[Any] = field(default_factory=list)
    counts: Any = None
    totals: Any = None
    divides_afterwards: bool = False
    waited: Any = None
    traffic: Any = None
    scale: Any = None
    helper: Any = None


class FeedableUpdater(Updater):  # type: ignore[misc]  # RETURNN has no types
    """RETURNN's updater: its changes of gradients and its optimizers, applied to gradients that can be fed.

    Args:
        make_points: makes the tensors, given how gradients are computed and the trained variables.
    """

    def __init__(self, make_points: Callable[[Compute, list[Any]], GradientPoints], **options: Any) -> None:
        super().__init__(**options)
        self.points: GradientPoints | None = None
        self._make_points = make_points

    def _compute_gradients(self, loss: Any, var_list: list[Any]) -> list[tuple[Any, Any]]:
        if self.points is not None:
            raise ConfigError.of(
                "unsupported",
                "network: expected gradients of the losses only, got a layer with a meta loss, or maximize_grad_norm: a loss of "
                "gradients cannot be exchanged between ranks or accumulated over batches",
            )
        compute = super()._compute_gradients
        self.points = self._make_points(lambda of: [gradient for gradient, _ in compute(of, var_list)], var_list)
        # RETURNN lets constraints wait for gradients: for identities, as waiting for a fed tensor computes what is replaced.
        return [
            (
                tf.identity(gradient) if tf.is_tensor(gradient) and not isinstance(gradient, tf.IndexedSlices) else gradient,
                variable,
            )
            for gradient, variable in zip(self.points.reduced, self.points.variables, strict=True)
        ]


def points_alone(objective: Objective, compute: Compute, variables: list[Any]) -> GradientPoints:
    """The tensors where ranks exchange no gradients: the objective is RETURNN's."""
    return GradientPoints(list(variables), reduced=[feedable(gradient) for gradient in compute(objective.whole)])


def points_of_ranks(
    objective: Objective, compute: Compute, variables: list[Any], exchange: GradientExchange, bucket_bytes: int, scaled: bool
) -> GradientPoints:
    """The tensors where ranks exchange gradients.

    Losses are summed over all ranks, and constraints, which do not depend on the batch, are added once. A normalized loss is
    divided by its count over all ranks.

    Args:
        scaled: whether gradients are multiplied by a scale while they are exchanged.
    """
    messages = GraphGradients(variables, exchange, bucket_bytes, dense_bytes=-1)  # sparse gradients stay sparse
    points = GradientPoints(list(variables), helper=messages.always_zero)
    points.divides_afterwards = len(objective.terms) == 1 and objective.terms[0].is_normalized
    loss: Any = objective.of_batch
    if objective.normalized_terms:
        points.counts = feedable(tf.stack([term.count for term in objective.normalized_terms]))
        points.totals, points.waited = time_exchange(messages.exchange_counts, points.counts, value_of_each)
        loss = objective.terms[0].value if points.divides_afterwards else objective.divided_by(points.totals)
    computed_here = compute(loss)
    rows = tuple(number for number, gradient in enumerate(computed_here) if isinstance(gradient, tf.IndexedSlices))
    plan = Exchange(NormalizedLosses((), False), rows)
    local = messages.local(computed_here, plan)
    if scaled:
        points.scale = v1.placeholder_with_default(tf.ones([]), [])
        local = [map_values(gradient, lambda tensor: tensor * tf.cast(points.scale, tensor.dtype)) for gradient in local]
    points.local = [feedable(gradient) for gradient in local]
    reduced, seconds = time_exchange(lambda local: messages.reduce(local, plan), points.local, value_of_each)
    points.traffic = tf.concat([[seconds], messages.num_bytes(points.local)], 0)
    if points.scale is not None:
        reduced = [map_values(gradient, lambda tensor: tensor / tf.cast(points.scale, tensor.dtype)) for gradient in reduced]
    if points.divides_afterwards:
        total = tf.maximum(points.totals[0], TINY)
        reduced = [map_values(gradient, lambda tensor: tensor / tf.cast(total, tensor.dtype)) for gradient in reduced]
    constraints = [None] * len(reduced) if objective.constraints is None else compute(objective.constraints)
    points.reduced = [
        feedable(_with_constraint(None if computed is None else gradient, constraint, variable))
        for gradient, computed, constraint, variable in zip(reduced, computed_here, constraints, variables, strict=True)
    ]
    return points


def feedable(gradient: Any) -> Any:
    """A tensor, or rows, whose values can be fed; None stays None."""
    if gradient is None:
        return None
    if isinstance(gradient, tf.IndexedSlices):
        values = v1.placeholder_with_default(gradient.values, [None, *gradient.values.shape[1:]])
        return tf.IndexedSlices(values, v1.placeholder_with_default(gradient.indices, [None]), gradient.dense_shape)
    return v1.placeholder_with_default(gradient, gradient.shape)


def value_of_each(tensors: Any) -> list[Any]:
    """A tensor that is computed once others are, from a value of each: if an operation waits for a fed tensor without using it,
    TensorFlow computes what the fed value replaces, which needs a batch."""
    firsts = [tf.reduce_sum(tf.reshape(tensor, [-1])[:1]) for tensor in tensors_in(tensors)]
    return [tf.add_n([tf.cast(first, tf.float64) for first in firsts])]


def _with_constraint(gradient: Any, constraint: Any, variable: Any) -> Any:
    """A reduced gradient and that of the constraints, added up in the form that RETURNN's optimizers take."""
    if isinstance(gradient, tf.IndexedSlices):
        shape = tf.constant(variable.shape.as_list(), tf.int64)
        gradient = tf.IndexedSlices(gradient.values, gradient.indices, shape)
    if gradient is None or constraint is None:
        return constraint if gradient is None else gradient
    return tf.convert_to_tensor(gradient) + tf.convert_to_tensor(constraint)


# Gradients on the host

HostGradient = Any
"""An array, a pair of arrays (values and indices of rows), or None."""


def fetchable(gradients: Sequence[Any]) -> list[Any]:
    """Gradients in the form that a session returns: rows become pairs, None an empty list."""
    return [
        [] if gradient is None else (gradient.values, gradient.indices) if isinstance(gradient, tf.IndexedSlices) else gradient
        for gradient in gradients
    ]


def feed_of(points: Sequence[Any], values: Sequence[HostGradient]) -> dict[Any, Array]:
    """What a session is fed to replace gradients by values from the host, which may be rows where whole gradients are needed, and
    the other way around."""
    feed: dict[Any, Array] = {}
    for point, value in zip(points, values, strict=True):
        if isinstance(point, tf.IndexedSlices):
            rows, indices = value if isinstance(value, tuple) else (value, numpy.arange(len(value)))
            feed[point.values] = rows
            feed[point.indices] = indices.astype(point.indices.dtype.as_numpy_dtype)
        elif isinstance(value, tuple):
            feed[point] = numpy.zeros(point.shape.as_list(), value[0].dtype)
            numpy.add.at(feed[point], value[1], value[0])
        elif point is not None:
            feed[point] = value
    return feed


def zeros(points: Sequence[Any]) -> list[HostGradient]:
    """The contribution of a rank that had no batch."""

    def empty(point: Any) -> HostGradient:
        if isinstance(point, tf.IndexedSlices):
            shape = [0, *point.values.shape[1:].as_list()]
            return numpy.zeros(shape, point.values.dtype.as_numpy_dtype), numpy.zeros([0], point.indices.dtype.as_numpy_dtype)
        return [] if point is None else numpy.zeros(point.shape.as_list(), point.dtype.as_numpy_dtype)

    return list(map(empty, points))


def add(first_set: Sequence[HostGradient], second_set: Sequence[HostGradient]) -> list[HostGradient]:
    """The sums of two sets of gradients; the rows of both are kept."""

    def total(first: HostGradient, second: HostGradient) -> HostGradient:
        if isinstance(first, tuple):
            return tuple(map(numpy.concatenate, zip(first, second, strict=True)))
        return first if isinstance(first, list) else first + second

    return list(map(total, first_set, second_set))


def divide(gradients: Sequence[HostGradient], divisor: float) -> list[HostGradient]:
    """Every gradient divided by a number."""
    return [_change(gradient, lambda values: values / values.dtype.type(divisor)) for gradient in gradients]


def multiply(gradient: HostGradient, factor: float) -> HostGradient:
    """A gradient times a number."""
    return _change(gradient, lambda values: values * values.dtype.type(factor))


def _change(gradient: HostGradient, change: Callable[[Array], Array]) -> HostGradient:
    if isinstance(gradient, tuple):
        return change(gradient[0]), gradient[1]
    return gradient if isinstance(gradient, list) else change(gradient)


def is_finite(gradient: HostGradient) -> bool:
    """Whether all elements of a gradient are finite."""
    values = gradient[0] if isinstance(gradient, tuple) else gradient
    return bool(numpy.isfinite(values).all())
