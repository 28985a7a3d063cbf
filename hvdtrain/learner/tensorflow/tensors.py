"""Between numpy and TensorFlow: batches as tensors, losses as sums and counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.context import Loss
from hvdtrain.data.types import Array
from hvdtrain.learner.marked import minimized, nothing_to_minimize
from hvdtrain.learner.seeds import widened


def zeros(count: int, local_rank: int) -> Any:
    """N float32 zeros, on this rank's GPU if there is one."""
    gpus = tf.config.list_logical_devices("GPU")
    with tf.device(gpus[local_rank % len(gpus)].name if gpus else "CPU:0"):
        return tf.zeros([count])


def size(tensor: Any) -> int:
    """A tensor's bytes."""
    return int(tensor.dtype.size) * int(tf.size(tensor))


def wait_for(tensor: Any) -> None:
    """Wait until a tensor has been computed: on a GPU, operations return before they are done."""
    tf.reshape(tensor, [-1])[:1].numpy()


@dataclass(frozen=True)
class TensorFlowData:
    """One data key of a batch, as `train_step` gets it.

    Attributes:
        raw_tensor: shape (batch, time, ...). Strings are a tensor of type tf.string.
        seq_lens: int32 of shape (batch,).
        mask: True where a frame is not padding; shape (batch, time).
    """

    raw_tensor: tf.Tensor
    seq_lens: tf.Tensor
    mask: tf.Tensor


def tensor_of(values: Array) -> tf.Tensor:
    """An array as a tensor, in a type that TensorFlow supports; strings as tf.string."""
    return tf.constant(values.tolist(), tf.string) if values.dtype == object else tf.constant(widened(values))


def specs_of(values: tf.Tensor) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The types of values and seq_lens, for any number of sequences of any length."""
    return tf.TensorSpec([None, None, *values.shape[2:]], values.dtype), tf.TensorSpec([None], tf.int32)


def extern_data_of(data: Mapping[str, tuple[tf.Tensor, tf.Tensor]]) -> dict[str, TensorFlowData]:
    """The tensors that `train_step` gets, by data key."""
    return {
        key: TensorFlowData(values, seq_lens, tf.sequence_mask(seq_lens, tf.shape(values)[1]))
        for key, (values, seq_lens) in data.items()
    }


def numbers_of(losses: Mapping[str, Loss]) -> tf.Tensor:
    """The losses' sums, then their counts; float64 of shape (2 * losses,)."""
    sums = [tf.reduce_sum(tf.cast(loss.value, tf.float64)) for loss in losses.values()]
    return tf.stack(sums + [count_of(loss) for loss in losses.values()])


def count_of(loss: Loss) -> tf.Tensor:
    """The number of elements of a loss, as a scalar."""
    if loss.count is None:
        return tf.cast(tf.size(loss.value), tf.float64)
    return tf.reduce_sum(tf.cast(loss.count, tf.float64))


def terms_of(losses: Mapping[str, Loss]) -> dict[str, tf.Tensor]:
    """The minimized losses: their sums times their scales."""
    terms = {}
    for name, loss in minimized(losses).items():
        value = tf.convert_to_tensor(loss.value)
        terms[name] = tf.reduce_sum(tf.cast(value, tf.float32) if value.dtype.size < 4 else value) * loss.scale
    return terms


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The scalar to differentiate. Raises: ConfigError, if no loss is minimized.

    Args:
        divisors: of the normalized losses, by name.
    """
    terms = terms_of(losses)
    return _added([term / tf.cast(divisors[name], term.dtype) if name in divisors else term for name, term in terms.items()])


def totals_of(losses: Mapping[str, Loss], apart: Sequence[str]) -> list[tf.Tensor]:
    """The scalars to differentiate if the gradients of some losses are kept apart.

    Args:
        apart: the names of these losses.

    Returns: the sum of the other losses, or a constant if there are none; then each loss that is kept apart.

    Raises:
        ConfigError: no loss is minimized.
    """
    terms = terms_of(losses)
    others = [term for name, term in terms.items() if name not in apart]
    return [_added(others) if others or not apart else tf.zeros([]), *(terms[name] for name in apart)]


def _added(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    if not terms:
        raise nothing_to_minimize()
    return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])
