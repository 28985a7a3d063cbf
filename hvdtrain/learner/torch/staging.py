"""Batches on their way to a GPU: the reading thread copies them into pinned memory, and the training thread starts their copy to
the device one batch ahead, on a stream of its own. So the copy runs while the device computes the step before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hvdtrain.data.types import Array, Batch, Padded
from hvdtrain.learner.torch.tensors import TorchData, tensors_of


@dataclass(frozen=True, kw_only=True)
class PinnedBatch(Batch):
    """A batch in memory from which the device copies by itself. `data` are the same arrays."""

    tensors: Mapping[str, TorchData]


@dataclass(frozen=True, kw_only=True)
class SentBatch(Batch):
    """A batch that is being copied to the device.

    Attributes:
        tensors: on the device.
        copied: recorded behind the copy.
    """

    tensors: Mapping[str, TorchData]
    copied: torch.cuda.Event


class CudaStaging:
    """`Staging` of data/feed.py for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, batch: Batch) -> PinnedBatch:
        tensors = {key: _pinned(one) for key, one in tensors_of(batch).items()}
        data = {  # not the arrays that were read: they would take the memory twice
            key: Padded(_values(one), one.seq_lens.numpy()) for key, one in tensors.items()
        }
        return PinnedBatch(data, batch.indices, batch.seq_tags, tensors=tensors)

    def send(self, batch: Batch) -> SentBatch:
        pinned = batch if isinstance(batch, PinnedBatch) else self.pin(batch)
        with torch.cuda.stream(self._stream):
            tensors = {key: _copied(one, self._device) for key, one in pinned.tensors.items()}
            copied = self._stream.record_event()
        return SentBatch(pinned.data, pinned.indices, pinned.seq_tags, tensors=tensors, copied=copied)


def await_copy(batch: Batch | None) -> None:
    """Let the kernels that follow wait for a batch's copy, if it was sent ahead. The caller does not wait."""
    if isinstance(batch, SentBatch):
        stream = torch.cuda.current_stream()
        stream.wait_event(batch.copied)
        for one in batch.tensors.values():
            for tensor in (one.raw_tensor, one.device_seq_lens):
                if isinstance(tensor, torch.Tensor):
                    tensor.record_stream(stream)  # so that its memory is not reused before these kernels are done


def extern_data_of(batch: Batch, device: torch.device) -> dict[str, TorchData]:
    """The tensors that `train_step` gets, by data key; `await_copy` comes first."""
    if isinstance(batch, SentBatch):
        return dict(batch.tensors)
    tensors = tensors_of(batch)
    if device.type == "cpu":
        return tensors
    return {key: _copied(_pinned(one), device) for key, one in tensors.items()}


def _pinned(one: TorchData) -> TorchData:
    values, seq_lens = one.raw_tensor, one.seq_lens.pin_memory()
    return TorchData(values.pin_memory() if isinstance(values, torch.Tensor) else values, seq_lens, seq_lens)


def _copied(one: TorchData, device: torch.device) -> TorchData:
    values, there = one.raw_tensor, one.seq_lens.to(device, non_blocking=True)
    return TorchData(values.to(device, non_blocking=True) if isinstance(values, torch.Tensor) else values, one.seq_lens, there)


def _values(one: TorchData) -> Array:
    return one.raw_tensor.numpy() if isinstance(one.raw_tensor, torch.Tensor) else one.raw_tensor
