"""The learner for TensorFlow: Keras 3 models and tf.Module."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array, Batch
from hvdtrain.learner.base import FILE_SUFFIX, NotFinite, Then
from hvdtrain.learner.loss_scale import BrokenUpdates, LossScale
from hvdtrain.learner.marked import by_sequence
from hvdtrain.learner.pending_scores import WaitingScores
from hvdtrain.learner.seeds import mixed_seeds, noise_seeds
from hvdtrain.learner.tensorflow.device import device_name
from hvdtrain.learner.tensorflow.gradients import Pending
from hvdtrain.learner.tensorflow.graph import StepGraphs
from hvdtrain.learner.tensorflow.state import TensorFlowState, WeightAverage
from hvdtrain.learner.tensorflow.variables import Parts, array_of
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.timer import CpuClock


class TensorFlowLearner:
    """A Keras model or tf.Module, its optimizer and its losses.

    Args:
        parts: what the model consists of.
        average: of the weights over time.
        seed: random numbers of a step (dropout) come from this, the rank and the number of the step, so that ranks differ
            and a continued training goes on with the same numbers.
        scale: of the loss; None: it is left as it is.
    """

    file_suffix = FILE_SUFFIX["tensorflow"]

    def __init__(
        self,
        model: Any,
        optimizer: keras.optimizers.Optimizer,
        graphs: StepGraphs,
        parts: Parts,
        *,
        updates_without_batch: bool,
        seed: tuple[int, int],
        skips: int | None = None,
        average: WeightAverage | None = None,
        scale: LossScale | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.graphs = graphs
        self.device_name = device_name()
        self.parts = parts
        self._average = average
        self._updates_without_batch = updates_without_batch
        self._seed = seed
        state = TensorFlowState(optimizer, parts, average, scale)
        self.map_tensors, self.gather_state, self.preload = state.map_tensors, state.gather_state, state.preload
        self.save, self.copied, self.load = state.save, state.copied, state.load
        self.save_own, self.load_own = state.save_own, state.load_own
        self._clock = CpuClock()
        self._epoch = 0
        self._step = 0
        self._reduced: Any = None  # what the next update applies
        self._pending: Pending | None = None  # gradients of the batches since the last update, if more are to come
        self._scale = scale
        self._broken_updates = BrokenUpdates(skips, scale, same_on_all_ranks=updates_without_batch)
        self._scores = WaitingScores(
            lambda tensors: tf.concat(tensors, 0).numpy().tolist(),
            self._broken,
            at_once=self.device_name == "CPU",
            finite_only=skips is not None,
        )
        counted = [*parts.of_kind("parameters"), *parts.of_kind("frozen")]
        self.num_parameters = sum(int(numpy.prod(variable.shape)) for variable in counted)

    @property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.scale

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step
        if self._average is not None and not self._average.started:
            self._average.start()

    def backward(self, batch: Batch | None, then: Then = "update") -> None:
        if batch is not None or self._pending is not None or self._updates_without_batch:
            with self._clock.span():
                self._add(batch, then)
                if then == "update" and self._reduced is None:
                    self._reduced, self._pending = self.graphs.send(self._pending), None
        self._step += 1

    def _add(self, batch: Batch | None, then: Then) -> None:
        """Collective, if an update comes next and this batch is the only one since the last."""
        if batch is None:
            self.graphs.agree()
            return
        place = self._epoch, self._step, mixed_seeds(len(self.parts.generators), *self._seed, self._step)
        if then == "update" and self._pending is None:
            names, numbers, self._reduced = self.graphs.train(batch, *place)
        else:
            names, numbers, self._pending = self.graphs.collect(batch, *place, self._pending)
        self._scores.add(names, numbers, self._step, batch.indices)

    def update(self, learning_rate: float) -> None:
        if self._reduced is not None:
            with self._clock.span():
                rank = None if self._updates_without_batch else self._seed[1]  # reduced gradients get the same on all ranks
                finite = self.graphs.apply(self._reduced, learning_rate, noise_seeds(self._seed[0], rank, self._step - 1))
                if self._broken_updates.may_be_left_out:
                    whole = finite.numpy()
                    self._broken_updates.is_applied(bool(whole.all()), self._step - 1, lambda: self._names_without(whole))
        self._reduced = None

    def average_weights(self, updates: int) -> None:
        if self._average is not None:
            self._average.follow(updates)

    def averaged(self) -> AbstractContextManager[None]:
        return self._average.used() if self._average is not None and self._average.started else nullcontext()

    def evaluate(self, batch: Batch) -> None:
        self._scores.add(*self.graphs.evaluate(batch, self._epoch, self._step), self._step, batch.indices)

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        outputs = self.graphs.forward(batch, self._epoch, self._step)
        rows = {
            name: (list(values.numpy()), None if seq_lens is None else seq_lens.numpy().tolist())
            for name, (values, seq_lens) in outputs.items()
        }
        return by_sequence(rows, len(batch.indices))

    def take_scores(self) -> Scores:
        return self._scores.take()

    def take_not_finite(self) -> list[NotFinite]:
        return self._scores.take_not_finite()

    def take_step_seconds(self) -> float:
        with self._clock.span():
            self._scores.fetch()  # waits for the device
        return self._clock.take()

    def arrays(self) -> Iterator[tuple[str, Array]]:
        for name, variable in (*self.parts.named("parameters"), *self.parts.named("frozen")):
            yield name, array_of(variable).astype(numpy.float32)

    def peak_memory(self) -> int | None:
        return None if self.device_name == "CPU" else int(tf.config.experimental.get_memory_info("GPU:0")["peak"])

    def numbers(self, values: Sequence[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    def _broken(self) -> tuple[str, ...]:
        """The names of parameters that hold other than finite numbers."""
        named = [*self.parts.named("parameters"), *self.parts.named("frozen")]
        return tuple(name for name, variable in named if not numpy.isfinite(array_of(variable).astype(numpy.float64)).all())

    def _names_without(self, whole: Array) -> list[str]:
        """The names of the parameters that are not marked in an array of truth values."""
        return [name for (name, _), is_whole in zip(self.parts.named("parameters"), whole, strict=True) if not is_whole]
