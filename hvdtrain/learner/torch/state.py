"""A PyTorch model's and its optimizer's tensors, as checkpoints and other ranks take them; and the moving average of the
weights."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.contents import BASE, OPTIMIZER_CLASS, OPTIONS, SHAPES, TRAINED, CheckpointContents
from hvdtrain.learner.model_format import is_safetensors
from hvdtrain.learner.model_state import Kind
from hvdtrain.learner.optimizer import option_texts
from hvdtrain.learner.precision import LossScale
from hvdtrain.learner.preload import PreloadRequest, preload_values, shapes_of
from hvdtrain.learner.state_base import StateBase
from hvdtrain.learner.torch.freezing import Freezing
from hvdtrain.learner.torch.frozen_base import FrozenBase, describe_base, entry_of, fingerprint
from hvdtrain.learner.torch.model_file import file_format, place_of, read_file
from hvdtrain.learner.torch.optimizer_modes import OptimizerModes
from hvdtrain.learner.torch.optimizer_state import OptimizerOptions, check_state_shapes, missing_states, regroup
from hvdtrain.learner.torch.parameter_groups import names_by_group
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, members_of, name_of
from hvdtrain.learner.torch.sharded_optimizer import ShardedOptimizer
from hvdtrain.learner.torch.tensors import named_trained
from hvdtrain.learner.torch.update import Optimizer
from hvdtrain.learner.torch.writer_process import BackgroundWriter
from hvdtrain.learner.weight_average import WeightAverageBase

NAMES = "param_names"
"""An entry of the optimizer's file, as in RETURNN's: the names of the parameters, first those that the optimizer has, in its
order."""


@dataclass(frozen=True)
class Unsaved:
    """Parameters that the model's file does not have.

    Attributes:
        constants: the names of those that are neither saved nor loaded, as they always come from another model's file.
        base: frozen ones; None: these are saved.
        extra_models: by name, whole models that are neither trained nor saved.
    """

    constants: frozenset[str] = frozenset()
    base: FrozenBase | None = None
    extra_models: Mapping[str, torch.nn.Module] = field(default_factory=dict)


class TorchState(StateBase):
    """The state of a torch.nn.Module and its optimizer.

    Args:
        average: a moving average, or the optimizer's own weights for evaluations.
        model_format: of the model's file: "pt" or "safetensors".

    Attributes:
        freezing: freezes parameters until a step; None: none are.
        writer: writes copies in the background.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        average: WeightAverage | OptimizerModes | None,
        scale: LossScale | None,
        unsaved: Unsaved,
        model_format: str = "pt",
    ) -> None:
        super().__init__(file_format(device, model_format), average, scale)
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._constants = unsaved.constants
        self._base = base = unsaved.base
        self._extra_models = unsaved.extra_models
        self.freezing: Freezing | None = None
        self._unsaved = self._constants if base is None else self._constants | base.names
        self._trained = named_trained(model)
        first_names = {id(parameter): name for name, parameter in self._trained.items()}
        every_name = model.named_parameters(remove_duplicate=False)
        self._first_names = {name: first_names[id(one)] for name, one in every_name if id(one) in first_names}
        self._options = OptimizerOptions(optimizer)
        self._stored_names: Sequence[str] | None = None  # of the parameters in the checkpoint
        self.writer = BackgroundWriter()

    @property
    def base_hash(self) -> str | None:
        return None if self._base is None else str(self._base.entry["sha256"])

    def other_checksums(self) -> dict[str, str]:
        states = {name: model.state_dict() for name, model in self._extra_models.items()}
        return {
            name: fingerprint({key: value for key, value in state.items() if isinstance(value, torch.Tensor)})
            for name, state in states.items()
        }

    def check_base(self) -> None:
        if self._base is not None:
            self._base.check()

    def map_tensors(self, kind: Kind, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        tensors = self._kind_tensors(kind)
        with torch.no_grad():
            for tensor, new in zip(tensors, change(tensors), strict=True):
                if new is not tensor:
                    tensor.copy_(new)

    def has_tensors(self, kind: Kind) -> bool:
        return bool(self._kind_tensors(kind))

    def frozen_now(self) -> list[int]:
        return [] if self.freezing is None else self.freezing.frozen_now()

    def named_parameters(self) -> Iterator[tuple[str, Array]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach().to("cpu", torch.float32, copy=True).numpy()

    def trained_values(self) -> Iterator[tuple[str, Array]]:
        for name, parameter in self._trained.items():
            yield name, parameter.detach().to("cpu").to(torch.float64, copy=True).numpy()

    def gather_state(self) -> None:
        if isinstance(self._optimizer, ShardedOptimizer):
            with self._average.training_mode() if self._average is not None else nullcontext():
                self._optimizer.gather()
            if isinstance(self._average, OptimizerModes):
                self._average.gather(keep=self._optimizer.is_gathered)

    def snapshot(self, progress: Mapping[str, Any]) -> CheckpointContents:
        contents = super().snapshot(progress)
        model, optimizer = _copy((contents.model, contents.optimizer), {})
        return replace(contents, model=model, optimizer=optimizer)

    def copy_for_background(self, progress: Mapping[str, Any]) -> CheckpointContents:
        return self.writer.copy(super().snapshot(progress))

    def close(self) -> None:
        self.writer.close()

    def contents(self, progress: Mapping[str, Any]) -> CheckpointContents:
        self.check_base()
        contents = super().contents(progress)
        has_averages = TRAINED in contents.optimizer  # each under all names of its parameter
        aliases = {name: contents.model[first] for name, first in self._first_names.items() if has_averages}
        # The order of the optimizer's parameters, by which RETURNN finds their state; then those that are not trained.
        trained_names = [name for group in self._names_by_group() for name in group]
        names = dict.fromkeys([*trained_names, *(name for name, _ in self._model.named_parameters())])
        stored_names = [name for name in names if name not in self._unsaved]
        contents = self._with_base(contents)
        return replace(contents, model={**contents.model, **aliases}, optimizer={**contents.optimizer, NAMES: stored_names})

    def model_contents(self, progress: Mapping[str, Any]) -> CheckpointContents:
        return self._with_base(super().model_contents(progress))

    def _with_base(self, contents: CheckpointContents) -> CheckpointContents:
        """The contents, with the entry about the base model whose parameters are left out, if there is one."""
        of_base = {} if self._base is None else {BASE: self._base.entry}
        return replace(contents, progress={**contents.progress, **of_base})

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        self._stored_names = None
        stored = super().load(model_file, optimizer_file)
        self.check_base()
        return stored

    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        of_model = self._model.state_dict().items()  # with a base that is not saved, so that check_base notices
        ours, taken = preload({name: one for name, one in of_model if name not in self._constants}, self._device, request)
        if self._average is not None:
            self._average.adopt({self._first_names[name] for name in taken if name in self._first_names})
        return ours, taken

    def _model_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self._unsaved}

    def _left_out(self, stored: dict[str, Any], tensors: Mapping[str, torch.Tensor], file: Path) -> dict[str, torch.Tensor]:
        entry = stored.pop(BASE, None)
        missing = {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - tensors.keys() - self._constants
        if entry is None:
            if missing and self._base is not None:
                raise CheckpointError(
                    f"{file}: expected all parameters, or the hash of a base model, got neither "
                    f"{', '.join(sorted(missing)[:5])} nor that"
                )
            return {}
        own = self._model.state_dict()
        named = {name: parameter for name, parameter in self._model.named_parameters() if name in missing}
        found = fingerprint(named) if self._base is None else self._base.fingerprint_of(named)
        if not isinstance(entry, dict) or found != entry.get("sha256"):
            raise CheckpointError(
                f"{file}: expected the base model that its parameters were trained with ({describe_base(entry)}), got "
                f"{describe_base(entry_of(self._model, named))} from get_model (the file has trained parameters only, by "
                "save_parameters = 'trained': get_model has to return the same pretrained model in every start)"
            )
        return {name: own[name] for name in missing}

    def _set_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        own = self._model.state_dict()
        unsaved = {name: own[name] for name in self._unsaved}
        self._model.load_state_dict({**unsaved, **tensors, **{name: own[name] for name in self._constants}})

    def _kind_tensors(self, kind: Kind) -> list[torch.Tensor]:
        if kind == "parameters":
            tensors: list[torch.Tensor] = list(self._trained.values())
        elif kind == "frozen":
            trained = {id(parameter) for parameter in self._trained.values()}  # even if they are frozen for some time
            tensors = [parameter for parameter in self._model.parameters() if id(parameter) not in trained]
        else:
            tensors = [buffer for buffer in self._model.buffers() if buffer.is_floating_point() == (kind == "statistics")]
        return [tensor.detach() for tensor in tensors]

    def _set_kind(self, kind: Kind, stored: list[torch.Tensor]) -> None:
        names = range(len(stored))
        _check_same_shapes(dict(zip(names, self._kind_tensors(kind), strict=True)), dict(zip(names, stored, strict=True)))
        self.map_tensors(kind, lambda _: stored)

    def _set_trained(self, trained: Mapping[str, torch.Tensor]) -> None:
        _check_same_shapes(self._trained, trained)
        with torch.no_grad():
            for name, parameter in self._trained.items():
                parameter.copy_(trained[name])

    def _optimizer_name(self) -> str:
        return name_of(self._own_optimizer)

    def _optimizer_entries(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            OPTIMIZER_CLASS: self._optimizer_name(),
            OPTIONS: self._options.texts(),
        }

    def _numbered_parameters(self, entries: Mapping[str, Any]) -> dict[str, str]:
        own = [name for group in self._names_by_group() for name in group]
        return {str(number): name for number, name in enumerate(entries.get(NAMES, self._stored_names or own))}

    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        stored, own = entries["optimizer"], self._names_by_group()
        self._stored_names = entries.get(NAMES, self._stored_names)  # a rank's file has none
        if not isinstance(stored, dict) or not {"state", "param_groups"} <= stored.keys():  # a class of the user's own
            self._optimizer.load_state_dict(stored)
            return []
        texts = entries.get(OPTIONS)
        before = [option_texts(group) for group in stored["param_groups"]] if texts is None else texts
        sources = [[place] * len(names) for place, names in enumerate(own)]
        if self._stored_names is not None and all(name for group in own for name in group):
            stored, sources = regroup(stored, self._stored_names, own)
        lines = self._check_state(stored, own) if SHAPES not in entries else []
        of_each = [[before[source] if source < len(before) else {} for source in group] for group in sources]
        return [*lines, *self._options.load(stored, of_each, OPTIMIZER_CLASS in entries, own)]

    def _check_state(self, stored: Mapping[str, Any], own: Sequence[Sequence[str]]) -> list[str]:
        """What can be seen of the state in a file without shapes. Returns lines for the log. Raises: ValueError."""
        names = [name for group in own for name in group]
        made = [type(member) for member in members_of(self._own_optimizer)]
        if all(kind.__module__.startswith("torch.optim.") and kind.__name__ != "Adafactor" for kind in made):  # which keeps rows
            check_state_shapes(stored, names, self._trained)
        line = missing_states(stored, names)
        return [] if line is None else [line]

    @property
    def _own_optimizer(self) -> AnyOptimizer:
        """The config's optimizer; of a sharded one, this rank's share."""
        return self._optimizer.inner if isinstance(self._optimizer, ShardedOptimizer) else self._optimizer

    def _names_by_group(self) -> list[list[str]]:
        optimizer = self._optimizer
        whole = optimizer.whole_groups if isinstance(optimizer, ShardedOptimizer) else None
        return names_by_group(self._model, whole or [group["params"] for group in optimizer.param_groups])


class WeightAverage(WeightAverageBase):
    """The moving average of parameters."""

    def start(self, updates: int = 0) -> None:
        self._others = {name: parameter.detach().clone() for name, parameter in self._weights.items()}
        self.updates = updates

    def adopt(self, changed: Collection[str]) -> None:
        for name in self._others.keys() & changed:
            self._others[name].copy_(self._weights[name].detach())

    def _values(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in weights.items()}

    def _approach(self, share: float) -> None:
        torch._foreach_lerp_(list(self._others.values()), list(self._values(self._weights).values()), share)

    def _swap(self) -> None:  # copies nothing
        for name, parameter in self._weights.items():
            parameter.data, self._others[name] = self._others[name], parameter.data


def preload(ours: dict[str, torch.Tensor], device: torch.device, request: PreloadRequest) -> tuple[list[str], list[str]]:
    """Like `StateBase.preload`, into tensors by name that share their memory with a model's."""
    contents = read_file(request.file, device)
    entry = "model" if is_safetensors(request.file) else request.entry
    if entry is not None and isinstance(contents.get(entry), dict):
        contents = contents[entry]
    theirs = {name: tensor for name, tensor in contents.items() if isinstance(tensor, torch.Tensor)}
    values = preload_values(request, shapes_of(ours), theirs)
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value)
    return list(ours), list(values)


def _check_same_shapes(ours: Mapping[Any, torch.Tensor], stored: Mapping[Any, torch.Tensor]) -> None:
    """Whether stored tensors can be copied into the model's: copying would repeat smaller ones. Raises: ValueError."""
    for name, tensor in ours.items():
        if name not in stored:
            raise ValueError(f"there is none of {name}")
        if stored[name].shape != tensor.shape:
            raise ValueError(f"{name} has the shape {tuple(stored[name].shape)} instead of {tuple(tensor.shape)}")


def _copy(state: Any, copies: dict[Any, torch.Tensor]) -> Any:
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
        return {key: _copy(value, copies) for key, value in state.items()}
    return type(state)(_copy(value, copies) for value in state) if isinstance(state, (list, tuple)) else state
