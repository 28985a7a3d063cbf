"""The meter of a PyTorch learner."""

from __future__ import annotations

from itertools import chain

import torch

from hvdtrain.learner.meter import MAX_PENDING, Meter, Transfer
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.torch.assembly import Splitter
from hvdtrain.learner.torch.device import AsyncCopy, CudaClock, peak_memory
from hvdtrain.learner.torch.state import TorchState
from hvdtrain.learner.torch.update import Update
from hvdtrain.runtime.timer import CpuClock


def open_meter(state: TorchState, device: torch.device, check: GradientCheck, update: Update, splitter: Splitter | None) -> Meter:
    on_cpu = device.type == "cpu"

    def read(copies: list[AsyncCopy]) -> list[float]:
        return torch.cat([copy.values() for copy in copies]).tolist()

    from_gpu = Transfer(read, AsyncCopy, AsyncCopy.has_arrived, MAX_PENDING)
    transfer = Transfer(lambda lists: list(chain.from_iterable(lists))) if on_cpu else from_gpu
    return Meter(
        transfer,
        state.named_parameters,
        CpuClock() if on_cpu else CudaClock(),
        check,
        peak_memory=lambda: peak_memory(device),
        gradient_norm=update.gradient_norm,
        take_splits=(lambda: 0) if splitter is None else splitter.take,
    )
