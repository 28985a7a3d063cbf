"""The learner: a model has `parameters`, arrays by name, and its train_step puts their `gradients` beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.references import as_function
from hvdtrain.context import RunContext, Running
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Exported, Layer, Learner
from hvdtrain.learner.contents import FileFormat
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.meter import BatchOutputs, Meter, Transfer, scales_of
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.optimizer import UpdateGradients, change_gradients
from hvdtrain.learner.preload import PreloadRequest, preload_values, shapes_of
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime.timer import CpuClock


@dataclass
class ArrayGradients:
    """The gradients of an update, for `change_gradients`."""

    values: list[Array]

    def add_noise(self, deviation: float) -> None:
        self.values = [value + numpy.random.normal(0, deviation, value.shape) for value in self.values]

    def divide(self, divisor: Any) -> None:
        self.values = [value / divisor for value in self.values]

    def clip(self, limit: float) -> None:
        self.values = [value.clip(-limit, limit) for value in self.values]

    def clip_norm(self, limit: float) -> None:
        norm = sum(float((value**2).sum()) for value in self.values) ** 0.5
        self.divide(max(1.0, norm / limit))


def write(path: Path, entries: Mapping[str, Any]) -> None:
    """Write a file as JSON."""
    path.write_text(json.dumps(entries, default=lambda array: array.tolist()))


FORMAT = FileFormat(
    write_model=lambda path, tensors, progress: write(path, {"model": tensors, **progress}),
    write=write,
    read_model=lambda path: json.loads(path.read_text()),
    read=lambda path: json.loads(path.read_text()),
)


class ArrayState(StateBase):
    """The model's arrays. There is no state of an optimizer."""

    def __init__(self, model: Any) -> None:
        super().__init__(FORMAT, average=None, check=None)
        self._arrays: dict[str, Array] = model.parameters

    def tensors(self, role: Role) -> dict[str, Array]:
        return dict(self._arrays) if role == "parameters" else {}

    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        theirs = {name: numpy.array(values) for name, values in FORMAT.read_model(request.file)["model"].items()}
        values = preload_values(request, shapes_of(self._arrays), theirs)
        self.set_tensors("parameters", values)
        return list(self._arrays), list(values)

    def model_tensors(self) -> dict[str, Array]:
        return dict(self.named_parameters())

    def set_model(self, tensors: Mapping[str, Any]) -> None:
        self.set_tensors("parameters", {name: tensors[name] for name in self._arrays})

    def set_tensors(self, role: Role, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._arrays[name][...] = value

    def _by_name(self, role: Role, stored: Any) -> Mapping[str, Array]:
        return {name: numpy.array(values) for name, values in stored.items()}

    def _optimizer_name(self) -> str:
        return "GradientDescent"

    def _optimizer_entries(self) -> dict[str, Any]:
        return {"optimizer": {}}

    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        return []


class ArrayLearner(Learner):
    """Plain gradient descent."""

    device_name = "CPU"
    optimizer = None

    def __init__(self, keys: LearnerKeys, exchange: GradientExchange, position: tuple[int, int]) -> None:
        epoch, step = position
        self.model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device="cpu")
        self.num_parameters = sum(array.size for array in self.model.parameters.values())
        state = ArrayState(self.model)
        transfer = Transfer(lambda tensors: numpy.concatenate(tensors).tolist())
        super().__init__(state, Meter(transfer, state.named_parameters, CpuClock()))
        self._train_step = as_function(keys.train_step, "train_step")
        self._change: Callable[[UpdateGradients], None] = partial(change_gradients, keys)
        self._exchange = exchange
        self._sums = self._zeros()

    def _zeros(self) -> list[Array]:
        return [numpy.zeros_like(array) for array in self.model.parameters.values()]

    def backward(self, batch: Batch | None, completes_update: bool = True) -> None:
        if batch is not None:
            self._run(batch, train=True)
            gradients = [self.model.gradients[name] for name in self.model.parameters]
            self._sums = [total + gradient for total, gradient in zip(self._sums, gradients, strict=True)]
        self._step += 1

    def _update(self, learning_rate: float) -> None:
        gradients = ArrayGradients(self._exchange.finish(self._exchange.start(self._sums, name="gradients")))
        if self.observer is not None:
            self.observer(iter(zip(self.model.parameters, gradients.values, strict=True)))
        self._change(gradients)
        for array, gradient in zip(self.model.parameters.values(), gradients.values, strict=True):
            array -= learning_rate * gradient
        self._sums = self._zeros()

    def evaluate(self, batch: Batch) -> None:
        self._run(batch, train=False)

    def try_batch(self, batch: Batch) -> bool:
        return True

    def forward(self, batch: Batch) -> BatchOutputs:
        raise ConfigError.of("unsupported", "backend: expected a framework with outputs for the task forward")

    def _run(self, batch: Batch, train: bool) -> None:
        with Running(RunContext(self._epoch, self._step, train, seq_tags=batch.seq_tags)) as context:
            self._train_step(model=self.model, extern_data=batch.data)
        values = [loss.value for loss in context.losses.values()]
        numbers = numpy.array([*(value.sum() for value in values), *(value.size for value in values)], numpy.float64)
        self.meter.add(scales_of(context.losses, train), numbers, self._step, batch.indices, train)

    def modules(self) -> Iterator[tuple[str, Any]]:
        yield "", self.model

    def layers(self) -> Iterator[Layer]:
        shapes = {name: array.shape for name, array in self.model.parameters.items()}
        yield Layer("", type(self.model).__name__, shapes, frozenset(shapes))

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        return []

    def numbers(self, values: Sequence[float]) -> Array:
        return numpy.array(values, numpy.float64)


def build_learner(keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> ArrayLearner:
    """Build the config's model."""
    return ArrayLearner(keys, gradient_exchange, options.position)
