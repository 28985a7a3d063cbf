"""Losses as a config marked them, in a TensorFlow graph: sums, counts, and what is minimized."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from hvdtrain.context import Loss
from hvdtrain.learner.losses import minimized, nothing_to_minimize


def numbers_of(losses: Mapping[str, Loss]) -> tf.Tensor:
    """The sums, then the counts; float64 of shape (2 * losses,)."""
    sums = [tf.reduce_sum(tf.cast(loss.value, tf.float64)) for loss in losses.values()]
    return tf.stack(sums + [count_of(loss) for loss in losses.values()])


def count_of(loss: Loss) -> tf.Tensor:
    """How many elements a loss's sum goes over."""
    if loss.count is None:
        return tf.cast(tf.size(loss.value), tf.float64)
    return tf.reduce_sum(tf.cast(loss.count, tf.float64))


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The scalar to differentiate. Raises: ConfigError, where there is none."""
    terms = []
    for name, loss in minimized(losses).items():
        value = tf.convert_to_tensor(loss.value)
        term = tf.reduce_sum(tf.cast(value, tf.float32) if value.dtype.size < 4 else value) * loss.scale
        terms.append(term / tf.cast(divisors[name], term.dtype) if name in divisors else term)
    if not terms:
        raise nothing_to_minimize()
    dtype = terms[0].dtype
    return tf.add_n([tf.cast(term, dtype) for term in terms])
