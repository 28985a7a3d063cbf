"""A batch on its way onto PyTorch's device."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import torch

from hvdtrain.data.types import Batch
from hvdtrain.learner.numbers import widened


@dataclass
class TorchData:
    """One data key of a batch, as `train_step` gets it.

    Attributes:
        raw_tensor: on the device; (batch, time, ...). Strings stay a numpy array.
        seq_lens: int32 of shape (batch,), on the CPU.
    """

    raw_tensor: Any
    seq_lens: torch.Tensor

    @cached_property
    def mask(self) -> torch.Tensor:
        """True where a frame is not padding; shape (batch, time), on the device."""
        frames = torch.arange(self.raw_tensor.shape[1], device=self.raw_tensor.device)
        return frames[None, :] < self.seq_lens.to(self.raw_tensor.device, non_blocking=True)[:, None]


def extern_data_of(batch: Batch, device: torch.device) -> dict[str, TorchData]:
    """What `train_step` gets, by data key."""
    return {key: _to_device(padded.values, padded.seq_lens, device) for key, padded in batch.data.items()}


def _to_device(values: numpy.ndarray[Any, Any], seq_lens: numpy.ndarray[Any, Any], device: torch.device) -> TorchData:
    if values.dtype == object:
        return TorchData(values, torch.from_numpy(seq_lens))
    tensor = torch.from_numpy(widened(values))
    if device.type == "cuda":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return TorchData(tensor, torch.from_numpy(seq_lens))
