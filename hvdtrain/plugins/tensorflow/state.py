"""A TensorFlow model's and its optimizer's variables, as checkpoints and other ranks take them; and the moving average of the
weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.contents import OPTIONS, CheckpointContents
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.optimizer import changed_options, option_texts
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.preload import PreloadRequest, preload_values, shapes_of
from hvdtrain.learner.state_base import StateBase
from hvdtrain.learner.weight_average import WeightAverageBase
from hvdtrain.plugins.tensorflow.model_file import file_format, read_model
from hvdtrain.plugins.tensorflow.tensors import ModelVariables, assign, exchange_value, tensorflow_variable, value_of


class TensorFlowState(StateBase):
    """The state of a Keras model or tf.Module and its optimizer. Every rank has all of it."""

    def __init__(
        self,
        variables: ModelVariables,
        optimizer: keras.optimizers.Optimizer,
        average: WeightAverage | None,
        check: GradientCheck | None,
        model_format: str = "npz",
    ) -> None:
        super().__init__(file_format(model_format), average, check)
        self._variables = variables
        self._optimizer = optimizer
        options = {name: value for name, value in optimizer.get_config().items() if name not in ("name", "learning_rate")}
        self._options = option_texts(options)  # loading a state does not change the options of a Keras optimizer
        self._copies: dict[tuple[str, ...], Array] = {}  # of a checkpoint in the background, by their place in it

    def tensors(self, role: Role) -> dict[str, tf.Tensor]:
        return {name: exchange_value(tensorflow_variable(variable)) for name, variable in self._variables.named_of_kind(role)}

    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        theirs = read_model(request.file)["model"]
        prefix = f"{request.entry}/"
        inside = {name.removeprefix(prefix): array for name, array in theirs.items() if name.startswith(prefix)}
        ours = self._variables.by_name
        values = preload_values(request, shapes_of(ours), inside or theirs)
        assign([(name, ours[name]) for name in values], {name: numpy.asarray(value) for name, value in values.items()})
        if self._average is not None:
            self._average.adopt(values.keys())
        return list(ours), list(values)

    def copied(self, contents: CheckpointContents) -> CheckpointContents:
        contents = super().copied(contents)
        model = _copy(contents.model, self._copies, "model")
        return replace(contents, model=model, optimizer=_copy(contents.optimizer, self._copies, "optimizer"))

    def model_tensors(self) -> dict[str, Array]:
        return _arrays(self._variables.by_name.items())

    def set_model(self, tensors: Mapping[str, Array]) -> None:
        assign(self._variables.by_name.items(), tensors)

    def set_tensors(self, role: Role, values: Mapping[str, Any]) -> None:
        assign([(name, self._variables.by_name[name]) for name in values], values)

    def _stored(self, tensor: tf.Tensor) -> Array:
        return numpy.asarray(tensor)

    def _optimizer_name(self) -> str:
        return type(self._optimizer).__name__

    def _optimizer_entries(self) -> dict[str, Any]:
        return {"optimizer": _arrays(self._optimizer_variables()), OPTIONS: self._options}

    def _numbered_parameters(self, entries: Mapping[str, Any]) -> dict[str, str]:
        return {name.split(".")[1]: parameter for name, parameter in self._optimizer_parameters().items()}

    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        assign(self._optimizer_variables(), entries["optimizer"], self._optimizer_parameters())
        return list(changed_options(entries.get(OPTIONS, {}), self._options).values())

    def _optimizer_variables(self) -> list[tuple[str, Any]]:
        """The optimizer's variables, under names such as `Adam.0002.momentum`. The number is the position: the number in Keras'
        names depends on what else the process has created."""
        return [(name, variable) for name, variable, _ in self._described_variables()]

    def _optimizer_parameters(self) -> dict[str, str]:
        """By the names of the optimizer's variables, those of their parameters."""
        return {name: parameter for name, _, parameter in self._described_variables() if parameter}

    def _described_variables(self) -> Iterator[tuple[str, Any, str]]:
        """The name of each of the optimizer's variables, the variable, and the name of its parameter; '' if it has none."""
        kind = type(self._optimizer).__name__
        named = self._variables.named_of_kind("parameters")
        parameters = {getattr(variable, "path", "").replace("/", "_") + "_": name for name, variable in named}
        for number, variable in enumerate(self._optimizer.variables):
            path = max((path for path in parameters if variable.name.startswith(path)), key=len, default="")
            yield f"{kind}.{number:04d}.{variable.name.removeprefix(path)}", variable, parameters.get(path, "")


class WeightAverage(WeightAverageBase):
    """The moving average of variables."""

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        super().__init__({name: tensorflow_variable(variable) for name, variable in named.items()}, decay)
        self._graph = tf.function(self._add_share, autograph=False)

    def _wide(self, weight: tf.Variable) -> tf.Variable:
        return tf.Variable(exchange_value(weight), trainable=False)

    def restore(self, exact: Mapping[str, Any]) -> None:
        for name, values in exact.items():
            self._averages[name].assign(values)

    def exact(self) -> dict[str, Any]:
        return _arrays(super().exact().items())

    def _values(self, weights: Mapping[str, Any]) -> dict[str, Array]:
        return {name: numpy.asarray(tf.cast(weight, self._weights[name].dtype)) for name, weight in weights.items()}

    def _approach(self, share: float) -> None:
        self._graph(tf.constant(share, tf.float32))

    def _add_share(self, share: tf.Tensor) -> None:
        for name, variable in self._weights.items():
            average = self._averages[name]
            average.assign_add((exchange_value(variable) - average) * tf.cast(share, average.dtype))

    def _exchange(self, weights: Mapping[str, Any]) -> dict[str, tf.Tensor]:
        before = {}
        for name, variable in self._weights.items():
            before[name] = tf.identity(variable)
            variable.assign(tf.cast(weights[name], variable.dtype))
        return before


def _arrays(named: Iterable[tuple[str, Any]]) -> dict[str, Array]:
    """Not to be changed."""
    return {name: value_of(variable) for name, variable in named}


def _copy(state: Any, copies: dict[tuple[str, ...], Array], *place: str) -> Any:
    """Nested dicts with copies of their arrays. They take the memory of earlier ones, as new memory takes four times as long."""
    if isinstance(state, Mapping):
        return {name: _copy(value, copies, *place, name) for name, value in state.items()}
    if not isinstance(state, numpy.ndarray):
        return state
    before = copies.get(place)
    if before is None or (before.shape, before.dtype) != (state.shape, state.dtype):
        before = copies[place] = numpy.empty_like(state)
    numpy.copyto(before, state)
    return before
