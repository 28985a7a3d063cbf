"""From a config's keys to a learner for TensorFlow."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import LearnerKeys, as_function
from hvdtrain.learner.precision import FLOAT32, Precision
from hvdtrain.learner.reduce import Reducer
from hvdtrain.learner.seeds import mixed_seed
from hvdtrain.learner.tensorflow.device import layers_in, prepare_tensorflow, scale_of
from hvdtrain.learner.tensorflow.graph import StepGraphs
from hvdtrain.learner.tensorflow.learner import TensorFlowLearner
from hvdtrain.learner.tensorflow.optimizer import make_optimizer
from hvdtrain.learner.tensorflow.state import WeightAverage
from hvdtrain.learner.tensorflow.variables import parts_of


def build_tensorflow_learner(
    keys: LearnerKeys,
    reducer: Reducer,
    *,
    rank: int,
    local_rank: int,
    threads: int,
    seed: int,
    epoch: int,
    step: int,
    precision: Precision = FLOAT32,
) -> TensorFlowLearner:
    """Build the model and the optimizer of a config. All ranks seed alike; weights still are to be broadcast from rank 0.

    Raises:
        ConfigError: get_model returns no Keras model or tf.Module, or one without variables, or the optimizer cannot be made.
    """
    prepare_tensorflow(keys.device, local_rank, threads)
    keras.utils.set_random_seed(mixed_seed(seed, 0, 0))  # of TensorFlow, Python and numpy
    device = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    with layers_in(precision.dtype):
        model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=device)
    if not isinstance(model, (keras.layers.Layer, tf.Module)):
        raise ConfigError([f"get_model: expected it to return a Keras model or a tf.Module, got {type(model).__name__}"])
    parts = parts_of(model)
    if not parts.of_kind("parameters"):
        raise ConfigError(
            ["get_model: expected a model that has trainable variables, got none (Keras layers get theirs when they are first "
             "called: call the model once in get_model)"]
        )  # fmt: skip
    optimizer = make_optimizer(keys.optimizer, parts)
    scale = scale_of(precision, model, parts, optimizer)
    skips = keys.num_allowed_consec_invalid_gradient_steps
    if skips is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        name = "num_allowed_consec_invalid_gradient_steps"
        raise ConfigError([f"{name}: expected None with a LossScaleOptimizer, which leaves updates out by itself, got {skips}"])
    tf.random.set_seed(mixed_seed(seed, rank, 0))  # for operations of tf.random, which keep the seed they are traced with
    graphs = StepGraphs(
        model,
        as_function(keys.train_step, "train_step"),
        optimizer,
        reducer,
        parts,
        clip_global_norm=keys.gradient_clip_global_norm,
        clip_value=keys.gradient_clip,
        noise=keys.gradient_noise,
        forward_step=as_function(keys.forward_step, "forward_step"),
        may_leave_out=skips is not None or scale is not None,
        scale=scale,
    )
    return TensorFlowLearner(
        model,
        optimizer,
        graphs,
        parts,
        updates_without_batch=reducer.updates_without_batch,
        seed=(seed, rank),
        skips=skips,
        scale=scale,
        average=None if keys.ema_decay is None else WeightAverage(dict(parts.named("parameters")), keys.ema_decay),
    )
