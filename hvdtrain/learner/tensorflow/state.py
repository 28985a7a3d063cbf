"""A TensorFlow model's and its optimizer's variables: into files, out of them, and to other ranks. And the moving average of the
weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError, DamagedCheckpoint
from hvdtrain.learner.base import (
    NEW_OPTIMIZER,
    NO_MARKS,
    Kind,
    MakeMissing,
    Marks,
    PreloadNames,
    Shapes,
    StatePart,
    check_made,
)
from hvdtrain.learner.integrity import check_own, check_same_save
from hvdtrain.learner.model_format import SAFETENSORS, header, is_safetensors, progress_of, reading, unreadable, writing
from hvdtrain.learner.optimizer import changed_options, option_texts
from hvdtrain.learner.precision import LossScale
from hvdtrain.learner.steps import kept
from hvdtrain.learner.tensorflow.tensors import ModelVariables, array_of, assign, exchangeable, tensorflow_variable
from hvdtrain.runtime import log

TRAINED, AVERAGED = "trained/", "averaged_updates"
"""In the optimizer's file if a moving average is kept: the prefix of the trained weights' names, and the number of updates that
the average has followed."""

OPTIONS = "optimizer_options"
"""Beside the arrays of the optimizer's file: its options as text."""

SHARED, OWN = "reducer_shared/", "reducer_own/"
"""The prefixes of the tensors that the reducer keeps: those that all ranks have, in the optimizer's file, and this rank's."""


class TensorFlowState:
    """Does what `State` in `learner/base.py` says.

    Args:
        average: the moving average of the weights; in a file it is the model, and the trained weights are in the optimizer's
            file.
        scale: of the loss; it is stored with the optimizer's state.
    """

    def __init__(
        self,
        variables: ModelVariables,
        optimizer: keras.optimizers.Optimizer,
        average: WeightAverage | None,
        scale: LossScale | None,
        model_format: str = "npz",
    ) -> None:
        self._variables = variables
        self._optimizer = optimizer
        options = {name: value for name, value in optimizer.get_config().items() if name not in ("name", "learning_rate")}
        self._options = option_texts(options)  # a Keras optimizer keeps its own, whatever state it loads
        self._average = average
        self._scale = scale
        self._model_format = model_format
        self.shared: dict[str, list[tf.Tensor]] = {}
        self.own: dict[str, list[tf.Tensor]] = {}

    # The model's variables

    def map_tensors(self, kind: Kind, change: Callable[[list[tf.Tensor]], list[tf.Tensor]]) -> None:
        variables = [tensorflow_variable(variable) for variable in self._variables.of_kind(kind)]
        tensors = [exchangeable(variable) for variable in variables]
        for variable, tensor, new in zip(variables, tensors, change(list(tensors)), strict=True):
            if new is not tensor:
                variable.assign(tf.cast(new, variable.dtype))

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        for name, variable in (*self._variables.named("parameters"), *self._variables.named("frozen")):
            yield name, array_of(variable).astype(numpy.float32)

    # The moving average

    def start_average(self) -> None:
        """Let the moving average begin with the present weights, if one is kept and has not begun yet."""
        if self._average is not None and not self._average.started:
            self._average.start()

    def average_weights(self, updates: int) -> None:
        if self._average is not None:
            self._average.follow(updates)

    def averaged(self) -> AbstractContextManager[None]:
        return self._average.used() if self._average is not None and self._average.started else nullcontext()

    # Checkpoints

    def gather_state(self) -> None:
        pass  # every rank has all of it

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], snapshot: Any | None = None) -> None:
        model, optimizer, scale = self.snapshot() if snapshot is None else snapshot
        write_arrays(optimizer_file, optimizer, {**progress, **scale})
        if self._model_format == SAFETENSORS:
            write_safetensors(model_file, model, progress)
        else:
            write_arrays(model_file, model, progress)

    def snapshot(self) -> tuple[dict[str, Array], dict[str, Array], dict[str, Any]]:
        model = {name: array_of(variable) for name, variable in self._variables.by_name.items()}
        optimizer = {name: array_of(variable) for name, variable in self._optimizer_variables()}
        if self._average is not None and self._average.started:
            averages, trained = self._average.both()
            model |= averages
            optimizer |= {f"{TRAINED}{name}": array for name, array in trained.items()}
            optimizer[AVERAGED] = numpy.array(self._average.updates)
        more = {OPTIONS: self._options, **self._scale_state()}
        return model, optimizer | listed_arrays(SHARED, self.shared) | listed_arrays(OWN, self.own), more

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        arrays, progress = read_arrays(model_file)
        wrong = f"{model_file}: expected the parameters of this config's model, got others"
        assign(self._variables.by_name.items(), arrays, wrong)
        if optimizer_file is not None:
            arrays, more = read_arrays(optimizer_file)
            check_same_save(model_file, progress, optimizer_file, more)
            trained = {name: arrays.pop(name) for name in list(arrays) if name.startswith(TRAINED)}
            updates = int(arrays.pop(AVERAGED, 0))
            self.shared, self.own = take_lists(arrays, SHARED), take_lists(arrays, OWN)
            self._load_optimizer(arrays, more, optimizer_file)
            for line in changed_options(more.get(OPTIONS, {}), self._options).values():
                log.info(line)
            self._load_trained({name.removeprefix(TRAINED): array for name, array in trained.items()}, updates)
        return progress

    def _load_trained(self, trained: Mapping[str, Array], updates: int) -> None:
        """Continue from the trained weights if the model's file has their moving average."""
        if trained and self._average is not None:
            self._average.start(updates)
        ours = {name: variable for name, variable in self._variables.named("parameters") if name in trained}
        assign(ours.items(), {name: trained[name] for name in ours}, "the weights that were trained")

    def preload(
        self, file: Path, entry: str | None, choose: Callable[[Shapes, Shapes], PreloadNames], make: MakeMissing | None
    ) -> tuple[list[str], list[str]]:
        theirs, _ = read_arrays(file)
        inside = {name.removeprefix(f"{entry}/"): array for name, array in theirs.items() if name.startswith(f"{entry}/")}
        theirs = inside or theirs
        ours = self._variables.by_name
        shapes = {name: tuple(variable.shape) for name, variable in ours.items()}
        names = choose(shapes, {name: array.shape for name, array in theirs.items()})
        values = {name: theirs[source] for name, source in names.sources.items()}
        if make is not None:
            renamed = {name: theirs[source] for name, source in names.renamed.items()}
            for name in sorted(ours.keys() - values.keys()):
                made = make(name, shapes[name], renamed)
                if made is not None:
                    check_made(name, shapes[name], tuple(made.shape))
                    values[name] = numpy.asarray(made)
        for name, value in values.items():
            assign([(name, ours[name])], {name: value}, f"{file}: expected values for {name}, got others")
        if self._average is not None:
            self._average.adopt(set(values))
        return list(ours), list(values)

    def save_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        own: dict[str, Array] = {}
        for part in [part for part in parts if part != "kept"]:
            named = self._optimizer_variables() if part == "optimizer" else self._variables.named(part)
            own |= {f"{part}/{name}": array_of(variable) for name, variable in named}
        scale = self._scale_state() if "optimizer" in parts else {}
        write_arrays(file, own | listed_arrays(OWN, self.own), {**marks, **scale})

    def load_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        arrays, more = read_arrays(file)
        self.own = take_lists(arrays, OWN)
        by_part: dict[str, dict[str, Array]] = {}
        for name, array in arrays.items():
            part, _, rest = name.partition("/")
            by_part.setdefault(part, {})[rest] = array
        check_own(file, {**by_part, **more}, [part for part in parts if part != "kept"], marks)
        if "optimizer" in by_part:
            self._load_optimizer(by_part.pop("optimizer"), more, file)
        for kind, stored in by_part.items():
            assign(self._variables.named(kind), stored, f"{file}: expected the {kind} of this config's model, got others")

    def _scale_state(self) -> dict[str, Any]:
        return {} if self._scale is None else {"loss_scale": self._scale.state()}

    def _load_optimizer(self, arrays: Mapping[str, Array], more: Mapping[str, Any], file: Path) -> None:
        try:
            assign(self._optimizer_variables(), arrays, f"{file}: expected the state of this config's optimizer, got another")
        except CheckpointError as error:
            raise CheckpointError(f"{error} {NEW_OPTIMIZER}") from None
        if self._scale is not None and "loss_scale" in more:
            try:
                self._scale.restore(more["loss_scale"])
            except (KeyError, TypeError, ValueError) as error:
                raise DamagedCheckpoint(f"{file}: expected the scale of the loss in 'loss_scale', got another: {error}") from None

    def _optimizer_variables(self) -> list[tuple[str, Any]]:
        """The optimizer's variables, under names such as `Adam.0002.momentum`. The number is the position: Keras' own names have
        a number that depends on what else the process has created."""
        kind = type(self._optimizer).__name__
        paths = [getattr(variable, "path", "").replace("/", "_") + "_" for variable in self._variables.of_kind("parameters")]
        named = []
        for number, variable in enumerate(self._optimizer.variables):
            path = max((path for path in paths if variable.name.startswith(path)), key=len, default="")
            named.append((f"{kind}.{number:04d}.{variable.name.removeprefix(path)}", variable))
        return named


class WeightAverage:
    """A moving average of the trained variables. Others, such as BatchNorm's moving mean, are averages already.

    Args:
        named: the trained variables by name.

    Attributes:
        updates: the number of updates that it has followed.
    """

    def __init__(self, named: Mapping[str, Any], decay: float) -> None:
        self._variables = {name: tensorflow_variable(variable) for name, variable in named.items()}
        self._decay = decay
        self._others: dict[str, tf.Variable] = {}  # the average; inside of `used`, the trained weights
        self._is_used = False
        self._follow = tf.function(self._add_share, autograph=False)
        self.updates = 0

    def start(self, updates: int = 0) -> None:
        """Begin with the present weights."""
        for name, variable in self._variables.items():
            if name in self._others:
                self._others[name].assign(variable)
            else:
                self._others[name] = tf.Variable(variable, trainable=False)
        self.updates = updates

    @property
    def started(self) -> bool:
        return bool(self._others)

    def follow(self, updates: int) -> None:
        """Follow the weights after N more updates."""
        self._follow(tf.constant(1 - kept(self._decay, self.updates, updates), tf.float32))
        self.updates += updates

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the `with` block, the model's weights are the average."""
        self._swap()
        self._is_used = True
        try:
            yield
        finally:
            self._swap()
            self._is_used = False

    def both(self) -> tuple[dict[str, Array], dict[str, Array]]:
        """Copies of the average and of the trained weights, by name."""
        own = {name: array_of(variable) for name, variable in self._variables.items()}
        others = {name: array_of(variable) for name, variable in self._others.items()}
        return (own, others) if self._is_used else (others, own)

    def adopt(self, changed: set[str]) -> None:
        """Copy the values of weights, given by their names, that were set from outside."""
        for name in changed & self._others.keys():
            self._others[name].assign(self._variables[name])

    def _add_share(self, share: tf.Tensor) -> None:
        for name, variable in self._variables.items():
            self._others[name].assign_add((variable - self._others[name]) * tf.cast(share, variable.dtype))

    def _swap(self) -> None:
        for name, variable in self._variables.items():
            before = tf.identity(variable)
            variable.assign(self._others[name])
            self._others[name].assign(before)


def listed_arrays(prefix: str, lists: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, Array]:
    """Lists of tensors as arrays, under names such as PREFIXvelocity/000003."""
    return {f"{prefix}{name}/{n:06d}": tensor.numpy() for name, tensors in lists.items() for n, tensor in enumerate(tensors)}


def take_lists(arrays: dict[str, Array], prefix: str) -> dict[str, list[tf.Tensor]]:
    """The inverse of `listed_arrays`: takes the arrays with this prefix out of a file's."""
    lists: dict[str, list[tf.Tensor]] = {}
    for name in sorted(name for name in arrays if name.startswith(prefix)):
        lists.setdefault(name.removeprefix(prefix).rpartition("/")[0], []).append(tf.constant(arrays.pop(name)))
    return lists


PROGRESS = "progress"
"""The name of the array with the progress, as JSON."""


def write_arrays(path: Path, arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    """Write arrays by name, and the progress. Raises: OSError, if the disk is full."""
    named: dict[str, Any] = {PROGRESS: numpy.frombuffer(json.dumps(progress).encode(), numpy.uint8), **arrays}
    with open(path, "wb") as file:  # numpy adds a suffix to a path, but not to an open file
        numpy.savez(file, **named)


def write_safetensors(path: Path, arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    """The same in this format. Raises: OSError, if the disk is full."""
    from safetensors.numpy import save_file

    in_order = {name: numpy.asarray(array, order="C") for name, array in arrays.items()}
    with writing(path) as unfinished:
        save_file(in_order, unfinished, header("tf", progress))


def _read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    with reading(path):
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
            return arrays, progress_of(file.metadata())


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read what `write_arrays` or `write_safetensors` wrote, or any such file: arrays and progress. Raises: CheckpointError."""
    if is_safetensors(path):
        return _read_safetensors(path)
    try:
        with numpy.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # reading checks each array's CRC
        progress = json.loads(arrays.pop(PROGRESS).tobytes()) if PROGRESS in arrays else {}
        if not isinstance(progress, dict):
            raise ValueError(f"its array {PROGRESS!r} is no dict")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:  # whatever numpy and zipfile make of other bytes
        raise unreadable(path, error) from None
    return arrays, progress
