"""Averages of parameter changes in 8, 4 or 2 bits, with error feedback (as in MuLoCo: Therien et al., 2025)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from hvdtrain.comm.base import Communicator, Op
from hvdtrain.learner.compression import GradientCompressor

PER_SCALE = 64
"""The number of elements with a common scale."""

OWN_ERRORS = "quantized.own."
SHARE_ERRORS = "quantized.share."
"""Prefixes of the kept tensors' names, before a message's name: what this rank has not sent yet of its own values, and of the
average of its share."""


@dataclass(frozen=True)
class Pending:
    """A message that is under way.

    Attributes:
        numbers: the numbers of the tensors that are sent in few bits.
        started: the handle of the shares.
        exact: the handle of the other tensors.
    """

    name: str
    op: Op
    tensors: list[torch.Tensor]
    numbers: list[int]
    started: Any
    exact: Any


class Quantized(GradientCompressor):
    """Sends float32 tensors in few bits, with a scale for each block of elements.

    Every rank sends each rank its share of all elements, sums up in float32 the shares that it receives, and sends the sum to all
    ranks, again in few bits. All ranks decode the same bytes, and so have the same results to the last bit. What rounding takes
    away is added to the next message, on both ways.

    Args:
        bits: of an element: 8, 4 or 2.
    """

    is_stateful = True
    prefixes = (OWN_ERRORS, SHARE_ERRORS)

    def __init__(self, comm: Communicator, bits: int) -> None:
        super().__init__(comm)
        self._bits = bits

    @property
    def needs_changes(self) -> bool:
        return self._comm.size > 1

    def describe(self) -> str:
        return f", sent in {self._bits} bits" if self._comm.size > 1 else ""

    def start(
        self, tensors: Sequence[torch.Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        is_narrow = [not exact and self._comm.size > 1 and tensor.dtype == torch.float32 for tensor in tensors]
        numbers = [number for number, narrow in enumerate(is_narrow) if narrow]
        if not numbers:
            return super().start(tensors, op, name=name, owners=owners, exact=exact)
        values = torch.cat([tensors[number].reshape(-1) for number in numbers])
        values = pad(values, (0, -len(values) % (self._comm.size * PER_SCALE))).view(self._comm.size, -1)
        encoded = self._encode(values, OWN_ERRORS + name)
        before = self._comm.sent
        started = self._comm.all_to_all(encoded, name=f"{name}.shares")
        self.sent += self._comm.sent - before
        rest = [tensor for tensor, narrow in zip(tensors, is_narrow, strict=True) if not narrow]
        exact_handle = super().start(rest, op, name=f"{name}.exact") if rest else None
        return Pending(name, op, list(tensors), numbers, started, exact_handle)

    def finish(self, handle: Any) -> list[torch.Tensor]:
        if not isinstance(handle, Pending):
            return super().finish(handle)
        [received] = self._comm.finish(handle.started)
        total = decode(received, self._bits).sum(0, keepdim=True)
        if handle.op == "average":
            total /= self._comm.size
        encoded = self._encode(total, SHARE_ERRORS + handle.name)
        [gathered] = self._comm.gather_rows([encoded], name=f"{handle.name}.totals", lengths=[1] * self._comm.size)
        reduced = list(handle.tensors)
        sizes = [handle.tensors[number].numel() for number in handle.numbers]
        pieces = torch.split(decode(gathered, self._bits).view(-1)[: sum(sizes)], sizes)
        for number, piece in zip(handle.numbers, pieces, strict=True):
            reduced[number] = piece.view(handle.tensors[number].shape)
        if handle.exact is not None:
            exact_tensors = iter(super().finish(handle.exact))
            reduced = [tensor if number in handle.numbers else next(exact_tensors) for number, tensor in enumerate(reduced)]
        return reduced

    def _encode(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Values in few bits, plus what an earlier message under this name did not contain; keep what this one does not."""
        errors = self._own.get(name, [])
        if [error.shape for error in errors] == [values.shape]:
            values = values + errors[0]
        encoded = encode(values, self._bits)
        # Values that are not finite end the training. No part of them may come back after it is resumed.
        self._own[name] = [(values - decode(encoded, self._bits)).nan_to_num(0.0, 0.0, 0.0)]
        return encoded


def encode(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of float32 values as rows of bytes: a code for each value, then a scale for each block. A block that is not finite
    remains so.

    Args:
        values: shape (rows, multiple of `PER_SCALE`).
    """
    blocks = values.view(len(values), -1, PER_SCALE)
    # With two bits, the largest element would make the levels too coarse for all others.
    scales = blocks.square().mean(2).sqrt() if bits == 2 else blocks.abs().amax(2) / (zero_code(bits) - 1)
    scales = scales.masked_fill(scales == 0, 1.0).unsqueeze(2)
    codes = (blocks / scales + zero_code(bits)).round().clamp(0, (1 << bits) - 1)
    # The scale with the smallest error for these codes.
    levels = codes - zero_code(bits)
    squares = levels.square().sum(2)
    scales = (blocks * levels).sum(2) / squares.masked_fill(squares == 0, 1.0)
    codes_by_byte = codes.to(torch.uint8).view(len(values), -1, 8 // bits)
    packed = torch.zeros_like(codes_by_byte[:, :, 0])
    for place in range(8 // bits):
        packed |= codes_by_byte[:, :, place] << (place * bits)
    return torch.cat([packed, scales.to(torch.bfloat16).view(torch.uint8)], 1)


def decode(encoded: torch.Tensor, bits: int) -> torch.Tensor:
    """Rows of float32 values from rows of bytes."""
    num_blocks = encoded.shape[1] // (PER_SCALE * bits // 8 + 2)
    packed, scales = torch.split(encoded, [num_blocks * PER_SCALE * bits // 8, 2 * num_blocks], 1)
    codes = [packed >> (place * bits) & ((1 << bits) - 1) for place in range(8 // bits)]
    levels = torch.stack(codes, 2).view(len(encoded), num_blocks, PER_SCALE).float() - zero_code(bits)
    values: torch.Tensor = levels * scales.contiguous().view(torch.bfloat16).float().unsqueeze(2)
    return values.view(len(encoded), -1)


def zero_code(bits: int) -> float:
    """The code of 0. With two bits it lies between two codes, as three levels would be too few."""
    return 1.5 if bits == 2 else float(1 << (bits - 1))
