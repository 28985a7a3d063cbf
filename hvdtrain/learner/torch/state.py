"""A PyTorch model's and its optimizer's tensors, as checkpoints and other ranks take them; and the moving average of the
weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from hvdtrain.data.types import Array
from hvdtrain.learner.contents import BASE, OPTIMIZER_CLASS, OPTIONS, SHAPES, TRAINED, CheckpointContents, Reader
from hvdtrain.learner.model_format import is_safetensors
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.optimizer import option_texts
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.preload import PreloadRequest, preload_values, shapes_of
from hvdtrain.learner.state_base import StateBase
from hvdtrain.learner.torch.assembly import Base, DividedOptimizer, Freezing, Optimizer
from hvdtrain.learner.torch.model_file import file_format, place_of, read_file
from hvdtrain.learner.torch.optimizer_state import OptimizerOptions, check_state_shapes, missing_states, regroup
from hvdtrain.learner.torch.parameter_groups import names_by_group
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, members_of, name_of
from hvdtrain.learner.torch.tensors import named_trained
from hvdtrain.learner.torch.trees import change_leaves, without_numpy
from hvdtrain.learner.weight_average import EvaluationWeights, WeightAverageBase
from hvdtrain.runtime import log

NAMES = "param_names"
"""An entry of the optimizer's file, as in RETURNN's: the names of the parameters, first those that the optimizer has, in its
order."""


HALVES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Unsaved:
    """Parameters that the model's file does not have.

    Attributes:
        constants: the names of those that are neither saved nor loaded, as they always come from another model's file.
        base: frozen ones; None: all of these are saved.
        extra_models: by name, whole models that are neither trained nor saved.
    """

    constants: frozenset[str] = frozenset()
    base: Base | None = None
    extra_models: Mapping[str, torch.nn.Module] = field(default_factory=dict)


class TorchState(StateBase):
    """The state of a torch.nn.Module and its optimizer.

    Args:
        average: a moving average, or the optimizer's own weights for evaluations.
        model_format: of the model's file: "pt" or "safetensors".

    Attributes:
        freezing: freezes parameters until a step; None: none are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizer,
        device: torch.device,
        average: EvaluationWeights | None,
        check: GradientCheck | None,
        unsaved: Unsaved,
        model_format: str = "pt",
    ) -> None:
        super().__init__(file_format(device, model_format), average, check)
        separate_elements(model)
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
        self._first_names = {name: first_names[id(tensor)] for name, tensor in every_name if id(tensor) in first_names}
        self._options = OptimizerOptions(optimizer)
        self._stored_names: Sequence[str] | None = None  # of the parameters in the checkpoint
        self._shapes: dict[str, tuple[int, ...]] | None = self._saved_shapes()  # None: the log has it that they changed

    @property
    def base_hash(self) -> str | None:
        return None if self._base is None or self._base.entry is None else str(self._base.entry["sha256"])

    def other_checksums(self) -> dict[str, str]:
        return {name: self._checksum(model.state_dict()) for name, model in self._extra_models.items()}

    def _checksum(self, state: Mapping[str, Any]) -> str:
        tensors = {name: tensor for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
        digest = sha256(repr([(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]).encode())
        for bits in self._bits(list(tensors.values())):
            digest.update(bits)
        return digest.hexdigest()

    def check_base(self) -> None:
        if self._base is not None:
            self._base.check()

    def tensors(self, role: Role) -> dict[str, torch.Tensor]:
        named: dict[str, torch.Tensor] = {}
        if role == "parameters":
            named.update(self._trained)
        elif role == "frozen":
            trained = {id(parameter) for parameter in self._trained.values()}  # even if they are frozen for some time
            named.update((name, tensor) for name, tensor in self._model.named_parameters() if id(tensor) not in trained)
        else:
            are_whole = role == "counters"
            named.update((name, tensor) for name, tensor in saved_buffers(self._model) if is_whole(tensor) == are_whole)
        return {name: tensor.detach() for name, tensor in named.items()}

    def frozen_now(self) -> list[int]:
        return [] if self.freezing is None else self.freezing.frozen_now()

    def gather_state(self) -> None:
        if isinstance(self._optimizer, DividedOptimizer):
            self._optimizer.gather()
            if self._average is not None:
                self._average.gather(keep=self._optimizer.is_gathered)

    def copied(self, contents: CheckpointContents) -> CheckpointContents:
        contents = super().copied(contents)
        return _copied(contents) if self.saver is None else self.saver.copy(contents)

    def contents(self, progress: Mapping[str, Any], *, model_only: bool = False) -> CheckpointContents:
        self._tell_changes()
        of_base = {} if self._base is None or self._base.entry is None else {BASE: self._base.entry}
        contents = super().contents({**progress, **of_base}, model_only=model_only)
        if model_only:
            return contents
        self.check_base()
        has_averages = TRAINED in contents.optimizer  # each under all names of its parameter
        aliases = {name: contents.model[first] for name, first in self._first_names.items() if has_averages}
        # The order of the optimizer's parameters, by which RETURNN finds their state; then those that are not trained.
        trained_names = [name for group in self._names_by_group() for name in group]
        names = dict.fromkeys([*trained_names, *(name for name, _ in self._model.named_parameters())])
        stored_names = [name for name in names if name not in self._unsaved]
        return replace(contents, model={**contents.model, **aliases}, optimizer={**contents.optimizer, NAMES: stored_names})

    def _saved_shapes(self) -> dict[str, tuple[int, ...]]:
        return shapes_of({name: tensor for name, tensor in self.model_tensors().items() if isinstance(tensor, torch.Tensor)})

    def _tell_changes(self) -> None:
        """Warn once if the model's tensors are no longer those to which the next start will load them."""
        before, now = self._shapes, self._saved_shapes()
        if before is None or before == now:
            return
        self._shapes = None
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        changes = [f"{name}: {before.get(name, 'none')} became {now.get(name, 'none')}" for name in names[:5]]
        more = f", and {len(names) - 5} more" if len(names) > 5 else ""
        log.warning(
            f"get_model: expected tensors that stay as it returns them, got other shapes: {', '.join(changes)}{more} (the next "
            "start refuses this checkpoint, unless the module has a method that loads it: let get_model make them as they "
            "will be, or register a buffer with persistent=False)"
        )

    def load(
        self, model_file: Path, optimizer_file: Path | None, read: Reader | None = None, with_optimizer: bool = False
    ) -> dict[str, Any]:
        self._stored_names = None
        stored = super().load(model_file, optimizer_file, read, with_optimizer)
        self.check_base()
        self._shapes = self._saved_shapes()
        return stored

    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        of_model = self._model.state_dict().items()  # with a base that is not saved, so that check_base notices
        ours, loaded = preload({name: tensor for name, tensor in of_model if name not in self._constants}, self._device, request)
        if self._average is not None:
            self._average.adopt({self._first_names[name] for name in loaded if name in self._first_names})
        return ours, loaded

    def model_tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self._unsaved}

    def _left_out(self, stored: dict[str, Any], tensors: Mapping[str, torch.Tensor], file: Path) -> Mapping[str, torch.Tensor]:
        return {} if self._base is None else self._base.left_out(stored, tensors, file)

    def set_model(self, tensors: Mapping[str, torch.Tensor]) -> None:
        present = self._model.state_dict()
        unsaved = {name: present[name] for name in self._unsaved}
        self._model.load_state_dict({**unsaved, **tensors, **{name: present[name] for name in self._constants}})

    @torch.no_grad()
    def set_tensors(self, role: Role, values: Mapping[str, torch.Tensor]) -> None:
        tensors = self.tensors(role)
        for name, value in values.items():
            if value.data_ptr() != tensors[name].data_ptr():  # else another rank's values are in it already
                tensors[name].copy_(value)

    def _by_name(self, role: Role, stored: Any) -> Mapping[str, torch.Tensor]:
        if isinstance(stored, Mapping):
            return stored
        names = list(self.tensors(role))  # until hvdtrain 1.1, a list, which had the buffers that the model does not save, too
        if role in ("statistics", "counters"):
            buffers = self._model.named_buffers()
            names = [name for name, buffer in buffers if buffer.is_floating_point() == (role == "statistics")]
        return dict(zip(names, stored, strict=True))

    def sums(self, role: Role) -> list[int]:
        tensors = self.tensors(role).values()
        of_each = [_as_integers(tensor).sum(dtype=torch.int64) for tensor in tensors]
        sums = torch.stack([value.to(of_each[0].device) for value in of_each]).tolist() if of_each else []  # waits for a GPU once
        return [value % (1 << 64) for value in sums]

    def _bits(self, tensors: Sequence[torch.Tensor]) -> Iterator[memoryview]:
        flat = [tensor.contiguous().flatten().view(torch.uint8) for tensor in tensors]
        together = torch.cat(flat).cpu() if flat else torch.empty(0)  # one copy from a GPU, where each one waits
        return (piece.numpy().data for piece in torch.split(together, [len(tensor) for tensor in flat]))

    def wide(self, tensor: torch.Tensor) -> Array:
        wide: Array = tensor.to("cpu").to(torch.complex128 if tensor.is_complex() else torch.float64, copy=True).numpy()
        return wide

    def _optimizer_name(self) -> str:
        return name_of(self._own_optimizer)

    def _optimizer_entries(self) -> dict[str, Any]:
        return {
            "optimizer": without_numpy(self._optimizer.state_dict()),
            OPTIMIZER_CLASS: self._optimizer_name(),
            OPTIONS: self._options.texts(),
        }

    def _numbered_parameters(self, entries: Mapping[str, Any]) -> dict[str, str]:
        names = [name for group in self._names_by_group() for name in group]
        return {str(number): name for number, name in enumerate(entries.get(NAMES, self._stored_names or names))}

    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        stored = entries["optimizer"]
        groups = self._names_by_group()
        self._stored_names = entries.get(NAMES, self._stored_names)  # a rank's file has none
        if not isinstance(stored, dict) or not {"state", "param_groups"} <= stored.keys():  # a class of the user's own
            self._optimizer.load_state_dict(stored)
            return []
        texts = entries.get(OPTIONS)
        before = [option_texts(group) for group in stored["param_groups"]] if texts is None else texts
        sources = [[number] * len(names) for number, names in enumerate(groups)]
        if self._stored_names is not None and all(name for names in groups for name in names):
            stored, sources = regroup(stored, self._stored_names, groups)
        lines = self._check_state(stored, groups) if SHAPES not in entries else []
        of_each = [[before[source] if source < len(before) else {} for source in group] for group in sources]
        return [*lines, *self._options.load(stored, of_each, OPTIMIZER_CLASS in entries, groups)]

    def _check_state(self, stored: Mapping[str, Any], groups: Sequence[Sequence[str]]) -> list[str]:
        """What can be seen of the state in a file without shapes. Returns lines for the log. Raises: ValueError."""
        names = [name for names in groups for name in names]
        kinds = [type(member) for member in members_of(self._own_optimizer)]
        if all(kind.__module__.startswith("torch.optim.") and kind.__name__ != "Adafactor" for kind in kinds):  # which keeps rows
            check_state_shapes(stored, names, self._trained)
        line = missing_states(stored, names)
        return [] if line is None else [line]

    @property
    def _own_optimizer(self) -> AnyOptimizer:
        """The config's optimizer; of a sharded one, this rank's share."""
        return self._optimizer.inner if isinstance(self._optimizer, DividedOptimizer) else self._optimizer

    def _names_by_group(self) -> list[list[str]]:
        optimizer = self._optimizer
        whole_groups = optimizer.whole_groups if isinstance(optimizer, DividedOptimizer) else None
        return names_by_group(self._model, whole_groups or [group["params"] for group in optimizer.param_groups])


def _copied(contents: CheckpointContents) -> CheckpointContents:
    """Contents with copies of the tensors, each place in memory once."""
    copies: dict[Any, torch.Tensor] = {}

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        memory = place_of(leaf)
        if memory not in copies:
            copies[memory] = leaf.detach().to("cpu", copy=True)
        return copies[memory]

    return replace(contents, model=change_leaves(contents.model, copy), optimizer=change_leaves(contents.optimizer, copy))


class WeightAverage(WeightAverageBase):
    """The moving average of parameters."""

    def _wide(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to(torch.float32 if weight.dtype in HALVES else weight.dtype, copy=True)

    def restore(self, exact: Mapping[str, torch.Tensor]) -> None:
        for name, values in exact.items():
            self._averages[name].copy_(values)

    def _values(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().to(self._weights[name].dtype) for name, tensor in weights.items()}

    def _approach(self, share: float) -> None:
        alike = [name for name, average in self._averages.items() if average.dtype == self._weights[name].dtype]
        values = self._values(self._weights)
        torch._foreach_lerp_([self._averages[name] for name in alike], [values[name] for name in alike], share)
        for name, average in self.exact().items():
            average.lerp_(values[name].to(average.dtype), share)

    def _exchange(self, weights: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        before = {}  # which copies nothing, unless types differ
        values = self._values(weights)
        for name, parameter in self._weights.items():
            before[name], parameter.data = parameter.data, values[name]
        return before


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


def saved_buffers(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that a model saves, by name, a shared one by its first name."""
    apart = {
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    return ((name, buffer) for name, buffer in model.named_buffers() if name not in apart)


def separate_elements(model: torch.nn.Module) -> None:
    """Give each element of a saved buffer its own memory. Nothing can be written to one that `expand` made: neither the values of
    a checkpoint nor those of other ranks."""
    copies: dict[int, torch.Tensor] = {}
    for _, buffer in saved_buffers(model):
        strides = buffer.stride() if buffer.layout == torch.strided else buffer.shape
        if any(size > 1 and not stride for size, stride in zip(buffer.shape, strides, strict=True)):
            copies[id(buffer)] = buffer.clone(memory_format=torch.contiguous_format)
    for module in model.modules():
        for name, value in list(module._buffers.items()):
            if id(value) in copies:  # the dict of a scripted module has no `update`
                module._buffers[name] = copies[id(value)]


def is_whole(tensor: torch.Tensor) -> bool:
    """Whether a tensor has integers or truth values, which have no mean."""
    return not (tensor.is_floating_point() or tensor.is_complex())


INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits, in integers of 64 where possible: they are added up four times as fast as those of 32."""
    real = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).contiguous().flatten()
    if real.numel() * real.element_size() % 8:
        return real.view(INTEGERS[real.element_size()])
    is_aligned = real.storage_offset() * real.element_size() % 8 == 0
    return (real if is_aligned else real.clone()).view(torch.int64)
