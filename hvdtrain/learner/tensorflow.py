"""The learner for TensorFlow: Keras 3 models and tf.Module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.arrays import read_arrays, write_arrays
from hvdtrain.learner.base import (
    FILE_SUFFIX,
    Chosen,
    Kind,
    LearnerKeys,
    Make,
    NotFinite,
    Part,
    Shapes,
    Then,
    as_function,
    check_made,
)
from hvdtrain.learner.broken_updates import BrokenUpdates
from hvdtrain.learner.clock import CpuClock
from hvdtrain.learner.loss_scale import LossScale
from hvdtrain.learner.noise import noise_seeds
from hvdtrain.learner.numbers import mixed_seed, mixed_seeds
from hvdtrain.learner.outputs import by_sequence
from hvdtrain.learner.precision import FLOAT32, Precision
from hvdtrain.learner.tensorflow_accumulation import Pending
from hvdtrain.learner.tensorflow_average import WeightAverage
from hvdtrain.learner.tensorflow_graph import StepGraphs
from hvdtrain.learner.tensorflow_optimizer import make_optimizer
from hvdtrain.learner.tensorflow_precision import layers_in, scale_of
from hvdtrain.learner.tensorflow_setup import device_name, prepare_tensorflow
from hvdtrain.learner.tensorflow_variables import Parts, array_of, assign, exchangeable, parts_of, tensorflow_variable
from hvdtrain.learner.waiting import WaitingScores
from hvdtrain.reduce import Reducer
from hvdtrain.scores import Scores

TRAINED, AVERAGED = "trained/", "averaged_updates"
"""In the optimizer's file, where an average of the weights is kept: before the names of the weights that are trained, and how
many updates the average has followed."""


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
        for name, variable in (*self._named("parameters"), *self._named("frozen")):
            yield name, array_of(variable).astype(numpy.float32)

    def peak_memory(self) -> int | None:
        return None if self.device_name == "CPU" else int(tf.config.experimental.get_memory_info("GPU:0")["peak"])

    def map_tensors(self, kind: Kind, change: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        variables = [tensorflow_variable(variable) for variable in self.parts.of_kind(kind)]
        tensors = [exchangeable(variable) for variable in variables]
        for variable, tensor, new in zip(variables, tensors, change(list(tensors)), strict=True):
            if new is not tensor:
                variable.assign(tf.cast(new, variable.dtype))

    def gather_state(self) -> None:
        pass  # every rank has all of it

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], state: Any | None = None) -> None:
        model, optimizer, scale = self.copied() if state is None else state
        write_arrays(optimizer_file, optimizer, {**progress, **scale})
        write_arrays(model_file, model, progress)

    def copied(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any]]:
        model = {name: array_of(variable) for name, variable in self.parts.variables.items()}
        optimizer = {name: array_of(variable) for name, variable in self._optimizer_variables()}
        if self._average is not None and self._average.started:
            averages, trained = self._average.both()
            model |= averages
            optimizer |= {f"{TRAINED}{name}": array for name, array in trained.items()}
            optimizer[AVERAGED] = numpy.array(self._average.updates)
        return model, optimizer, self._scale_state()

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        arrays, progress = read_arrays(model_file)
        wrong = f"{model_file}: expected the parameters of this config's model, got others"
        assign(self.parts.variables.items(), arrays, wrong)
        if optimizer_file is not None:
            arrays, more = read_arrays(optimizer_file)
            trained = {name: arrays.pop(name) for name in list(arrays) if name.startswith(TRAINED)}
            updates = int(arrays.pop(AVERAGED, 0))
            self._load_optimizer(arrays, more, optimizer_file)
            self._load_trained({name.removeprefix(TRAINED): array for name, array in trained.items()}, updates)
        return progress

    def _load_trained(self, trained: Mapping[str, Array], updates: int) -> None:
        """Go on from the weights that were trained, where the model's file has their average."""
        if trained and self._average is not None:
            self._average.start(updates)
        ours = {name: variable for name, variable in self._named("parameters") if name in trained}
        assign(ours.items(), {name: trained[name] for name in ours}, "the weights that were trained")

    def preload(
        self, file: Path, entry: str | None, chosen: Callable[[Shapes, Shapes], Chosen], make: Make | None
    ) -> tuple[list[str], list[str]]:
        theirs, _ = read_arrays(file)
        inside = {name.removeprefix(f"{entry}/"): array for name, array in theirs.items() if name.startswith(f"{entry}/")}
        theirs = inside or theirs
        ours = self.parts.variables
        shapes = {name: tuple(variable.shape) for name, variable in ours.items()}
        wanted = chosen(shapes, {name: array.shape for name, array in theirs.items()})
        values = {name: theirs[other] for name, other in wanted.found.items()}
        if make is not None:
            state = {name: theirs[other] for name, other in wanted.here.items()}
            for name in sorted(ours.keys() - values.keys()):
                made = make(name, shapes[name], state)
                if made is not None:
                    check_made(name, shapes[name], tuple(made.shape))
                    values[name] = numpy.asarray(made)
        for name, value in values.items():
            assign([(name, ours[name])], {name: value}, f"{file}: expected values for {name}, got others")
        if self._average is not None:
            self._average.adopt(set(values))
        return list(ours), list(values)

    def save_own(self, file: Path, parts: Sequence[Part]) -> None:
        own: dict[str, Array] = {}
        for part in parts:
            named = self._optimizer_variables() if part == "optimizer" else self._named(part)
            own |= {f"{part}/{name}": array_of(variable) for name, variable in named}
        write_arrays(file, own, self._scale_state() if "optimizer" in parts else {})

    def load_own(self, file: Path) -> None:
        arrays, more = read_arrays(file)
        by_part: dict[str, dict[str, Array]] = {}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            by_part.setdefault(part, {})[rest] = array
        if "optimizer" in by_part:
            self._load_optimizer(by_part.pop("optimizer"), more, file)
        for kind, stored in by_part.items():
            assign(self._named(kind), stored, f"{file}: expected the {kind} of this config's model, got others")

    def numbers(self, values: Sequence[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    def _scale_state(self) -> dict[str, Any]:
        return {} if self._scale is None else {"loss_scale": self._scale.state()}

    def _load_optimizer(self, arrays: Mapping[str, Array], more: Mapping[str, Any], file: Path) -> None:
        assign(self._optimizer_variables(), arrays, f"{file}: expected the state of this config's optimizer, got another")
        if self._scale is not None and "loss_scale" in more:
            self._scale.restore(more["loss_scale"])

    def _named(self, kind: str) -> list[tuple[str, Any]]:
        """The variables of one kind by name."""
        return [(name, variable) for name, variable in self.parts.variables.items() if self.parts.kinds[name] == kind]

    def _broken(self) -> tuple[str, ...]:
        """The names of parameters that hold other than finite numbers."""
        named = [*self._named("parameters"), *self._named("frozen")]
        return tuple(name for name, variable in named if not numpy.isfinite(array_of(variable).astype(numpy.float64)).all())

    def _names_without(self, whole: Array) -> list[str]:
        """The names of the parameters that are not marked in an array of truth values."""
        return [name for (name, _), is_whole in zip(self._named("parameters"), whole, strict=True) if not is_whole]

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
    named = {name: variable for name, variable in parts.variables.items() if parts.kinds[name] == "parameters"}
    return TensorFlowLearner(
        model,
        optimizer,
        graphs,
        parts,
        updates_without_batch=reducer.updates_without_batch,
        seed=(seed, rank),
        skips=skips,
        scale=scale,
        average=None if keys.ema_decay is None else WeightAverage(named, keys.ema_decay),
    )
