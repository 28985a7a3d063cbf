"""Files with a PyTorch model: PyTorch's own, and safetensors."""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import is_zipfile

import numpy
import torch

from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DamagedCheckpoint
from hvdtrain.learner.contents import FileFormat
from hvdtrain.learner.integrity import write_checksum
from hvdtrain.learner.model_format import (
    FORMAT,
    PROGRESS,
    SAFETENSORS,
    atomic_write,
    header,
    is_safetensors,
    progress_of,
    unreadable,
    verified_read,
)


def check_storable(model: torch.nn.Module, model_format: str) -> None:
    """Raises: ConfigError, if a file of this format cannot hold the model's state."""
    not_dense = [
        name
        for name, value in model.state_dict().items()
        if not (isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_quantized)
    ]
    if model_format == SAFETENSORS and not_dense:
        raise ConfigError.of(
            "unsupported",
            "checkpoint_format: expected 'pt' for a model whose state_dict has more than dense tensors, got 'safetensors' "
            f"with {', '.join(not_dense[:5])}",
        )
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor) and not _can_be_read(value):
            raise ConfigError.of(
                "unsupported",
                "get_model: expected a model whose state_dict consists of tensors and plain values, as a checkpoint with others "
                f"cannot be loaded, got {name} of type {type(value).__module__}.{type(value).__qualname__} (get_extra_state may "
                "return what torch.load reads with weights_only=True)",
            )


def _can_be_read(value: object) -> bool:
    """Whether PyTorch writes a value to a file and reads it again, without running code from there."""
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # of any kind: the value's own code is called
        return False
    return True


def file_format(device: torch.device, model_format: str) -> FileFormat:
    """PyTorch's files.

    Args:
        device: where tensors are read to.
        model_format: the format of the model's file: "pt" or "safetensors".
    """
    write = partial(write_model, model_format=model_format)
    read = partial(read_file, device=device)
    return FileFormat(write, write_file, partial(_read_contents, device=device), read)


def write_model(path: Path, model: Mapping[str, torch.Tensor], progress: Mapping[str, Any], model_format: str) -> None:
    """Write a model's tensors by name, and the progress. Raises: OSError, RuntimeError, if the disk is full."""
    if model_format == SAFETENSORS:
        _write_safetensors(path, model, progress)
    else:
        write_file(path, {"model": model, **progress})


def read_progress(path: Path) -> dict[str, Any]:
    """The plain values in a model's file, without reading its tensors or checking them. Raises: CheckpointError."""
    with unreadable(path):
        if is_safetensors(path):
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return progress_of(file.metadata())
        contents = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
    return {name: value for name, value in contents.items() if name != "model"} if isinstance(contents, dict) else {}


def read_model(path: Path) -> dict[str, Any]:
    """A model's file: the progress, and the tensors by name under "model", on the CPU. Raises: CheckpointError."""
    contents = _read_contents(path, torch.device("cpu"))
    if not isinstance(contents.get("model"), dict):
        raise DamagedCheckpoint(f"{path}: expected a model's file, got one without the entry 'model'")
    return contents


def widen(tensor: torch.Tensor) -> Array | None:
    """The values as float64 or complex128; None if they are integers or booleans, or not a tensor at all."""
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return None
    wide: Array = tensor.detach().to(torch.complex128 if tensor.is_complex() else torch.float64).numpy()
    return wide


def narrow(values: Array, like: torch.Tensor) -> torch.Tensor:
    """Values of `widen` in the type of another tensor."""
    return torch.from_numpy(numpy.asarray(values, order="C")).to(like.dtype)


def write_file(path: Path, contents: Mapping[str, Any]) -> None:
    """Write a PyTorch file with a checksum. Raises: OSError, RuntimeError, if the disk is full."""
    torch.save(dict(contents), path)
    write_checksum(path)


def _write_safetensors(path: Path, model: Mapping[str, torch.Tensor], progress: Mapping[str, Any]) -> None:
    """Store each tensor once; the header lists the names of tensors that share its memory."""
    from safetensors.torch import save_file

    metadata = header("pt", progress)
    names: dict[Any, str] = {}
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.items():
        first = names.setdefault(place_of(tensor), name) if tensor.numel() and name not in (FORMAT, PROGRESS) else name
        if first == name:
            stored[name] = tensor.detach()
        else:
            metadata[name] = first
    in_storage = Counter(tensor.untyped_storage().data_ptr() for tensor in stored.values())
    for name, tensor in stored.items():  # the format supports neither strides nor overlapping tensors
        alone = in_storage[tensor.untyped_storage().data_ptr()] == 1
        stored[name] = tensor.contiguous() if alone else tensor.clone(memory_format=torch.contiguous_format)
    with atomic_write(path) as unfinished:
        save_file(stored, unfinished, metadata)


def place_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    """The place of a tensor's numbers in memory, equal for two tensors that are views of the same numbers."""
    if not isinstance(tensor, torch.Tensor):  # the extra state of a module
        return (id(tensor),)
    where = tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset()
    return (*where, tensor.dtype, tuple(tensor.shape), tensor.stride())


def read_file(path: Path, device: torch.device) -> dict[str, Any]:
    """A file's contents, those of a safetensors file under `model`. Runs no code from the file. Raises: CheckpointError."""
    with verified_read(path):
        if is_safetensors(path):
            return _read_safetensors(path, device)
        contents = torch.load(path, map_location=device, weights_only=True)
    if not isinstance(contents, dict):
        raise DamagedCheckpoint(f"{path}: expected a checkpoint of hvdtrain, got a {type(contents).__name__}")
    return contents


def _read_contents(path: Path, device: torch.device) -> dict[str, Any]:
    """A model's file, or one of `torch.save(model.state_dict(), path)`. Raises: CheckpointError."""
    contents = read_file(path, device)
    is_state_dict = contents and all(isinstance(value, torch.Tensor) for value in contents.values())
    return {"model": contents} if is_state_dict else contents


def _read_safetensors(path: Path, device: torch.device) -> dict[str, Any]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device=str(device)) as file:
        model = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not a dict
        metadata = file.metadata() or {}
    shared = {name: model[first] for name, first in metadata.items() if first in model and name not in model}
    return {"model": model | shared, **progress_of(metadata)}
