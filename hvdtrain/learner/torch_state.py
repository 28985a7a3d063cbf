"""A PyTorch model's and its optimizer's tensors, on their way into files, out of them, and to other ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from hvdtrain.errors import CheckpointError
from hvdtrain.learner.base import Chosen, Kind, Make, Part, Shapes, check_made
from hvdtrain.learner.torch_sharded import ShardedOptimizer
from hvdtrain.learner.torch_update import Optimizer


class TorchState:
    """Does what the learner's contract (`learner/base.py`) says of the methods of the same names.

    Args:
        constants: names of parameters that are neither saved nor loaded, as they always come from another model's file.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: Optimizer, device: torch.device, constants: frozenset[str] = frozenset()
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._device = device
        self._constants = constants
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def map_tensors(self, kind: Kind, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        tensors = [tensor.detach() for tensor in self._tensors(kind)]
        with torch.no_grad():
            for tensor, new in zip(tensors, change(tensors), strict=True):
                if new is not tensor:
                    tensor.copy_(new)

    def gather_state(self) -> None:
        if isinstance(self._optimizer, ShardedOptimizer):
            self._optimizer.gather()

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], state: Any | None = None) -> None:
        names = [name for name, _ in self._model.named_parameters() if name not in self._constants]
        model, optimizer = (self._saved(), self._optimizer.state_dict()) if state is None else state
        torch.save({"optimizer": optimizer, "param_names": names, **progress}, optimizer_file)
        torch.save({"model": model, **progress}, model_file)

    def copied(self) -> tuple[Any, Any]:
        return _copied(self._saved()), _copied(self._optimizer.state_dict())

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        stored = _load(model_file, self._device)
        try:
            own = self._model.state_dict()
            self._model.load_state_dict(stored.pop("model") | {name: own[name] for name in self._constants})
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{model_file}: expected the parameters of this config's model, got others: {error}") from None
        if optimizer_file is not None:
            self._load_optimizer(_load(optimizer_file, self._device).get("optimizer"), optimizer_file)
        return stored

    def preload(
        self, file: Path, entry: str | None, chosen: Callable[[Shapes, Shapes], Chosen], make: Make | None
    ) -> tuple[list[str], list[str]]:
        return preload(self._saved(), self._device, file, entry, chosen, make)

    def save_own(self, file: Path, parts: Sequence[Part]) -> None:
        own: dict[str, Any] = {}
        for part in parts:
            if part != "optimizer":
                own[part] = [tensor.detach() for tensor in self._tensors(part)]
        if "optimizer" in parts:
            own["optimizer"] = self._optimizer.state_dict()
        torch.save(own, file)

    def load_own(self, file: Path) -> None:
        own = _load(file, self._device)
        self._load_optimizer(own.pop("optimizer", None), file)
        for kind, stored in own.items():
            self.map_tensors(kind, lambda _, stored=stored: stored)  # type: ignore[arg-type, misc]

    def _saved(self) -> dict[str, torch.Tensor]:
        """The model's tensors that a checkpoint holds."""
        return {name: tensor for name, tensor in self._model.state_dict().items() if name not in self._constants}

    def _load_optimizer(self, state: dict[str, Any] | None, file: Path) -> None:
        if state is None:
            return
        try:
            self._optimizer.load_state_dict(state)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{file}: expected the state of this config's optimizer, got another: {error}") from None

    def _tensors(self, kind: Kind) -> list[torch.Tensor]:
        if kind == "parameters":
            return list(self._trained)
        if kind == "frozen":
            return [parameter for parameter in self._model.parameters() if not parameter.requires_grad]
        floating = kind == "statistics"
        return [buffer for buffer in self._model.buffers() if buffer.is_floating_point() == floating]


def preload(
    ours: dict[str, torch.Tensor],
    device: torch.device,
    file: Path,
    entry: str | None,
    chosen: Callable[[Shapes, Shapes], Chosen],
    make: Make | None,
) -> tuple[list[str], list[str]]:
    """As a learner's `preload`, into tensors by name that share their memory with a model's."""
    contents = _load(file, device)
    if entry is not None and isinstance(contents.get(entry), dict):
        contents = contents[entry]
    theirs = {name: tensor for name, tensor in contents.items() if isinstance(tensor, torch.Tensor)}
    wanted = chosen(_shapes(ours), _shapes(theirs))
    values = {name: theirs[other] for name, other in wanted.found.items()}
    if make is not None:
        state = {name: theirs[other] for name, other in wanted.here.items()}
        for name in sorted(ours.keys() - values.keys()):
            made = make(name, tuple(ours[name].shape), state)
            if made is not None:
                check_made(name, tuple(ours[name].shape), tuple(made.shape))
                values[name] = made
    with torch.no_grad():
        for name, value in values.items():
            ours[name].copy_(value)
    return list(ours), list(values)


def _copied(state: Any) -> Any:
    """A state dict with copies of its tensors, on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, (list, tuple)) else state


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    """A checkpoint's contents; no code in it is run (`weights_only`)."""
    try:
        contents = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:
        raise CheckpointError(f"{path}: expected a whole checkpoint, got one that cannot be read: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: expected a checkpoint of hvdtrain, got a {type(contents).__name__}")
    return contents
