"""The TensorFlow learner by itself: one graph for batches of any size, optimizers, random numbers, sparse gradients."""

from collections.abc import Callable
from typing import Any

import keras
import numpy
import pytest
import tensorflow as tf

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.tensorflow import TensorFlowLearner, build_tensorflow_learner
from hvdtrain.reduce import GradReduce
from hvdtrain.timer import Timer

FRAMES = numpy.array([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [0.0, 0.0]]], numpy.float32)
BATCH = Batch({"data": Padded(FRAMES, numpy.array([2, 1], numpy.int32))}, numpy.array([0, 1]))


def linear(**_: Any) -> keras.Model:
    """From 2 features to 1, weights 1 and 1, no bias."""
    model = keras.Sequential([keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
    model.build((None, None, 2))
    return model


def squares(*, model: Any, extern_data: dict[str, Any], **_: Any) -> None:
    """The sum of squared outputs of every real frame."""
    data = extern_data["data"]
    get_run_ctx().mark_as_loss(tf.square(tf.boolean_mask(model(data.raw_tensor), data.mask))[:, 0], "square")


def learner(
    train_step: Callable[..., None] = squares, get_model: Callable[..., Any] = linear, rank: int = 0, **keys: Any
) -> TensorFlowLearner:
    options = LearnerKeys(get_model=get_model, train_step=train_step, **{"optimizer": {"class": "sgd"}, **keys})
    reducer = GradReduce(SingleCommunicator(), Timer(), average=False)
    return build_tensorflow_learner(options, reducer, rank=rank, local_rank=0, threads=1, seed=1, epoch=1, step=0)


def kernel(made: TensorFlowLearner) -> Any:
    return made.model.trainable_variables[0].numpy()


def test_a_step_of_sgd_on_the_sum_over_real_frames() -> None:
    made = learner()
    made.backward(BATCH)
    made.update(0.01)
    # outputs 3, 7, 11; the gradient of the sum of their squares is 2 * (3 * (1, 2) + 7 * (3, 4) + 11 * (5, 6))
    assert kernel(made)[:, 0].tolist() == pytest.approx([1 - 0.01 * 158, 1 - 0.01 * 200], rel=1e-6)
    assert made.take_scores().means() == {"square": pytest.approx((9 + 49 + 121) / 3)}
    assert made.take_scores().means() == {}
    assert made.take_step_seconds() > 0
