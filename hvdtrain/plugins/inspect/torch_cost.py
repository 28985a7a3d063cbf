"""What a training step costs: its floating-point operations, its seconds, and what the device reaches with a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from hvdtrain.data.types import Batch
from hvdtrain.learner.base import Learner

SECONDS = 0.3
"""For how long something is measured."""

Shape = Sequence[int]


@dataclass(frozen=True)
class StepCost:
    """What a training step costs on this rank, without the exchange of gradients and the optimizer.

    Attributes:
        flops: the floating-point operations of forward and backward: those of matrix products, convolutions, attention and
            recurrent layers, a multiplication and an addition counting as two.
        seconds: how long they take.
        peak: the operations per second that the device reaches with a product of large matrices.
        dtype: the type of their numbers.
    """

    flops: int
    seconds: float
    peak: float
    dtype: str

    @property
    def share(self) -> float:
        """The share of the measured peak, from 0 to about 1."""
        return self.flops / self.seconds / self.peak


def _layer(factor: int) -> Callable[..., int]:
    """The operations of a recurrent layer of oneDNN, which PyTorch's counter does not know; of its backward, twice as many."""

    def count(inputs: Shape, from_input: Shape, from_state: Shape, *_: Any, **__: Any) -> int:
        return factor * prod(inputs[:2]) * (prod(from_input) + prod(from_state))

    return count


def _cudnn(factor: int) -> Callable[..., int]:
    """The same of cuDNN, for all layers at once."""

    def count(inputs: Shape, weights: Sequence[Shape], *_: Any, **__: Any) -> int:
        return factor * prod(inputs[:2]) * sum(prod(weight) for weight in weights if len(weight) == 2)

    return count


RECURRENT = {
    torch.ops.aten.mkldnn_rnn_layer: _layer(2),
    torch.ops.aten.mkldnn_rnn_layer_backward: _layer(4),
    torch.ops.aten._cudnn_rnn: _cudnn(2),
    torch.ops.aten._cudnn_rnn_backward: _cudnn(4),
}


def step_cost(learner: Learner, batch: Batch, autocast: str) -> StepCost:
    """Compute the gradients of a batch some times and drop them: count the operations, and measure.

    Args:
        autocast: the type in which matrices are multiplied, or float32: in that of the model.
    """
    device = next(iter(learner.model.parameters())).device
    dtype = torch.get_default_dtype() if autocast == "float32" else getattr(torch, autocast)
    with learner.trial(batch) as step:
        return measured_cost(step, device, dtype)


def measured_cost(step: Callable[[], None], device: torch.device, dtype: torch.dtype) -> StepCost:
    """As `step_cost`, of a function that computes gradients."""
    with FlopCounterMode(display=False, custom_mapping=RECURRENT) as counter:
        step()
    return StepCost(counter.get_total_flops(), _fastest(step, device), measured_peak(device, dtype), str(dtype).split(".")[-1])


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The floating-point operations per second of a product of large square matrices."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / _fastest(lambda: torch.mm(left, right), device)


def _fastest(work: Callable[[], object], device: torch.device) -> float:
    """The seconds of the fastest of several calls, after a first one."""
    seconds: list[float] = []
    until = time.perf_counter() + SECONDS
    while len(seconds) < 3 or time.perf_counter() < until:
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
