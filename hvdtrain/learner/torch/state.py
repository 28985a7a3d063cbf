"""A PyTorch model's and its optimizer's tensors: into files, out of them, and to other ranks. And the moving average of the
weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

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
from hvdtrain.learner.model_format import is_safetensors
from hvdtrain.learner.optimizer import option_texts
from hvdtrain.learner.precision import LossScale
from hvdtrain.learner.steps import kept
from hvdtrain.learner.torch.model_file import place_of, read_file, write_file, write_model
from hvdtrain.learner.torch.optimizer import ShardedOptimizer, names_by_group
from hvdtrain.learner.torch.optimizer_modes import OptimizerModes
from hvdtrain.learner.torch.optimizer_state import OptimizerOptions, regrouped
from hvdtrain.learner.torch.tensors import trained_of
from hvdtrain.learner.torch.update import Optimizer
from hvdtrain.runtime import log

TRAINED, AVERAGED = "trained", "averaged_updates"
"""Entries of the optimizer's file if a moving average is kept: the trained weights by name, and the number of updates that the
average has followed."""

OPTIMIZER_CLASS = "optimizer_class"
"""An entry beside the optimizer's state: the name of its class. RETURNN's files have none, nor have those of hvdtrain 0.1."""

OPTIONS = "optimizer_options"
"""An entry beside the optimizer's state: the options of each of its groups as the config had them, as text."""

NAMES = "param_names"
"""An entry of the optimizer's file, as in RETURNN's: the names of the parameters, first those that the optimizer has, in its
order."""

SHARED, OWN = "reducer_shared", "reducer_own"
"""Entries with the tensors that the reducer keeps: those that all ranks have, in the optimizer's file, and this rank's."""


class TorchState:
    """Does what `State` in `learner/base.py` says.

    Args:
        average: the moving average of the weights, or the optimizer's own weights for evaluations; in a file these are the model,
            and the trained weights are in the optimizer's file.
        scale: of the loss; it is stored with the optimizer's state.
        constants: the names of parameters that are neither saved nor loaded, as they always come from another model's file.
        model_format: of the model's file: "pt" or "safetensors".
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        average: WeightAverage | OptimizerModes | None,
        scale: LossScale | None,
        constants: frozenset[str],
        model_format: str = "pt",
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._average = average
        self._scale = scale
        self._constants = constants
        self._model_format = model_format
        self._trained = trained_of(model)
        self._options = OptimizerOptions(optimizer)
        self._stored_names: Sequence[str] | None = None  # of the parameters in the checkpoint
        self.shared: dict[str, list[torch.Tensor]] = {}
        self.own: dict[str, list[torch.Tensor]] = {}

    # The model's tensors

    def map_tensors(self, kind: Kind, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        tensors = [tensor.detach() for tensor in self._tensors(kind)]
        with torch.no_grad():
            for tensor, new in zip(tensors, change(tensors), strict=True):
                if new is not tensor:
                    tensor.copy_(new)

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().to("cpu", torch.float32, copy=True).numpy()

    def _tensors(self, kind: Kind) -> list[torch.Tensor]:
        if kind == "parameters":
            return list(self._trained)
        if kind == "frozen":
            return [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        floating = kind == "statistics"
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point() == floating]

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
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.gather()

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], snapshot: Any | None = None) -> None:
        model, optimizer = self._contents() if snapshot is None else snapshot
        write_file(optimizer_file, {**optimizer, **progress})
        write_model(model_file, model, progress, self._model_format)

    def snapshot(self) -> tuple[Any, Any]:
        return _copied(self._contents(), {})  # type: ignore[no-any-return]

    def _contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The contents of the model's file and of the optimizer's, without progress."""
        model: dict[str, Any] = self._saved()
        # The order of the optimizer's parameters, by which RETURNN finds their state; then those that are not trained.
        trained_names = [name for group in self._names_by_group() for name in group]
        names = list(dict.fromkeys([*trained_names, *(name for name, _ in self._model.named_parameters())]))
        names = [name for name in names if name not in self._constants]
        with self._average.left() if self._average is not None else nullcontext():
            optimizer: dict[str, Any] = {**self._optimizer_state(), NAMES: names}
        optimizer |= {name: kept for name, kept in ((SHARED, self.shared), (OWN, self.own)) if kept}
        if self._average is not None and self._average.started:
            averages, trained = self._average.both()
            average_of = {id(parameter): average for parameter, average in zip(self._trained, averages, strict=True)}
            named = self._model.named_parameters(remove_duplicate=False)  # shared parameters under all of their names
            model |= {name: average_of[id(one)] for name, one in named if id(one) in average_of}
            optimizer |= {TRAINED: dict(zip(self._trained_names(), trained, strict=True)), AVERAGED: self._average.updates}
        return model, optimizer

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        stored = read_file(model_file, self._device)
        try:
            own = self._model.state_dict()
            self._model.load_state_dict(stored.pop("model") | {name: own[name] for name in self._constants})
        except (AttributeError, KeyError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"{model_file}: expected the parameters of this config's model, got others: {error}") from None
        if optimizer_file is not None:
            more = read_file(optimizer_file, self._device)
            check_same_save(model_file, stored, optimizer_file, more)
            self._stored_names = more.get(NAMES)
            for line in self._load_optimizer(more, optimizer_file):
                log.info(line)
            self._load_trained(more.get(TRAINED), more.get(AVERAGED, 0), optimizer_file)
            self.shared, self.own = lists_in(more, SHARED, optimizer_file), lists_in(more, OWN, optimizer_file)
        return stored

    def _load_trained(self, trained: dict[str, torch.Tensor] | None, updates: int, file: Path) -> None:
        """Continue from the trained weights if the model's file has their moving average."""
        if trained is None:
            return
        try:
            if self._average is not None:
                self._average.start(int(updates))
            with torch.no_grad():
                for name, parameter in zip(self._trained_names(), self._trained, strict=True):
                    if name in trained:
                        parameter.copy_(trained[name])
        except (RuntimeError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(
                f"{file}: expected the weights that were trained in {TRAINED!r}, got others: {error}"
            ) from None

    def preload(
        self, file: Path, entry: str | None, choose: Callable[[Shapes, Shapes], PreloadNames], make: MakeMissing | None
    ) -> tuple[list[str], list[str]]:
        ours, taken = preload(self._saved(), self._device, file, entry, choose, make)
        if self._average is not None:
            named = self._model.named_parameters(remove_duplicate=False)
            self._average.adopt({id(parameter) for name, parameter in named if name in taken})
        return ours, taken

    def save_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        own: dict[str, Any] = dict(marks)
        for part in parts:
            if part != "optimizer" and part != "kept":
                own[part] = [tensor.detach() for tensor in self._tensors(part)]
        if "optimizer" in parts:
            own |= self._optimizer_state()
        write_file(file, own | ({OWN: self.own} if self.own else {}))

    def load_own(self, file: Path, parts: Sequence[StatePart], marks: Marks = NO_MARKS) -> None:
        own = read_file(file, self._device)
        check_own(file, own, [part for part in parts if part != "kept"], marks)
        self.own = lists_in(own, OWN, file)
        if "optimizer" in parts:
            self._load_optimizer(own, file)
        for part in parts:
            if part != "optimizer" and part != "kept":
                try:
                    self.map_tensors(part, lambda _, stored=own[part]: stored)  # type: ignore[misc]
                except (RuntimeError, TypeError, ValueError) as error:
                    raise DamagedCheckpoint(f"{file}: expected the {part} of this config's model, got others: {error}") from None

    def _saved(self) -> dict[str, torch.Tensor]:
        """The model's tensors that a checkpoint holds."""
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self._constants}

    def _optimizer_state(self) -> dict[str, Any]:
        state = {
            "optimizer": self._optimizer.state_dict(),
            OPTIMIZER_CLASS: self._optimizer_name(),
            OPTIONS: self._options.texts(),
        }
        return state if self._scale is None else {**state, "loss_scale": self._scale.state()}

    def _load_optimizer(self, state: dict[str, Any], file: Path) -> list[str]:
        """Load the optimizer's entries of a file. Returns lines about what changed. Raises: CheckpointError."""
        own = self._optimizer_name()
        if "optimizer" not in state:
            raise DamagedCheckpoint(f"{file}: expected the state of the optimizer {own}, got a file without 'optimizer'")
        stored_class = state.get(OPTIMIZER_CLASS, own)
        if stored_class != own:
            raise CheckpointError(
                f"{file}: expected the state of the optimizer {own}, got that of {stored_class} {NEW_OPTIMIZER}"
            )
        try:
            lines = self._load_state(state["optimizer"], state.get(OPTIONS), OPTIMIZER_CLASS in state)
            if self._scale is not None and "loss_scale" in state:
                self._scale.restore(state["loss_scale"])
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{file}: expected the state of the optimizer {own} for this model, got another: {error} {NEW_OPTIMIZER}"
            ) from None
        return lines

    def _load_state(self, stored: dict[str, Any], texts: Sequence[dict[str, str]] | None, is_of_class: bool) -> list[str]:
        own = self._names_by_group()
        if not isinstance(stored, dict) or not {"state", "param_groups"} <= stored.keys():  # a class of the user's own
            self._optimizer.load_state_dict(stored)
            return []
        before = [option_texts(group) for group in stored["param_groups"]] if texts is None else texts
        sources = [[place] * len(names) for place, names in enumerate(own)]
        if self._stored_names is not None and all(name for group in own for name in group):
            stored, sources = regrouped(stored, self._stored_names, own)
        of_each = [[before[source] if source < len(before) else {} for source in group] for group in sources]
        return self._options.load(stored, of_each, is_of_class, own)

    def _optimizer_name(self) -> str:
        return self._optimizer.name if isinstance(self._optimizer, ShardedOptimizer) else type(self._optimizer).__name__

    def _names_by_group(self) -> list[list[str]]:
        optimizer = self._optimizer
        whole = optimizer.whole_groups if isinstance(optimizer, ShardedOptimizer) else None
        return names_by_group(self._model, whole or [group["params"] for group in optimizer.param_groups])

    def _trained_names(self) -> list[str]:
        return [name for name, parameter in self._model.named_parameters() if parameter.requires_grad]


class WeightAverage:
    """A moving average of the trained parameters. Buffers such as BatchNorm's running mean are averages already.

    Attributes:
        updates: the number of updates that it has followed.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self._parameters = list(parameters)
        self._decay = decay
        self._others: list[torch.Tensor] = []  # the average; inside of `used`, the trained weights
        self._is_used = False
        self.updates = 0

    def start(self, updates: int = 0) -> None:
        """Begin with the present weights."""
        self._others = [parameter.detach().clone() for parameter in self._parameters]
        self.updates = updates

    @property
    def started(self) -> bool:
        return bool(self._others)

    def follow(self, updates: int) -> None:
        """Follow the weights after N more updates."""
        share = 1 - kept(self._decay, self.updates, updates)
        torch._foreach_lerp_(self._others, [parameter.detach() for parameter in self._parameters], share)
        self.updates += updates

    @contextmanager
    def used(self) -> Iterator[None]:
        """Inside the `with` block, the model's weights are the average. Nothing is copied."""
        self._swap()
        self._is_used = True
        try:
            yield
        finally:
            self._swap()
            self._is_used = False

    @contextmanager
    def left(self) -> Iterator[None]:
        """The optimizer's state does not depend on which weights the model has."""
        yield

    def both(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The average and the trained weights."""
        own = [parameter.detach() for parameter in self._parameters]
        return (own, self._others) if self._is_used else (self._others, own)

    def adopt(self, changed: set[int]) -> None:
        """Copy the values of parameters, given by their ids, that were set from outside."""
        for parameter, other in zip(self._parameters, self._others, strict=bool(self._others)):
            if id(parameter) in changed:
                other.copy_(parameter.detach())

    def _swap(self) -> None:
        for number, parameter in enumerate(self._parameters):
            parameter.data, self._others[number] = self._others[number], parameter.data


def preload(
    ours: dict[str, torch.Tensor],
    device: torch.device,
    file: Path,
    entry: str | None,
    choose: Callable[[Shapes, Shapes], PreloadNames],
    make: MakeMissing | None,
) -> tuple[list[str], list[str]]:
    """Like `State.preload`, into tensors by name that share their memory with a model's."""
    contents = read_file(file, device)
    if is_safetensors(file):
        contents = contents["model"]
    elif entry is not None and isinstance(contents.get(entry), dict):
        contents = contents[entry]
    theirs = {name: tensor for name, tensor in contents.items() if isinstance(tensor, torch.Tensor)}
    names = choose(_shapes(ours), _shapes(theirs))
    values = {name: theirs[source] for name, source in names.sources.items()}
    if make is not None:
        renamed = {name: theirs[source] for name, source in names.renamed.items()}
        for name in sorted(ours.keys() - values.keys()):
            made = make(name, tuple(ours[name].shape), renamed)
            if made is not None:
                check_made(name, tuple(ours[name].shape), tuple(made.shape))
                values[name] = made
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value)
    return list(ours), list(values)


def lists_in(stored: Mapping[str, Any], name: str, file: Path) -> dict[str, list[torch.Tensor]]:
    """An entry with lists of tensors by name; none without the entry. Raises: DamagedCheckpoint."""
    lists = stored.get(name, {})
    if not isinstance(lists, dict) or not all(
        isinstance(one, list) and all(isinstance(tensor, torch.Tensor) for tensor in one) for one in lists.values()
    ):
        raise DamagedCheckpoint(f"{file}: expected lists of tensors in its entry {name!r}, got others")
    return lists


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _copied(state: Any, copies: dict[Any, torch.Tensor]) -> Any:
    """A state dict with copies of its tensors, on the CPU. Tensors that share their memory share that of their copy.

    Args:
        copies: those made so far, by the place of the tensor.
    """
    if isinstance(state, torch.Tensor):
        if not state.numel():
            return state.detach().to("cpu", copy=True)
        if (place := place_of(state)) not in copies:
            copies[place] = state.detach().to("cpu", copy=True)
        return copies[place]
    if isinstance(state, dict):
        return {key: _copied(value, copies) for key, value in state.items()}
    return type(state)(_copied(value, copies) for value in state) if isinstance(state, (list, tuple)) else state
