"""The learner for TensorFlow: Keras 3 models and tf.Module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.arrays import read_arrays, write_arrays
from hvdtrain.learner.base import Kind, LearnerKeys, as_function
from hvdtrain.learner.clock import CpuClock
from hvdtrain.learner.losses import WaitingScores
from hvdtrain.learner.numbers import mixed_seed, mixed_seeds
from hvdtrain.learner.tensorflow_graph import StepGraphs
from hvdtrain.learner.tensorflow_optimizer import make_optimizer
from hvdtrain.learner.tensorflow_setup import device_name, prepare_tensorflow
from hvdtrain.learner.tensorflow_variables import Parts, parts_of, tensorflow_variable
from hvdtrain.reduce import Reducer
from hvdtrain.scores import Scores


class TensorFlowLearner:
    """A Keras model or tf.Module, its optimizer and its losses.

    Args:
        parts: what the model consists of.
        seed: random numbers of a step (dropout) come from this, the rank and the number of the step, so that ranks differ
            and a continued training goes on with the same numbers.
    """

    file_suffix = "npz"

    def __init__(
        self,
        model: Any,
        optimizer: keras.optimizers.Optimizer,
        graphs: StepGraphs,
        parts: Parts,
        *,
        updates_without_batch: bool,
        seed: tuple[int, int],
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.graphs = graphs
        self.device_name = device_name()
        self.parts = parts
        self._updates_without_batch = updates_without_batch
        self._seed = seed
        self._clock = CpuClock()
        self._epoch = 0
        self._step = 0
        self._reduced: Any = None
        self._scores = WaitingScores(lambda tensors: tf.concat(tensors, 0).numpy().tolist())
        counted = [*parts.of_kind("parameters"), *parts.of_kind("frozen")]
        self.num_parameters = sum(int(numpy.prod(variable.shape)) for variable in counted)

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step

    def backward(self, batch: Batch | None) -> None:
        self._reduced = None
        if batch is None and not self._updates_without_batch:
            return
        with self._clock.span():
            if batch is None:
                self._reduced = self.graphs.without_batch()
            else:
                seeds = mixed_seeds(len(self.parts.generators), *self._seed, self._step)
                names, numbers, self._reduced = self.graphs.train(batch, self._epoch, self._step, seeds)
                self._scores.add(names, numbers)

    def update(self, learning_rate: float) -> None:
        if self._reduced is not None:
            with self._clock.span():
                self.graphs.apply(self._reduced, learning_rate)
        self._step += 1

    def evaluate(self, batch: Batch) -> None:
        self._scores.add(*self.graphs.evaluate(batch, self._epoch, self._step))

    def take_scores(self) -> Scores:
        return self._scores.take()

    def take_step_seconds(self) -> float:
        with self._clock.span():
            self._scores.fetch()  # waits for the device
        return self._clock.take()

    def map_tensors(self, kind: Kind, change: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        variables = [tensorflow_variable(variable) for variable in self.parts.of_kind(kind)]
        tensors = [_exchangeable(variable) for variable in variables]
        for variable, tensor, new in zip(variables, tensors, change(list(tensors)), strict=True):
            if new is not tensor:
                variable.assign(tf.cast(new, variable.dtype))

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any]) -> None:
        write_arrays(optimizer_file, {name: _array(variable) for name, variable in self._optimizer_variables()}, progress)
        write_arrays(model_file, {name: _array(variable) for name, variable in self.parts.variables.items()}, progress)

    def load(self, model_file: Path, optimizer_file: Path) -> dict[str, Any]:
        arrays, progress = read_arrays(model_file)
        _assign(self.parts.variables.items(), arrays, f"{model_file}: expected the parameters of this config's model, got others")
        arrays, _ = read_arrays(optimizer_file)
        wrong = f"{optimizer_file}: expected the state of this config's optimizer, got another"
        _assign(self._optimizer_variables(), arrays, wrong)
        return progress

    def _optimizer_variables(self) -> list[tuple[str, Any]]:
        """Names such as `Adam.0002.momentum`: by position, as Keras numbers layers and variables through in a process, so
        that the names of its own may differ the next time."""
        kind = type(self.optimizer).__name__
        paths = [getattr(variable, "path", "").replace("/", "_") + "_" for variable in self.parts.of_kind("parameters")]
        named = []
        for number, variable in enumerate(self.optimizer.variables):
            path = max((path for path in paths if variable.name.startswith(path)), key=len, default="")
            named.append((f"{kind}.{number:04d}.{variable.name.removeprefix(path)}", variable))
        return named


def build_tensorflow_learner(
    keys: LearnerKeys, reducer: Reducer, *, rank: int, local_rank: int, threads: int, seed: int, epoch: int, step: int
) -> TensorFlowLearner:
    """Build the model and the optimizer of a config. All ranks seed alike; weights still are to be broadcast from rank 0.

    Raises:
        ConfigError: get_model returns no Keras model or tf.Module, or one without variables, or the optimizer cannot be made.
    """
    prepare_tensorflow(keys.device, local_rank, threads)
    keras.utils.set_random_seed(mixed_seed(seed, 0, 0))  # of TensorFlow, Python and numpy
    device = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=device)
    if not isinstance(model, (keras.layers.Layer, tf.Module)):
        raise ConfigError([f"get_model: expected it to return a Keras model or a tf.Module, got {type(model).__name__}"])
    parts = parts_of(model)
    if not parts.of_kind("parameters"):
        raise ConfigError(
            ["get_model: expected a model that has trainable variables, got none (Keras layers get theirs when they are first "
             "called: call the model once in get_model)"]
        )  # fmt: skip
    policy = getattr(getattr(model, "dtype_policy", None), "name", "")
    optimizer = make_optimizer(keys.optimizer, parts, loss_scaling=policy == "mixed_float16")
    tf.random.set_seed(mixed_seed(seed, rank, 0))  # for operations of tf.random, which keep the seed they are traced with
    graphs = StepGraphs(
        model,
        as_function(keys.train_step, "train_step"),
        optimizer,
        reducer,
        parts,
        clip_global_norm=keys.gradient_clip_global_norm,
        clip_value=keys.gradient_clip,
    )
    return TensorFlowLearner(
        model, optimizer, graphs, parts, updates_without_batch=reducer.updates_without_batch, seed=(seed, rank)
    )


def _exchangeable(variable: tf.Variable) -> tf.Tensor:
    """A variable's value; half precision as single precision, which every transport and every sum can do with."""
    value = variable.value()
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def _array(variable: Any) -> Array:
    array: Array = tensorflow_variable(variable).numpy()
    return array


def _assign(variables: Iterable[tuple[str, Any]], arrays: Mapping[str, Array], wrong: str) -> None:
    """Give variables their stored values. Raises: CheckpointError, before the first is changed."""
    wanted = {name: tensorflow_variable(variable) for name, variable in variables}
    missing, unknown = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    shapes = [
        f"{name} of shape {arrays[name].shape} instead of {tuple(variable.shape)}"
        for name, variable in wanted.items()
        if name in arrays and arrays[name].shape != tuple(variable.shape)
    ]
    if missing or unknown or shapes:
        raise CheckpointError(f"{wrong}: missing {missing}, unknown {unknown}, {shapes}")
    for name, variable in wanted.items():
        stored = arrays[name]
        if stored.dtype.kind == "V":  # bfloat16, which numpy's files know as bytes only
            stored = stored.view(variable.dtype.as_numpy_dtype)
        variable.assign(tf.constant(stored, variable.dtype))
