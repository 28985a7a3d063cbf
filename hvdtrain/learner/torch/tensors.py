"""Between numpy and PyTorch: batches as tensors, losses as sums and counts, outputs as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from hvdtrain.context import Loss
from hvdtrain.data.types import Array, Batch, Padded
from hvdtrain.learner.base import Layer
from hvdtrain.learner.marked import minimized, nothing_to_minimize
from hvdtrain.learner.seeds import widened

Factor = float | torch.Tensor
"""A number, or a scalar on the device."""


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def zeros(count: int, local_rank: int) -> torch.Tensor:
    """N float32 zeros, on this rank's GPU if there is one."""
    gpus = torch.cuda.device_count()
    return torch.zeros(count, device=f"cuda:{local_rank % gpus}" if gpus else "cpu")


def size(tensor: torch.Tensor) -> int:
    """A tensor's bytes."""
    return tensor.nbytes


def wait_for(tensor: torch.Tensor) -> None:
    """Wait until a tensor has been computed: on a GPU, operations return before they are done."""
    tensor.reshape(-1)[:1].tolist()


@dataclass
class TorchData:
    """One data key of a batch, as `train_step` gets it.

    Attributes:
        raw_tensor: shape (batch, time, ...), on the device. Strings remain a numpy array.
        seq_lens: int32 of shape (batch,), on the CPU.
        device_seq_lens: the same on the device, where it was copied together with the frames.
    """

    raw_tensor: Any
    seq_lens: torch.Tensor
    device_seq_lens: torch.Tensor

    @cached_property
    def mask(self) -> torch.Tensor:
        """True where a frame is not padding; shape (batch, time), on the device."""
        frames = torch.arange(self.raw_tensor.shape[1], device=self.raw_tensor.device)
        return frames[None, :] < self.device_seq_lens[:, None]


def tensors_of(batch: Batch) -> dict[str, TorchData]:
    """The batch's arrays as tensors on the CPU, without a copy, by data key. Strings remain numpy arrays."""
    return {key: _data_of(padded) for key, padded in batch.data.items()}


def _data_of(padded: Padded) -> TorchData:
    seq_lens = torch.from_numpy(padded.seq_lens)
    values = padded.values
    return TorchData(values if values.dtype == object else torch.from_numpy(widened(values)), seq_lens, seq_lens)


def numbers_of(losses: Mapping[str, Loss], device: torch.device) -> torch.Tensor:
    """The losses' sums, then their counts; float64 of shape (2 * losses,)."""
    sums = [_on(device, loss.value.detach().sum(dtype=torch.float64)) for loss in losses.values()]
    return torch.stack(sums + [count_of(loss, device) for loss in losses.values()])


def count_of(loss: Loss, device: torch.device) -> torch.Tensor:
    """The number of elements of a loss, as a float64 scalar that is made on the device."""
    if loss.count is None:
        return torch.full((), float(loss.value.numel()), dtype=torch.float64, device=device)
    return _on(device, torch.as_tensor(loss.count).detach().sum(dtype=torch.float64))


def _on(device: torch.device, scalar: torch.Tensor) -> torch.Tensor:
    """A float64 scalar on a device. One that is on the CPU is made there anew: copying it would wait for the device."""
    if scalar.device.type != "cpu" or device.type == "cpu":
        return scalar
    return torch.full((), scalar.item(), dtype=torch.float64, device=device)


def terms_of(losses: Mapping[str, Loss], scale: Factor) -> dict[str, torch.Tensor]:
    """The minimized losses: their sums, times their scales, times the scale of all losses."""
    return {name: _sum(loss.value) * (loss.scale * scale) for name, loss in minimized(losses).items()}


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, torch.Tensor], scale: Factor) -> torch.Tensor | None:
    """The scalar to differentiate; None if there are no losses, as on a rank without a batch.

    Args:
        divisors: of the normalized losses, by name.

    Raises:
        ConfigError: no loss depends on a parameter.
    """
    total: torch.Tensor | None = None
    for name, term in terms_of(losses, scale).items():
        if name in divisors:
            term = term / divisors[name].to(term.dtype)
        total = term if total is None else total + term
    if losses and (total is None or not total.requires_grad):
        raise nothing_to_minimize()
    return total


def array_of(value: Any) -> Array:
    """One sequence's output as an array; bfloat16, which numpy does not have, becomes float32."""
    if isinstance(value, torch.Tensor):
        return numpy.asarray((value.float() if value.dtype == torch.bfloat16 else value).cpu())
    return numpy.asarray(value, dtype=object) if isinstance(value, (str, list)) else numpy.asarray(value)


def _sum(values: torch.Tensor) -> torch.Tensor:
    return (values.float() if values.dtype in (torch.float16, torch.bfloat16) else values).sum()


def layers_of(model: torch.nn.Module) -> Iterator[Layer]:
    """The model and its modules, each with its own parameters; a shared one belongs to the first module that has it."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {short: one for short, one in module.named_parameters(recurse=False) if id(one) not in seen}
        seen.update(map(id, own.values()))
        shapes = {short: tuple(one.shape) for short, one in own.items()}
        yield Layer(name, type(module).__name__, shapes, frozenset(short for short, one in own.items() if one.requires_grad))


def shapes_in(value: Any) -> list[tuple[int, ...]]:
    """The shapes of the tensors in a value, and in its lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [tuple(value.shape)]
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [shape for member in members for shape in shapes_in(member)]
