"""Gradients as products of thin matrices, with error feedback (PowerSGD: Vogels et al., 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.comm.base import Communicator, Op
from hvdtrain.learner.compression import GradientCompressor

ERRORS, FACTORS = "power_sgd.error.", "power_sgd.factor."
"""Prefixes of the kept tensors' names, before a message's name: errors not sent yet, and the right factors of the last update."""


@dataclass(frozen=True)
class Pending:
    """A message that is under way.

    Attributes:
        matrices: this rank's matrices to reduce, by the number of the tensor; shape (rows, columns).
        factors: the right factors they were multiplied by; shape (columns, rank).
        others: the numbers of the tensors that are sent as they are.
        started: the handle of the left factors and the other tensors.
    """

    name: str
    op: Op
    tensors: list[torch.Tensor]
    matrices: dict[int, torch.Tensor]
    factors: list[torch.Tensor]
    others: list[int]
    started: Any


class PowerSGD(GradientCompressor):
    """Sends a gradient of shape (rows, ...) as factors of shape (rows, rank) and (columns, rank), if that halves its size.

    Sum and average over the ranks are linear in both factors, so all ranks get the same product, computed from the same numbers.
    The error of a rank's approximation is added to its next gradient.

    Args:
        rank: of the product.
    """

    is_stateful = True
    prefixes = (ERRORS, FACTORS)

    def __init__(self, comm: Communicator, rank: int) -> None:
        super().__init__(comm)
        self._rank = rank

    def describe(self) -> str:
        return f", sent in factors of rank {self._rank}" if self._comm.size > 1 else ""

    def start(
        self, tensors: Sequence[torch.Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        numbers = (
            [] if exact or self._comm.size == 1 else [number for number, one in enumerate(tensors) if self._is_worthwhile(one)]
        )
        if not numbers:
            return super().start(tensors, op, name=name, owners=owners, exact=exact)
        flat = [tensors[number].reshape(len(tensors[number]), -1) for number in numbers]
        errors, factors = self._memory(name, flat)
        matrices = [one + error for one, error in zip(flat, errors, strict=True)]
        others = [number for number in range(len(tensors)) if number not in numbers]
        left = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        started = self._send([*left, *(tensors[number] for number in others)], op, name=name)
        return Pending(name, op, list(tensors), dict(zip(numbers, matrices, strict=True)), factors, others, started)

    def finish(self, handle: Any) -> list[torch.Tensor]:
        if not isinstance(handle, Pending):
            return super().finish(handle)
        arrived = self._comm.finish(handle.started)
        reduced = list(handle.tensors)
        for number, tensor in zip(handle.others, arrived[len(handle.matrices) :], strict=True):
            reduced[number] = tensor
        left = [torch.linalg.qr(one).Q for one in arrived[: len(handle.matrices)]]
        matrices = list(handle.matrices.values())
        right = [matrix.T @ one for matrix, one in zip(matrices, left, strict=True)]
        # A non-finite update is not applied, so no part of it may come back later.
        pairs = zip(matrices, left, right, strict=True)
        self._own[ERRORS + handle.name] = [(matrix - one @ other.T).nan_to_num(0.0, 0.0, 0.0) for matrix, one, other in pairs]
        totals = self._comm.finish(self._send(right, handle.op, name=f"{handle.name}.right"))
        self._shared[FACTORS + handle.name] = [
            torch.where(total.isfinite().all(), total, before) for total, before in zip(totals, handle.factors, strict=True)
        ]
        for number, one, total in zip(handle.matrices, left, totals, strict=True):
            reduced[number] = (one @ total.T).reshape(handle.tensors[number].shape)
        return reduced

    def _is_worthwhile(self, tensor: torch.Tensor) -> bool:
        """Whether the factors are at most half as large. Tensors that have to be exact are not float32."""
        if tensor.dtype != torch.float32 or tensor.dim() < 2:
            return False
        rows = len(tensor)
        return 2 * self._rank * (rows + tensor.numel() // max(1, rows)) <= tensor.numel()

    def _memory(self, name: str, matrices: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The errors and the right factors of the last update; before the first update, zeros and random numbers."""
        errors, factors = self._own.get(ERRORS + name, []), self._shared.get(FACTORS + name, [])
        if [one.shape for one in errors] != [one.shape for one in matrices]:
            errors = [torch.zeros_like(one) for one in matrices]
        shapes = [(one.shape[1], self._rank) for one in matrices]
        if [tuple(one.shape) for one in factors] != shapes:
            empty = [one.new_empty(shape) for one, shape in zip(matrices, shapes, strict=True)]
            factors = [_initial_factor(f"{name}.{place}", one) for place, one in enumerate(empty)]
        return errors, factors


def _initial_factor(name: str, like: torch.Tensor) -> torch.Tensor:
    """An initial right factor, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).to(like.device)
