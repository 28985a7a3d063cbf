"""Gradients in a TensorFlow graph: reduction over the ranks, accumulation over batches, changes before the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.buckets import buckets
from hvdtrain.learner.meter import TINY, NormalizedLosses
from hvdtrain.learner.reducer import GradientExchange


@lru_cache(maxsize=8)
def scalar(value: float, dtype: tf.DType) -> tf.Tensor:
    """A number for a graph, made once as long as it stays the same. Not called while a graph is traced."""
    return tf.constant(value, dtype)


@dataclass(frozen=True)
class Exchange:
    """The tensors to exchange for an update. Known once train_step has been traced, and the same on all ranks.

    Attributes:
        losses: the normalized losses.
        rows: the numbers of the parameters whose gradients are sent as rows.
    """

    losses: NormalizedLosses
    rows: tuple[int, ...]


Gradient = Any
"""A tensor, or tf.IndexedSlices: the nonzero rows of a sparse gradient, each at most once, with int64 numbers."""


Accumulated = Any
"""Gradients of a rank's batches in the form that a graph returns: a list of sets of gradients, and the counts of the normalized
losses, float64. With several losses, some of them normalized, the first set belongs to all others together, followed by a set for
each normalized loss; otherwise there is one set."""


class GraphGradients:
    """The gradients of the trained variables, in the model's order. All methods are called while a graph is traced.

    Half-precision gradients are exchanged in single precision: Horovod does not support bfloat16, and float16 overflows in a sum.

    TensorFlow assumes that Horovod's operations are pure functions: it computes one with constant inputs (zeros) only once, when
    it optimizes the graph, and merges two that have the same inputs. Other ranks would hang. So every exchange adds an element of
    a variable that is always 0 to one tensor, and a rank without a batch sends tensors that are inputs of its graph.

    Args:
        bucket_bytes: the size of a message.
        dense_bytes: the size of the largest embedding that sends its whole gradient; a larger one sends only the rows that a
            batch uses.

    Attributes:
        always_zero: the variable with these elements.
    """

    def __init__(
        self, variables: list[tf.Variable], exchange: GradientExchange, bucket_bytes: int, dense_bytes: int = 1 << 20
    ) -> None:
        self._variables = variables
        self._bucket_bytes = bucket_bytes
        self._dense_bytes = dense_bytes
        self._exchange = exchange
        self.always_zero = tf.Variable(tf.zeros([2 * len(variables) + 1]), trainable=False)

    def exchange_counts(self, counts: tf.Tensor) -> tf.Tensor:
        """Collective, when the graph runs. Sum the counts of the normalized losses over the ranks."""
        [totals] = self._exchange.finish(self._exchange.start([self._prevent_folding(counts, 0)], name="loss_counts"))
        return totals

    def rows(self, gradients: Sequence[Any]) -> tuple[int, ...]:
        """The numbers of the gradients to send as rows."""
        sparse = (number for number, gradient in enumerate(gradients) if isinstance(gradient, tf.IndexedSlices))
        return tuple(number for number in sparse if self._bytes(number) > self._dense_bytes)

    def local(self, gradients: Sequence[Any], exchange: Exchange) -> list[Gradient]:
        """The gradients of a GradientTape (None if nothing depends on a variable), in the form for the exchange."""
        return [self._local(number, gradient, number in exchange.rows) for number, gradient in enumerate(gradients)]

    def zeros(self, exchange: Exchange) -> list[Gradient]:
        """The contribution of a rank without a batch."""
        return [self._local(number, None, number in exchange.rows) for number in range(len(self._variables))]

    def reduce(self, gradients: Sequence[Gradient], exchange: Exchange) -> list[Gradient]:
        """Collective, when the graph runs. Dense gradients are sent in buckets, each as soon as backward has computed it."""
        reduced: list[Gradient] = list(gradients)
        dense = [number for number in range(len(gradients)) if number not in exchange.rows]
        groups = buckets([(self._bytes(number), reduced[number].dtype) for number in dense], self._bucket_bytes)
        for name, group in enumerate(groups):
            numbers = [dense[position] for position in group]
            reduced[numbers[0]] = self._prevent_folding(reduced[numbers[0]], 1 + numbers[0])
            handle = self._exchange.start([reduced[number] for number in numbers], name=f"gradients.{name}")
            for number, tensor in zip(numbers, self._exchange.finish(handle), strict=True):
                reduced[number] = tensor
        for number in exchange.rows:
            values = self._prevent_folding(reduced[number].values, 1 + number)
            indices = self._prevent_folding(reduced[number].indices, 1 + len(gradients) + number)
            values, indices = self._exchange.rows(values, indices, name=f"gradients.rows.{number}")
            reduced[number] = _merge_repeats(values, indices)
        return reduced

    def num_bytes(self, gradients: Sequence[Gradient]) -> tf.Tensor:
        """The bytes of a rank's gradients, including row indices: first those in float32, then all others; float64."""
        tensors = tensors_in(list(gradients))

        def total(is_float32: bool) -> tf.Tensor:
            chosen = [tensor for tensor in tensors if (tensor.dtype == tf.float32) == is_float32]
            sizes = [tf.cast(tf.size(tensor), tf.float64) * tensor.dtype.size for tensor in chosen]
            return tf.add_n([tf.zeros([], tf.float64), *sizes])

        return tf.stack([total(True), total(False)])

    def specs(self, exchange: Exchange) -> list[Any]:
        """The signature of reduced gradients, for a function that accepts any number of rows."""
        dtypes = [_exchange_dtype(variable.dtype) for variable in self._variables]
        return [
            tf.IndexedSlicesSpec(variable.shape, dtype, tf.int64)
            if number in exchange.rows
            else tf.TensorSpec(variable.shape, dtype)
            for number, (variable, dtype) in enumerate(zip(self._variables, dtypes, strict=True))
        ]

    def _local(self, number: int, gradient: Any, as_rows: bool) -> Gradient:
        variable = self._variables[number]
        dtype = _exchange_dtype(variable.dtype)
        if gradient is None and as_rows:
            return tf.IndexedSlices(tf.zeros([0, *variable.shape[1:]], dtype), tf.zeros([0], tf.int64))
        if gradient is None:
            return tf.zeros(variable.shape, dtype)
        if as_rows:
            return _merge_repeats(tf.cast(gradient.values, dtype), tf.cast(gradient.indices, tf.int64))
        return tf.ensure_shape(tf.cast(tf.convert_to_tensor(gradient), dtype), variable.shape)

    def _prevent_folding(self, tensor: tf.Tensor, number: int) -> tf.Tensor:
        """The same values, in a tensor that TensorFlow can neither fold into a constant nor merge with another."""
        return tensor + tf.cast(self.always_zero[number], tensor.dtype)

    def _bytes(self, number: int) -> int:
        variable = self._variables[number]
        return int(variable.shape.num_elements() * _exchange_dtype(variable.dtype).size)


class AccumulatedGradients:
    """Accumulates the gradients of an update's batches."""

    def __init__(self, gradients: GraphGradients) -> None:
        self._gradients = gradients
        self._add: Callable[..., Accumulated] | None = None

    def add(self, before: Accumulated, collected: Accumulated, exchange: Exchange) -> Accumulated:
        """Add the gradients of one batch to those accumulated before."""
        if self._add is None:
            specs = self.specs(len(before[0]), exchange)
            self._add = tf.function(_add_up, autograph=False).get_concrete_function(specs, specs)
        return self._add(before, collected)

    def zeros(self, exchange: Exchange) -> Accumulated:
        """The gradients of a rank that had no batch."""
        return [self._gradients.zeros(exchange)], tf.zeros([max(1, len(exchange.losses.names))], tf.float64)

    def specs(self, sets: int, exchange: Exchange) -> Any:
        """The signature of accumulated gradients, for a function that takes them.

        Args:
            sets: the number of sets.
        """
        return [self._gradients.specs(exchange) for _ in range(sets)], tf.TensorSpec([None], tf.float64)


def combine(sets: Sequence[list[Any]], counts: tf.Tensor) -> list[Gradient]:
    """Add up all sets of gradients, those of normalized losses divided by their counts over all ranks. Part of a graph."""
    gradients = sets[0]
    for number, of_loss in enumerate(sets[1:]):
        gradients = add_sets(gradients, divide(of_loss, tf.maximum(counts[number], TINY)))
    return gradients


def any_gradients(gradients: Sequence[Sequence[Any]]) -> list[Any]:
    """For each variable, a gradient from any of the sets, preferably a dense one; None if no set has one."""

    def choose(of_variable: Sequence[Any]) -> Any:
        present = [gradient for gradient in of_variable if gradient is not None]
        dense = [gradient for gradient in present if not isinstance(gradient, tf.IndexedSlices)]
        return next(iter([*dense, *present]), None)

    return list(map(choose, zip(*gradients, strict=True)))


class TensorFlowGradients:
    """The gradients of an update, for `change_gradients`: part of a graph.

    Args:
        values: the gradients.
        scale: the factor by which the config's optimizer multiplied the loss and will divide the gradients.
        seeds: for the noise, int32 of shape (2,). The noise is stateless: other random numbers do not change.

    Attributes:
        norm: the global norm before `clip_norm`; None: it was not called.
    """

    def __init__(self, values: Sequence[Gradient], scale: tf.Tensor, seeds: tf.Tensor) -> None:
        self.values = list(values)
        self.norm: tf.Tensor | None = None
        self._scale = scale
        self._seeds = seeds

    def add_noise(self, deviation: float) -> None:
        """Add noise. If an embedding's gradient is sent as rows, only these rows get noise."""
        scaled = deviation * self._scale

        def with_noise(tensor: tf.Tensor, number: int) -> tf.Tensor:
            seeds = tf.stack([self._seeds[0] + number, self._seeds[1]])
            return tensor + tf.random.stateless_truncated_normal(tf.shape(tensor), seeds, dtype=tensor.dtype) * scaled

        self.values = [map_values(gradient, partial(with_noise, number=number)) for number, gradient in enumerate(self.values)]

    def divide(self, divisor: Any) -> None:
        self.values = divide(self.values, divisor)

    def clip(self, limit: float) -> None:
        scaled = limit * self._scale
        self._change(lambda tensor: tf.clip_by_value(tensor, -scaled, scaled))

    def clip_norm(self, limit: float) -> None:
        self.norm = tf.linalg.global_norm(self.values)
        factor = tf.minimum(limit * self._scale / (self.norm + 1e-6), 1.0)
        self._change(lambda tensor: tensor * tf.cast(factor, tensor.dtype))

    def _change(self, change: Callable[[tf.Tensor], tf.Tensor]) -> None:
        self.values = [map_values(gradient, change) for gradient in self.values]


def divide(gradients: Sequence[Gradient], divisor: Any) -> list[Gradient]:
    """Every gradient divided by a number."""
    return [map_values(gradient, lambda tensor: tensor / tf.cast(divisor, tensor.dtype)) for gradient in gradients]


def add_sets(first_set: Sequence[Gradient], second_set: Sequence[Gradient]) -> list[Gradient]:
    """The sums of two sets of gradients."""
    return [_sum(first, second) for first, second in zip(first_set, second_set, strict=True)]


def finite_flags(gradients: Sequence[Gradient]) -> list[tf.Tensor]:
    """For each gradient, whether all elements are finite."""
    tensors = [gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient for gradient in gradients]
    return [tf.reduce_all(tf.math.is_finite(tensor)) for tensor in tensors]


def to_keras(gradients: Sequence[Gradient], variables: Sequence[tf.Variable]) -> list[Any]:
    """Gradients in the form that Keras optimizers accept: rows with the shape of the whole."""
    return [
        tf.IndexedSlices(gradient.values, gradient.indices, variable.shape)
        if isinstance(gradient, tf.IndexedSlices)
        else gradient
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def tensors_in(gradients: Any) -> list[tf.Tensor]:
    """The tensors of gradients in any structure: of rows, the values and the numbers."""
    tensors: list[tf.Tensor] = tf.nest.flatten(gradients, expand_composites=True)
    return tensors


def map_values(gradient: Gradient, change: Callable[[Any], Any]) -> Gradient:
    """A gradient with changed values, those of rows in their places."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(change(gradient.values), gradient.indices, gradient.dense_shape)
    return change(gradient)


def as_array(gradient: Any, shape: Sequence[int]) -> Array:
    """A gradient on the host, of which a session returns rows as a pair, as a whole; zeros for none (an empty list)."""
    whole = numpy.zeros(shape, numpy.float32)
    if isinstance(gradient, tf.IndexedSlices):
        gradient = gradient.values, gradient.indices
    if isinstance(gradient, tuple):
        values, indices = map(numpy.asarray, gradient)
        numpy.add.at(whole, indices, values)
    elif not isinstance(gradient, list):
        whole += numpy.asarray(gradient)
    return whole


def _sum(first: Gradient, second: Gradient) -> Gradient:
    if not isinstance(first, tf.IndexedSlices):
        return first + second
    return _merge_repeats(tf.concat([first.values, second.values], 0), tf.concat([first.indices, second.indices], 0))


def _merge_repeats(values: Any, indices: Any) -> tf.IndexedSlices:
    """Add up rows with the same index: a gradient's norm and squares are otherwise wrong."""
    unique, positions = tf.unique(indices)
    return tf.IndexedSlices(tf.math.unsorted_segment_sum(values, positions, tf.shape(unique)[0]), unique)


def _exchange_dtype(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _add_up(before: Accumulated, added: Accumulated) -> Accumulated:
    return [add_sets(first, second) for first, second in zip(before[0], added[0], strict=True)], before[1] + added[1]
