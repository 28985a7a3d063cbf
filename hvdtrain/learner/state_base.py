"""What checkpoints and other ranks need of a learner, and what of that is the same in all frameworks."""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.comm.base import Tensor
from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError, DamagedCheckpoint
from hvdtrain.learner.contents import (
    AVERAGED,
    EXACT,
    NO_MARKS,
    OPTIMIZER_CLASS,
    ORDER,
    OWN,
    SHAPES,
    SHARED,
    TRAINED,
    UNSUITABLE,
    BackgroundSaver,
    CheckpointContents,
    FileFormat,
    Marks,
    Reader,
    Running,
    entries_with_tensors,
    read_foreign,
    tensor_lists,
    tensor_shapes,
)
from hvdtrain.learner.integrity import check_rank_file, check_same_save, check_shapes
from hvdtrain.learner.model_state import ROLES, Role, StatePart
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.preload import PreloadRequest
from hvdtrain.learner.weight_average import EvaluationWeights
from hvdtrain.runtime import log

NEW_OPTIMIZER = "(continue with the optimizer that the training began with, or with a new one: ++fresh_optimizer 1)"
"""What to do about the state of another optimizer."""

DIGEST = 8
"""The bytes of a digest: among a billion pairs of other values, the chance that two have the same one is 1e-10."""

WITH_PARAMETERS: tuple[Role, ...] = ("parameters", "frozen")


class StateBase(ABC):
    """Weights, buffers and the optimizer's state: into files, out of them, and to other ranks. Reducers see it as `ModelState`.

    A framework adds how tensors are taken from its model and its optimizer, and how they are set.

    Args:
        average: the weights for evaluations; in a file these are the model, and the trained weights are in the optimizer's file.
            None: the trained ones.
        check: of the gradients, whose state (the scale of the loss) is stored with the optimizer's; None: there is none.

    Attributes:
        running: the sums of a running average, on rank 0; None: there are none.
        saver: makes the copies of `copied`, in a framework that has one; None: a thread writes them.
    """

    num_pretrain_epochs = 0
    """The number of first epochs whose checkpoints have `pretrain` in their names."""

    def __init__(self, file_format: FileFormat, average: EvaluationWeights | None, check: GradientCheck | None) -> None:
        self._format = file_format
        self._average = average
        self._check = check
        self.running: Running | None = None
        self.saver: BackgroundSaver | None = None
        self.shared: dict[str, list[Tensor]] = {}
        self.own: dict[str, list[Tensor]] = {}

    def score_name(self, name: str) -> str:
        """The name here of a score in a file of learning rates, which another program may have written."""
        return name

    @abstractmethod
    def tensors(self, role: Role) -> dict[str, Tensor]:
        """See `ModelState`."""

    @abstractmethod
    def set_tensors(self, role: Role, values: Mapping[str, Any]) -> None:
        """See `ModelState`. Raises one of `UNSUITABLE`, if the values are those of a file that does not fit."""

    def digests(self, role: Role) -> list[bytes]:
        """See `ModelState`."""
        return [sha256(bits).digest()[:DIGEST] for bits in self._bits(list(self.tensors(role).values()))]

    def sums(self, role: Role) -> list[int]:
        """Checksums of their values that take less time; not negative."""
        return [zlib.crc32(bits) for bits in self._bits(list(self.tensors(role).values()))]

    def frozen_now(self) -> Collection[int]:
        """See `ModelState`."""
        return ()

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        """The names of all parameters, trained or not, with copies of their values as arrays of float32, or complex64."""
        for role in WITH_PARAMETERS:
            for name, tensor in self.tensors(role).items():
                wide = self.wide(tensor)
                yield name, wide.astype(numpy.complex64 if wide.dtype.kind == "c" else numpy.float32)

    @property
    def base_hash(self) -> str | None:
        """The hash of the frozen parameters, if checkpoints leave them out."""
        return None

    def other_checksums(self) -> Mapping[str, str]:
        """Those of models that are neither trained nor saved, by name; they have to be the same on all ranks."""
        return {}

    def check_base(self) -> None:  # noqa: B027 most checkpoints leave nothing out
        """Check that frozen parameters which checkpoints leave out are as the model was made with. Raises: ConfigError."""

    def reset_optimizer(self) -> None:
        """Forget what the reducer keeps; a framework that supports `use_last_best_model` also begins with a new optimizer."""
        self.shared.clear()
        self.own.clear()

    # The moving average

    def start_average(self) -> None:
        """Let the moving average begin with the present weights, if one is kept and has not begun yet."""
        if self._average is not None and not self._average.has_started:
            self._average.start()

    def average_weights(self, updates: int) -> None:
        """Let the moving average of the weights, if there is one, follow N updates, when all ranks have the same weights."""
        if self._average is not None:
            self._average.follow(updates)
        if self.running is not None:
            self.running.follow(updates)

    def averaged_weights(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the model's weights are their moving average, if one is kept. Collective."""
        return self._average.use() if self._average is not None and self._average.has_started else nullcontext()

    def evaluates_others(self) -> bool:
        """Whether the weights that are evaluated and saved are others than those that are trained."""
        return self._average is not None and self._average.has_started

    def trained_weights(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the model's weights are those that are trained, also within `averaged_weights`. Collective."""
        return self._average.trained() if self._average is not None else nullcontext()

    @contextmanager
    def other_model(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Inside the `with` block, the model has the tensors of another one, such as an average. Raises: CheckpointError."""
        before = deepcopy(self.model_tensors())
        try:
            self.set_model(tensors)
            yield
        finally:
            self.set_model(before)

    # Checkpoints

    def gather_state(self) -> None:  # noqa: B027 few optimizers hold their state in parts
        """Collective. Bring together on rank 0 what the ranks hold in parts. Called before rank 0 asks for the contents."""

    def contents(self, progress: Mapping[str, Any], *, model_only: bool = False) -> CheckpointContents:
        """What a checkpoint holds of the present state, within `trained_weights`. It may share memory with the model, so it has
        to be written, or `copied`, before training continues.

        Args:
            model_only: the present model without anything else; inside of `averaged_weights`, that is the average.
        """
        model = self.model_tensors()
        if model_only:
            return CheckpointContents(model, {}, progress, self._format)
        optimizer = self._optimizer_contents()
        for entry, lists in ((SHARED, self.shared), (OWN, self.own)):
            if lists:
                optimizer |= {entry: self._stored_lists(lists), ORDER: list(self.tensors("parameters"))}
        if self._average is not None and self._average.has_started:
            averages, trained = self._average.evaluated_and_trained()
            model |= averages
            optimizer |= {TRAINED: trained, AVERAGED: self._average.updates}
            if exact := dict(self._average.exact()):
                optimizer[EXACT] = exact
        optimizer[SHAPES] = tensor_shapes(optimizer)
        return CheckpointContents(model, optimizer, progress, self._format, None if self.running is None else self.running.state)

    def copied(self, contents: CheckpointContents) -> CheckpointContents:
        """Contents that any thread may write while training goes on. They are valid until the next call."""
        return contents if contents.running is None else replace(contents, running=contents.running.copy())

    def close(self) -> None:
        """End what `copied` has started."""
        if self.saver is not None:
            self.saver.close()

    def load(
        self, model_file: Path, optimizer_file: Path | None, read: Reader | None = None, with_optimizer: bool = False
    ) -> dict[str, Any]:
        """Read a checkpoint, or what another program wrote in the same format; return what else is in the model's file.

        Without an optimizer's file, only the model is read.

        Args:
            read: the key checkpoint_reader.
            with_optimizer: load the optimizer's state that it returns.

        Raises:
            CheckpointError: a file cannot be read, or belongs to another model or optimizer.
        """
        foreign = None if read is None else read_foreign(read, model_file)
        stored = self._format.read_model(model_file) if foreign is None else dict(foreign)
        tensors = stored.pop("model")
        of_optimizer = stored.pop("optimizer", None) if foreign is not None else None
        try:
            self.set_model({**tensors, **self._left_out(stored, tensors, model_file)})
        except UNSUITABLE as error:
            raise CheckpointError(
                f"{model_file}: expected the parameters of this config's model, got others (for another model, name another "
                f"folder in `model`, or remove the files of this one; preload_from_files takes what fits): {error}"
            ) from None
        if of_optimizer is not None and with_optimizer:
            for line in self._load_optimizer(of_optimizer(), model_file):
                log.info(line)
        if optimizer_file is not None:
            entries = self._format.read(optimizer_file)
            check_same_save(model_file, stored, optimizer_file, entries)
            for line in self._load_optimizer(entries, optimizer_file):
                log.info(line)
            self._load_trained(entries, optimizer_file)
            names = list(self.tensors("parameters"))
            if entries.get(ORDER, names) != names:
                raise CheckpointError(
                    f"{optimizer_file}: expected the parameters in the order of this config's model, which is that of what the "
                    f"ranks keep to average them, got another {NEW_OPTIMIZER}"
                )
            self.shared, self.own = tensor_lists(entries, SHARED, optimizer_file), tensor_lists(entries, OWN, optimizer_file)
        return stored

    @abstractmethod
    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        """Copy parameters and buffers from a file. Returns the names of all of ours, and of those that were set.

        Raises: CheckpointError, if the file cannot be read, or values of another shape were made.
        """

    def write_rank(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        """Write this rank's file: tensors of some roles, and the optimizer's state if that is one of the parts. Raises: OSError,
        RuntimeError, if the disk is full."""
        entries: dict[str, Any] = dict(marks)
        for role in _roles(parts):
            entries[role] = {name: self._stored(tensor) for name, tensor in self.tensors(role).items()}
        if "optimizer" in parts:
            entries |= self._optimizer_contents()
        if self.own:
            entries[OWN] = self._stored_lists(self.own)
        self._format.write(file, {**entries, SHAPES: tensor_shapes(entries)})

    def load_rank(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        """Read this rank's file.

        Raises:
            CheckpointError: it cannot be read, one of the parts is missing, or it has other marks.
        """
        entries = self._format.read(file)
        check_rank_file(file, entries, [role for role in parts if role != "kept"], marks)
        self.own = tensor_lists(entries, OWN, file)
        if "optimizer" in parts:
            self._load_optimizer(entries, file)
        else:
            self._check_shapes(file, entries)
        for role in _roles(parts):
            try:
                self._set_stored(role, self._by_name(role, entries[role]))
            except UNSUITABLE as error:
                raise DamagedCheckpoint(f"{file}: expected the {role} of this config's model, got others: {error}") from None

    def _check_shapes(self, file: Path, entries: Mapping[str, Any]) -> None:
        """Whether all tensors are in a file that were saved. Raises: DamagedCheckpoint."""
        check_shapes(file, entries.get(SHAPES), entries_with_tensors(entries), self._numbered_parameters(entries))

    def _optimizer_contents(self) -> dict[str, Any]:
        return self._optimizer_entries() | ({} if self._check is None else self._check.state())

    def _load_optimizer(self, entries: Mapping[str, Any], file: Path) -> list[str]:
        """Load the optimizer's entries of a file. Returns lines about what changed. Raises: CheckpointError."""
        name = self._optimizer_name()
        if "optimizer" not in entries:
            raise DamagedCheckpoint(f"{file}: expected the state of the optimizer {name}, got a file without 'optimizer'")
        if (stored := entries.get(OPTIMIZER_CLASS, name)) != name:
            raise CheckpointError(f"{file}: expected the state of the optimizer {name}, got that of {stored} {NEW_OPTIMIZER}")
        self._check_shapes(file, entries)
        try:
            lines = self._set_optimizer(entries)
        except UNSUITABLE as error:
            raise CheckpointError(
                f"{file}: expected the state of the optimizer {name} for this model, got another: {error} {NEW_OPTIMIZER}"
            ) from None
        if self._check is not None:
            try:
                self._check.restore(entries)
            except UNSUITABLE as error:
                raise DamagedCheckpoint(f"{file}: expected the scale of the loss in 'loss_scale', got another: {error}") from None
        return lines

    def _load_trained(self, entries: Mapping[str, Any], file: Path) -> None:
        """Continue from the trained weights if the model's file has their moving average."""
        if (trained := entries.get(TRAINED)) is None:
            return
        try:
            if self._average is not None:
                self._average.start(int(entries.get(AVERAGED, 0)))
                self._average.restore(entries.get(EXACT, {}))
            self._set_stored("parameters", trained)
        except UNSUITABLE as error:
            raise DamagedCheckpoint(
                f"{file}: expected the weights that were trained in {TRAINED!r}, got others: {error}"
            ) from None

    # What a framework adds. Setting raises one of UNSUITABLE if values do not fit.

    @abstractmethod
    def model_tensors(self) -> dict[str, Tensor]:
        """The model's present tensors by name, as its file holds them. They may share memory with the model."""

    def _left_out(self, stored: dict[str, Any], tensors: Mapping[str, Tensor], file: Path) -> Mapping[str, Tensor]:
        """Remove what a model's file says about parameters that it leaves out, and return our values of them.

        Args:
            stored: the other entries of the file.
            tensors: those of the model in the file.

        Raises:
            CheckpointError: ours have other values than those that the file was trained with.
        """
        return {}

    @abstractmethod
    def set_model(self, tensors: Mapping[str, Tensor]) -> None:
        """Give the model the tensors that `model_tensors` named."""

    def _set_stored(self, role: Role, stored: Mapping[str, Any]) -> None:
        """Set all tensors of one role to what a file has; others in the file are left out."""
        tensors = self.tensors(role)
        for name, tensor in tensors.items():
            if name not in stored:
                raise ValueError(f"there is none of {name}")
            if tuple(stored[name].shape) != tuple(tensor.shape):  # setting it might repeat a smaller one
                raise ValueError(f"{name} has the shape {tuple(stored[name].shape)} instead of {tuple(tensor.shape)}")
        self.set_tensors(role, {name: stored[name] for name in tensors})

    def _by_name(self, role: Role, stored: Any) -> Mapping[str, Any]:
        """The tensors of one role in a rank's file by name, also in files of earlier releases."""
        named: Mapping[str, Any] = stored
        return named

    def _stored(self, tensor: Tensor) -> Any:
        """A tensor as a file holds it."""
        return tensor

    def _stored_lists(self, lists: Mapping[str, Sequence[Tensor]]) -> dict[str, list[Any]]:
        return {name: [self._stored(tensor) for tensor in tensors] for name, tensors in lists.items()}

    def _bits(self, tensors: Sequence[Tensor]) -> Iterator[memoryview]:
        """The bytes of each tensor."""
        return (numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8).data for tensor in tensors)

    def wide(self, tensor: Tensor) -> Array:
        """A copy of a tensor as an array of float64, or complex128."""
        array = numpy.asarray(tensor)
        return array.astype(numpy.complex128 if array.dtype.kind == "c" else numpy.float64)

    @abstractmethod
    def _optimizer_name(self) -> str:
        """The name of the optimizer's class."""

    @abstractmethod
    def _optimizer_entries(self) -> dict[str, Any]:
        """The optimizer's state under "optimizer", and what belongs to it."""

    def _numbered_parameters(self, entries: Mapping[str, Any]) -> dict[str, str]:
        """The names of parameters by the numbers that the optimizer's state in a file has for them, for messages."""
        return {}

    @abstractmethod
    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        """Set the optimizer's state. Returns lines about what changed."""


def _roles(parts: Sequence[StatePart]) -> list[Role]:
    return [role for role in ROLES if role in parts]
