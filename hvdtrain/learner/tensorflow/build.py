"""From a config's keys to a learner for TensorFlow."""

from __future__ import annotations

import keras
import numpy
import tensorflow as tf

from hvdtrain.config.reference import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.meter import PendingScores, Transfer
from hvdtrain.learner.optimizer import Clipping
from hvdtrain.learner.precision import GradientCheck, LossScale, Precision
from hvdtrain.learner.reducer import Reducer
from hvdtrain.learner.seeds import mixed_seed
from hvdtrain.learner.tensorflow.device import TensorFlowMeter, device_name, layers_in, peak_memory, prepare, scale_of
from hvdtrain.learner.tensorflow.gradients import GraphGradients
from hvdtrain.learner.tensorflow.graph import ConfigFunctions, StepGraphs
from hvdtrain.learner.tensorflow.learner import TensorFlowLearner
from hvdtrain.learner.tensorflow.optimizer import UpdateGraph, make_optimizer
from hvdtrain.learner.tensorflow.state import TensorFlowState, WeightAverage
from hvdtrain.learner.tensorflow.variables import ModelVariables, array_of, tensorflow_variable, variables_of
from hvdtrain.runtime.timer import CpuClock

MAX_SKIPPED = "num_allowed_consec_invalid_gradient_steps"


def build_learner(keys: LearnerKeys, reducer: Reducer, options: BuildOptions) -> TensorFlowLearner:
    """Build a config's model, optimizer and learner. All ranks use the same seed; rank 0's weights still have to be broadcast.

    Raises:
        ConfigError: get_model returns no Keras model or tf.Module, or one without variables, or the optimizer cannot be made.
    """
    prepare(keys.device, options.local_rank, options.threads)
    if keys.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(mixed_seed(options.seed, 0, 0))  # of TensorFlow, Python and numpy
    variables = _model(keys, options.precision)
    optimizer = make_optimizer(keys.optimizer, variables)
    scale = scale_of(options.precision, variables, optimizer)
    max_skipped = keys.num_allowed_consec_invalid_gradient_steps
    if max_skipped is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError(
            [f"{MAX_SKIPPED}: expected None with a LossScaleOptimizer, which skips updates by itself, got {max_skipped}"]
        )
    tf.random.set_seed(
        mixed_seed(options.seed, options.rank, 0)
    )  # for operations of tf.random, which keep their seed when traced
    functions = ConfigFunctions(as_function(keys.train_step, "train_step"), as_function(keys.forward_step, "forward_step"))
    trained = [tensorflow_variable(variable) for variable in variables.of_kind("parameters")]
    gradients = GraphGradients(trained, reducer, options.bucket_bytes(device_name() != "CPU"))
    check = GradientCheck(max_skipped, scale, same_on_all_ranks=lambda: reducer.updates_without_batch)
    clipping = Clipping(keys.gradient_clip, keys.gradient_clip_global_norm)
    average = None if keys.ema_decay is None else WeightAverage(dict(variables.named("parameters")), keys.ema_decay)
    return TensorFlowLearner(
        variables,
        StepGraphs(variables, functions, optimizer, gradients, reducer, scale),
        UpdateGraph(optimizer, variables, gradients, clipping, keys.gradient_noise, check, scale),
        TensorFlowState(variables, optimizer, average, scale),
        _meter(variables, scale, finite_only=max_skipped is not None),
        (options.seed, options.rank),
    )


def _model(keys: LearnerKeys, precision: Precision) -> ModelVariables:
    """The variables of the config's model. Raises: ConfigError."""
    device = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    with layers_in(precision.dtype):
        model = as_function(keys.get_model, "get_model")(epoch=1, step=0, device=device)
    if not isinstance(model, (keras.layers.Layer, tf.Module)):
        raise ConfigError([f"get_model: expected it to return a Keras model or a tf.Module, got {type(model).__name__}"])
    variables = variables_of(model)
    if not variables.of_kind("parameters"):
        raise ConfigError(
            ["get_model: expected a model that has trainable variables, got none (Keras layers get theirs when they are first "
             "called: call the model once in get_model)"]
        )  # fmt: skip
    return variables


def _meter(variables: ModelVariables, scale: LossScale | None, finite_only: bool) -> TensorFlowMeter:
    def not_finite() -> tuple[str, ...]:
        named = [*variables.named("parameters"), *variables.named("frozen")]
        return tuple(name for name, variable in named if not numpy.isfinite(array_of(variable).astype(numpy.float64)).all())

    scores = PendingScores(
        Transfer(lambda tensors: tf.concat(tensors, 0).numpy().tolist()),
        not_finite,
        on_cpu=device_name() == "CPU",
        finite_only=finite_only,
    )
    return TensorFlowMeter(scores, CpuClock(), scale, peak_memory)
