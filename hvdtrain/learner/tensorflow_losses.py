"""Losses as a config marked them, in a TensorFlow graph: sums, counts, and what is minimized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def terms_of(losses: Mapping[str, Loss]) -> dict[str, tf.Tensor]:
    """The losses to be minimized: their sums times their scales."""
    terms = {}
    for name, loss in minimized(losses).items():
        value = tf.convert_to_tensor(loss.value)
        terms[name] = tf.reduce_sum(tf.cast(value, tf.float32) if value.dtype.size < 4 else value) * loss.scale
    return terms


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The scalar to differentiate. Raises: ConfigError, where there is none."""
    terms = terms_of(losses)
    return _added([term / tf.cast(divisors[name], term.dtype) if name in divisors else term for name, term in terms.items()])


def totals_of(losses: Mapping[str, Loss], apart: Sequence[str]) -> list[tf.Tensor]:
    """The scalars to differentiate where some losses are to be kept apart: of the others together, if there are any, or else a
    constant; then of each of those. Raises: ConfigError, where there is none."""
    terms = terms_of(losses)
    others = [term for name, term in terms.items() if name not in apart]
    return [_added(others) if others or not apart else tf.zeros([]), *(terms[name] for name in apart)]


def _added(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    if not terms:
        raise nothing_to_minimize()
    return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])
