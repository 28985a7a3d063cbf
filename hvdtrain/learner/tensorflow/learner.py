"""The learner for TensorFlow: Keras 3 models and tf.Module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array, Batch
from hvdtrain.learner.base import Exported, Layer, Observer, Then
from hvdtrain.learner.marked import by_sequence
from hvdtrain.learner.meter import LearnerMeter
from hvdtrain.learner.seeds import mixed_seeds, noise_seeds
from hvdtrain.learner.tensorflow.device import device_name
from hvdtrain.learner.tensorflow.gradients import Accumulated
from hvdtrain.learner.tensorflow.graph import StepGraphs
from hvdtrain.learner.tensorflow.optimizer import UpdateGraph
from hvdtrain.learner.tensorflow.state import TensorFlowState
from hvdtrain.learner.tensorflow.variables import ModelVariables, export_model, layers_of


class TensorFlowLearner:
    """A Keras model or tf.Module, its optimizer and its losses: `Learner` of `learner/base.py`.

    Args:
        graphs: from batches to losses, outputs and reduced gradients.
        update: from reduced gradients to new parameters.
        seed: the training's, and the rank. The random numbers of a step (dropout) come from these and the number of the step:
            ranks differ, and a training that continues from a checkpoint gets the same numbers.
    """

    def __init__(
        self,
        variables: ModelVariables,
        graphs: StepGraphs,
        update: UpdateGraph,
        state: TensorFlowState,
        meter: LearnerMeter,
        seed: tuple[int, int],
    ) -> None:
        self.model = variables.model
        counted = [*variables.of_kind("parameters"), *variables.of_kind("frozen")]
        self.num_parameters = sum(int(numpy.prod(variable.shape)) for variable in counted)
        self.device_name = device_name()
        self.variables = variables
        self.graphs = graphs
        self.state = state
        self.meter = meter
        self.observer: Observer | None = None
        self.staging = None  # TensorFlow copies what it is fed
        self._update = update
        self._seed = seed
        self._epoch = 0
        self._step = 0
        self._reduced: Any = None  # what the next update applies
        self._accumulated: Accumulated | None = None  # of the batches since the last update, if more are to come

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step
        self.state.start_average()

    def backward(self, batch: Batch | None, then: Then = "update") -> None:
        if batch is not None or self._accumulated is not None or self.graphs.updates_without_batch:
            with self.meter.clock.span():
                self._add(batch, then)
                if then == "update" and self._reduced is None:
                    self._reduced, self._accumulated = self.graphs.send(self._accumulated), None
        self._step += 1

    def update(self, learning_rate: float) -> None:
        if self._reduced is not None:
            with self.meter.clock.span():
                rank = None if self.graphs.updates_without_batch else self._seed[1]  # reduced gradients get the same on all ranks
                gradients, divisor, waited = self._reduced
                if self.observer is not None:
                    self.observer(self._applied(gradients, divisor))
                seeds = noise_seeds(self._seed[0], rank, self._step - 1)
                self._update.apply(gradients, divisor, self.graphs.exchange, learning_rate, seeds, self._step - 1)
                self.graphs.waited(waited)
        self._reduced = None

    def settle(self) -> None:
        pass  # `update` knows already whether it was skipped

    def evaluate(self, batch: Batch) -> None:
        self.meter.scores.add(*self.graphs.evaluate(batch, self._epoch, self._step), self._step, batch.indices)

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        outputs = self.graphs.forward(batch, self._epoch, self._step)
        rows = {
            name: (list(values.numpy()), None if seq_lens is None else seq_lens.numpy().tolist())
            for name, (values, seq_lens) in outputs.items()
        }
        return by_sequence(rows, len(batch.indices))

    def modules(self) -> Iterator[tuple[str, Any]]:
        return layers_of(self.model)

    def layers(self) -> Iterator[Layer]:
        own: dict[int, dict[str, str]] = {}  # by owner, the variables' own names, each with its whole name
        for name, owner in self.variables.owners.items():
            if self.variables.kinds[name] in ("parameters", "frozen"):
                own.setdefault(id(owner), {})[name.rpartition(".")[2]] = name
        for path, layer in layers_of(self.model):
            names = own.get(id(layer), {})
            shapes = {short: tuple(self.variables.by_name[name].shape) for short, name in names.items()}
            trained = frozenset(short for short, name in names.items() if self.variables.kinds[name] == "parameters")
            yield Layer(path, type(layer).__name__, shapes, trained)

    def output_shapes(self, batch: Batch) -> dict[str, list[tuple[int, ...]]]:
        return {}  # its layers are called within a graph, with tensors of unknown lengths

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        return export_model(self.variables, lambda: self.evaluate(batch), folder)

    def numbers(self, values: Sequence[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    def _applied(self, gradients: list[Any], divisor: tf.Tensor) -> Iterator[tuple[str, Array]]:
        """Reduced gradients as they are applied. Those that are sent as rows become whole."""
        losses = self.graphs.exchange.losses
        scale = (self.meter.loss_scale or 1.0) * (float(divisor) if losses.alone and losses.names else 1.0)
        for (name, variable), gradient in zip(self.variables.named("parameters"), gradients, strict=True):
            whole = numpy.zeros(variable.shape, numpy.float32)
            if isinstance(gradient, tuple):
                values, indices = gradient
                numpy.add.at(whole, indices.numpy(), values.numpy())
            else:
                whole += gradient.numpy()
            yield name, whole / scale

    def _add(self, batch: Batch | None, then: Then) -> None:
        """Collective, if an update follows and this batch is the only one since the last."""
        if batch is None:
            self.graphs.agree()
            return
        place = self._epoch, self._step, mixed_seeds(len(self.variables.generators), *self._seed, self._step)
        if then == "update" and self._accumulated is None:
            names, numbers, self._reduced = self.graphs.train(batch, *place)
        else:
            names, numbers, self._accumulated = self.graphs.collect(batch, *place, self._accumulated)
        self.meter.scores.add(names, numbers, self._step, batch.indices)
