"""A batch on its way into a TensorFlow graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.numbers import widened


@dataclass(frozen=True)
class TensorFlowData:
    """One data key of a batch, as `train_step` gets it.

    Attributes:
        raw_tensor: (batch, time, ...). Strings are a tensor of type tf.string.
        seq_lens: int32 of shape (batch,).
        mask: True where a frame is not padding; shape (batch, time).
    """

    raw_tensor: tf.Tensor
    seq_lens: tf.Tensor
    mask: tf.Tensor


def tensor_of(values: Array) -> tf.Tensor:
    """An array in a type that TensorFlow computes with; strings as tf.string."""
    return tf.constant(values.tolist(), tf.string) if values.dtype == object else tf.constant(widened(values))


def specs_of(values: tf.Tensor) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """Of values and seq_lens: any number of sequences of any length."""
    return tf.TensorSpec([None, None, *values.shape[2:]], values.dtype), tf.TensorSpec([None], tf.int32)


def extern_data_of(data: Mapping[str, tuple[tf.Tensor, tf.Tensor]]) -> dict[str, TensorFlowData]:
    """What `train_step` gets, by data key."""
    return {
        key: TensorFlowData(values, seq_lens, tf.sequence_mask(seq_lens, tf.shape(values)[1]))
        for key, (values, seq_lens) in data.items()
    }
