"""Gradients in a TensorFlow graph: added up over batches, and reduced over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.learner.marked import TINY, Normalized
from hvdtrain.learner.reduce import Reducer, buckets

DENSE_BYTES = 1 << 20
"""An embedding of up to so many bytes sends its whole gradient, a larger one the rows that a batch has touched."""


@dataclass(frozen=True)
class Exchange:
    """What ranks exchange in a step: known when a train_step has been traced, and the same on all ranks.

    Attributes:
        losses: those that are to be means.
        rows: the numbers of the parameters whose gradients travel as rows.
    """

    losses: Normalized
    rows: tuple[int, ...]


@dataclass(frozen=True)
class Rows:
    """A gradient of which most rows are zero; no row comes twice.

    Attributes:
        values: shape (rows, ...).
        indices: which rows of the parameter, int64 of shape (rows,).
    """

    values: Any
    indices: Any


Gradient = Any
"""A tensor, or Rows."""


class GraphGradients:
    """The gradients of the trainable variables, in the model's order. Everything here happens while a graph is traced.

    Gradients of half precision are exchanged in single precision: Horovod has no bfloat16, and float16 overflows in a sum.

    TensorFlow takes Horovod's operations for functions of their inputs: it computes one whose inputs are constants (zeros)
    when it optimizes the graph and never again, and merges two that have the same inputs. Other ranks would wait for ever. So
    in every exchange a variable's element that is always 0 is added to one tensor, and what a rank without a batch sends
    comes into its graph from outside.
    """

    def __init__(self, variables: list[tf.Variable], reducer: Reducer) -> None:
        self._variables = variables
        self._reducer = reducer
        self._always_zero = tf.Variable(tf.zeros([2 * len(variables) + 1]), trainable=False)

    def exchange_counts(self, counts: tf.Tensor) -> tf.Tensor:
        """Collective, when the graph runs. What losses are divided by, over all ranks."""
        [totals] = self._reducer.finish_gradients(self._reducer.start_gradients([self._kept(counts, 0)], name="loss_counts"))
        return totals

    def rows(self, found: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the gradients that are to travel as rows."""
        large = (number for number, found_one in enumerate(found) if isinstance(found_one, tf.IndexedSlices))
        return tuple(number for number in large if self._bytes(number) > DENSE_BYTES)

    def local(self, found: Sequence[Any], exchange: Exchange) -> list[Gradient]:
        """What a GradientTape found, None where nothing depends on a variable, ready to be exchanged."""
        return [self._local(number, gradient, number in exchange.rows) for number, gradient in enumerate(found)]

    def zeros(self, exchange: Exchange) -> list[Gradient]:
        """What a rank without a batch contributes."""
        return [self._local(number, None, number in exchange.rows) for number in range(len(self._variables))]

    def reduce(self, gradients: Sequence[Gradient], exchange: Exchange) -> list[Gradient]:
        """Collective, when the graph runs. Dense gradients leave in buckets, each as soon as backward has computed it."""
        reduced: list[Gradient] = list(gradients)
        dense = [number for number in range(len(gradients)) if number not in exchange.rows]
        groups = buckets([(self._bytes(number), reduced[number].dtype) for number in dense])
        for name, group in enumerate(groups):
            numbers = [dense[position] for position in group]
            reduced[numbers[0]] = self._kept(reduced[numbers[0]], 1 + numbers[0])
            handle = self._reducer.start_gradients([reduced[number] for number in numbers], name=f"gradients.{name}")
            for number, tensor in zip(numbers, self._reducer.finish_gradients(handle), strict=True):
                reduced[number] = tensor
        for number in exchange.rows:
            values = self._kept(reduced[number].values, 1 + number)
            indices = self._kept(reduced[number].indices, 1 + len(gradients) + number)
            values, indices = self._reducer.reduce_rows(values, indices, name=f"gradients.rows.{number}")
            reduced[number] = _without_repeats(values, indices)
        return reduced

    def specs(self, exchange: Exchange) -> list[Any]:
        """The types of reduced gradients, for a function that takes them whatever their number of rows."""
        specs: list[Any] = []
        for number, variable in enumerate(self._variables):
            dtype = _wide(variable.dtype)
            if number in exchange.rows:
                values = tf.TensorSpec([None, *variable.shape[1:]], dtype)
                specs.append((values, tf.TensorSpec([None], tf.int64)))
            else:
                specs.append(tf.TensorSpec(variable.shape, dtype))
        return specs

    def _local(self, number: int, found: Any, as_rows: bool) -> Gradient:
        variable = self._variables[number]
        dtype = _wide(variable.dtype)
        if found is None and as_rows:
            return Rows(tf.zeros([0, *variable.shape[1:]], dtype), tf.zeros([0], tf.int64))
        if found is None:
            return tf.zeros(variable.shape, dtype)
        if as_rows:
            return _without_repeats(tf.cast(found.values, dtype), tf.cast(found.indices, tf.int64))
        return tf.ensure_shape(tf.cast(tf.convert_to_tensor(found), dtype), variable.shape)

    def _kept(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """The same values, as what TensorFlow can neither compute beforehand nor merge with another."""
        return tensor + tf.cast(self._always_zero[number], tensor.dtype)

    def _bytes(self, number: int) -> int:
        variable = self._variables[number]
        return int(variable.shape.num_elements() * _wide(variable.dtype).size)


def clipped(gradients: Sequence[Gradient], by_value: Any | None, global_norm: Any | None) -> list[Gradient]:
    """Every element cut off at plus or minus `by_value`; then all scaled down to `global_norm`, where it is exceeded."""
    changed = list(gradients)
    if by_value is not None:
        changed = [_map(gradient, lambda tensor: tf.clip_by_value(tensor, -by_value, by_value)) for gradient in changed]
    if global_norm is not None:
        tensors = [gradient.values if isinstance(gradient, Rows) else gradient for gradient in changed]
        norm = tf.linalg.global_norm(tensors)
        factor = tf.minimum(global_norm / (norm + 1e-6), 1.0)
        changed = [_map(gradient, lambda tensor: tensor * tf.cast(factor, tensor.dtype)) for gradient in changed]
    return changed


def noisy(gradients: Sequence[Gradient], deviation: Any, seeds: tf.Tensor) -> list[Gradient]:
    """Every element with a number added from a normal distribution cut off at two standard deviations; of an embedding whose
    gradient travels as rows, every element of the rows that a batch has touched.

    Args:
        seeds: int32 of shape (2,). Stateless: no other random numbers are disturbed.
    """

    def with_noise(tensor: tf.Tensor, number: int) -> tf.Tensor:
        of_one = tf.stack([seeds[0] + number, seeds[1]])
        return tensor + tf.random.stateless_truncated_normal(tf.shape(tensor), of_one, dtype=tensor.dtype) * deviation

    return [_map(gradient, lambda tensor, n=number: with_noise(tensor, n)) for number, gradient in enumerate(gradients)]


def divided(gradients: Sequence[Gradient], divisor: Any) -> list[Gradient]:
    """Every gradient over a number."""
    return [_map(gradient, lambda tensor: tensor / tf.cast(divisor, tensor.dtype)) for gradient in gradients]


def added(one: Sequence[Gradient], other: Sequence[Gradient]) -> list[Gradient]:
    """The sums of two sets of gradients."""
    return [_sum(first, second) for first, second in zip(one, other, strict=True)]


def are_finite(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """For every gradient whether all of its elements are finite numbers."""
    tensors = [gradient.values if isinstance(gradient, Rows) else gradient for gradient in gradients]
    return [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]


def for_optimizer(gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> list[Any]:
    """As Keras optimizers take them."""
    return [
        tf.IndexedSlices(gradient.values, gradient.indices, variable.shape) if isinstance(gradient, Rows) else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def packed(gradients: Sequence[Gradient]) -> list[Any]:
    """As a graph can return them: rows as a pair."""
    return [(gradient.values, gradient.indices) if isinstance(gradient, Rows) else gradient for gradient in gradients]


def unpacked(gradients: Sequence[Any]) -> list[Gradient]:
    """What `packed` packed."""
    return [Rows(*gradient) if isinstance(gradient, tuple) else gradient for gradient in gradients]


def _map(gradient: Gradient, change: Any) -> Gradient:
    return Rows(change(gradient.values), gradient.indices) if isinstance(gradient, Rows) else change(gradient)


def _sum(one: Gradient, other: Gradient) -> Gradient:
    if not isinstance(one, Rows):
        return one + other
    return _without_repeats(tf.concat([one.values, other.values], 0), tf.concat([one.indices, other.indices], 0))


def _without_repeats(values: Any, indices: Any) -> Rows:
    """Rows with the same index added up: what a norm or a square of a gradient needs."""
    unique, positions = tf.unique(indices)
    return Rows(tf.math.unsorted_segment_sum(values, positions, tf.shape(unique)[0]), unique)


def _wide(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


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
