"""The learner: a model has `parameters`, arrays by name, and its train_step puts their `gradients` beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.source import as_function
from hvdtrain.context import RunContext, running
from hvdtrain.data.types import Array, Batch
from hvdtrain.learner.base import (
    NO_MARKS,
    Exported,
    Kind,
    Layer,
    LearnerKeys,
    MakeMissing,
    Marks,
    PreloadNames,
    Shapes,
    StatePart,
)
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.meter import LearnerMeter, PendingScores, Transfer, scales_of
from hvdtrain.learner.optimizer import UpdateGradients, change_gradients
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.runtime.timer import CpuClock

PROGRESS = "progress"


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


class ArrayState:
    """The model's arrays, in files of numpy's."""

    def __init__(self, model: Any) -> None:
        self._arrays: dict[str, Array] = model.parameters
        self.shared: dict[str, list[Array]] = {}
        self.own: dict[str, list[Array]] = {}

    def map_tensors(self, kind: Kind, change: Callable[[list[Array]], list[Array]]) -> None:
        arrays = list(self._arrays.values()) if kind == "parameters" else []
        for array, new in zip(arrays, change(arrays), strict=True):
            array[...] = new

    def average_weights(self, updates: int) -> None:
        pass

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext()

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        for name, array in self._arrays.items():
            yield name, array.copy()

    def gather_state(self) -> None:
        pass

    def snapshot(self) -> dict[str, Array]:
        return dict(self.named_parameters())

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], snapshot: Any = None) -> None:
        _write(model_file, self._arrays if snapshot is None else snapshot, progress)
        _write(optimizer_file, {}, progress)

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        arrays, progress = _read(model_file)
        for name, array in self._arrays.items():
            array[...] = arrays[name]
        return progress

    def preload(
        self, file: Path, entry: str | None, choose: Callable[[Shapes, Shapes], PreloadNames], make: MakeMissing | None
    ) -> tuple[list[str], list[str]]:
        theirs, _ = _read(file)
        shapes, their_shapes = ({name: array.shape for name, array in arrays.items()} for arrays in (self._arrays, theirs))
        sources = choose(shapes, their_shapes).sources
        for name, source in sources.items():
            self._arrays[name][...] = theirs[source]
        return list(self._arrays), list(sources)

    def save_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        _write(file, self._arrays if "parameters" in parts else {}, marks)

    def load_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        for name, array in _read(file)[0].items():
            self._arrays[name][...] = array


class ArrayLearner:
    """Plain gradient descent."""

    device_name = "CPU"
    staging = None
    optimizer = None

    def __init__(self, keys: LearnerKeys, exchange: GradientExchange) -> None:
        self.model = as_function(keys.get_model, "get_model")(epoch=1, step=0, device="cpu")
        self.num_parameters = sum(array.size for array in self.model.parameters.values())
        self.state = ArrayState(self.model)
        scores = PendingScores(
            Transfer(lambda tensors: numpy.concatenate(tensors).tolist()), tuple, on_cpu=True, finite_only=False
        )
        self.meter = LearnerMeter(scores, CpuClock(), None, lambda: None, lambda: None)
        self.observer: Any = None
        self._train_step = as_function(keys.train_step, "train_step")
        self._change: Callable[[UpdateGradients], None] = partial(change_gradients, keys)
        self._exchange = exchange
        self._epoch = self._step = 0
        self._sums = self._zeros()

    def _zeros(self) -> list[Array]:
        return [numpy.zeros_like(array) for array in self.model.parameters.values()]

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch, self._step = epoch, step

    def backward(self, batch: Batch | None, is_last_microbatch: bool = True) -> None:
        if batch is not None:
            self._run(batch, train=True)
            gradients = [self.model.gradients[name] for name in self.model.parameters]
            self._sums = [total + gradient for total, gradient in zip(self._sums, gradients, strict=True)]
        self._step += 1

    def update(self, learning_rate: float) -> None:
        gradients = ArrayGradients(self._exchange.finish(self._exchange.start(self._sums, name="gradients")))
        if self.observer is not None:
            self.observer(iter(zip(self.model.parameters, gradients.values, strict=True)))
        self._change(gradients)
        for array, gradient in zip(self.model.parameters.values(), gradients.values, strict=True):
            array -= learning_rate * gradient
        self._sums = self._zeros()

    def flush(self) -> None:
        pass

    def evaluate(self, batch: Batch) -> None:
        self._run(batch, train=False)

    def _run(self, batch: Batch, train: bool) -> None:
        with running(RunContext(self._epoch, self._step, train, seq_tags=batch.seq_tags)) as context:
            self._train_step(model=self.model, extern_data=batch.data)
        values = [loss.value for loss in context.losses.values()]
        numbers = numpy.array([*(value.sum() for value in values), *(value.size for value in values)], numpy.float64)
        self.meter.scores.add(scales_of(context.losses, train), numbers, self._step, batch.indices)

    def modules(self) -> Iterator[tuple[str, Any]]:
        yield "", self.model

    def layers(self) -> Iterator[Layer]:
        shapes = {name: array.shape for name, array in self.model.parameters.items()}
        yield Layer("", type(self.model).__name__, shapes, frozenset(shapes))

    def output_shapes(self, batch: Batch) -> dict[str, list[tuple[int, ...]]]:
        return {}

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        return []

    def numbers(self, values: Sequence[float]) -> Array:
        return numpy.array(values, numpy.float64)


def build_learner(keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> ArrayLearner:
    """Build the config's model."""
    return ArrayLearner(keys, gradient_exchange)


def _write(path: Path, arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    with path.open("wb") as file:
        numpy.savez(file, **{PROGRESS: numpy.array(json.dumps(progress)), **arrays})


def _read(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    with numpy.load(path) as stored:
        arrays = dict(stored)
    return arrays, json.loads(str(arrays.pop(PROGRESS)))
