"""Gradients as products of thin matrices, with error feedback (PowerSGD: Vogels et al., 2019)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hvdtrain.comm.base import Communicator, Op
from hvdtrain.learner.compression import GradientCompressor

ERRORS = "power_sgd.error."
FACTORS = "power_sgd.factor."
"""Prefixes of the kept tensors' names, before a message's name: errors not sent yet, and the right factors of the last update."""


@dataclass
class Pending:
    """A bucket that is under way.

    Attributes:
        tensors: this rank's; those that are sent as they are become the reduced ones.
        matrices: this rank's matrices to reduce, by the number of the tensor; shape (rows, columns).
        factors: the right factors they were multiplied by; shape (columns, rank).
        left_factors: this rank's; once they are reduced, orthonormal ones; shape (rows, rank).
        totals: the reduced right factors; None: they have not arrived.
    """

    name: str
    tensors: list[torch.Tensor]
    matrices: dict[int, torch.Tensor]
    factors: list[torch.Tensor]
    left_factors: list[torch.Tensor]
    totals: list[torch.Tensor] | None = None

    @property
    def unfactored(self) -> list[int]:
        """The numbers of the tensors that are sent as they are."""
        return [number for number in range(len(self.tensors)) if number not in self.matrices]

    def first_message(self) -> list[torch.Tensor]:
        return [*self.left_factors, *(self.tensors[number] for number in self.unfactored)]


class PowerSGD(GradientCompressor):
    """Sends a gradient of shape (rows, ...) as factors of shape (rows, rank) and (columns, rank), if that halves its size.

    Sum and average over the ranks are linear in both factors, so all ranks get the same product, computed from the same numbers.
    The error of a rank's approximation is added to its next gradient.

    The factors of a bucket are so small that sending them takes little more than the network's latency. So several buckets share
    a message, and all second messages are sent before the first of them is waited for.

    Args:
        rank: of the product.
    """

    is_stateful = True
    joins_buckets = True
    prefixes = (ERRORS, FACTORS)

    def __init__(self, comm: Communicator, rank: int) -> None:
        super().__init__(comm)
        self._rank = rank
        self._waiting: list[Pending] = []  # buckets that are not sent yet
        self._first: list[tuple[list[Pending], Any]] = []  # messages with left factors, and their handles
        self._second: list[tuple[list[Pending], Any]] = []  # those with right factors

    def describe(self) -> str:
        return f", sent in factors of rank {self._rank}" if self._comm.size > 1 else ""

    def start(
        self, tensors: Sequence[torch.Tensor], op: Op, *, name: str, owners: Sequence[int] | None = None, exact: bool = False
    ) -> Any:
        numbers = (
            [] if exact or self._comm.size == 1 else [number for number, each in enumerate(tensors) if self._is_worthwhile(each)]
        )
        if not numbers:
            return super().start(tensors, op, name=name, owners=owners, exact=exact)
        flat = [tensors[number].reshape(len(tensors[number]), -1) for number in numbers]
        errors, factors = self._memory(name, flat)
        matrices = [gradient + error for gradient, error in zip(flat, errors, strict=True)]
        left_factors = [matrix @ factor for matrix, factor in zip(matrices, factors, strict=True)]
        pending = Pending(name, list(tensors), dict(zip(numbers, matrices, strict=True)), factors, left_factors)
        self._waiting.append(pending)
        size = sum(tensor.numel() * tensor.element_size() for bucket in self._waiting for tensor in bucket.first_message())
        if size >= self._comm.bucket_bytes(on_gpu=left_factors[0].device.type != "cpu"):
            self._send_first(op)
        return op, pending

    def finish(self, handle: Any) -> list[torch.Tensor]:
        if not isinstance(handle[1], Pending):
            return super().finish(handle)
        op, pending = handle
        self._send_first(op)
        for buckets, started in self._first:
            self._send_second(buckets, super().finish(started), op)
        self._first = []
        while pending.totals is None:
            buckets, started = self._second.pop(0)
            arrived = iter(super().finish(started))
            for bucket in buckets:
                bucket.totals = [next(arrived) for _ in bucket.left_factors]
        self._shared[FACTORS + pending.name] = [
            torch.where(total.isfinite().all(), total, before)
            for total, before in zip(pending.totals, pending.factors, strict=True)
        ]
        reduced: list[torch.Tensor] = pending.tensors
        for number, left_factors, total in zip(pending.matrices, pending.left_factors, pending.totals, strict=True):
            reduced[number] = (left_factors @ total.T).reshape(reduced[number].shape)
        return reduced

    def _send_first(self, op: Op) -> None:
        """Collective. Send the left factors of the buckets that wait, and their other tensors."""
        buckets = self._waiting
        self._waiting = []
        if buckets:
            message = [tensor for bucket in buckets for tensor in bucket.first_message()]
            self._first.append((buckets, super().start(message, op, name=buckets[0].name)))

    def _send_second(self, buckets: list[Pending], reduced: list[torch.Tensor], op: Op) -> None:
        """Collective. Make the left factors that have arrived orthonormal, and send the right ones."""
        arrived = iter(reduced)
        message: list[torch.Tensor] = []
        for bucket in buckets:
            bucket.left_factors = [torch.linalg.qr(next(arrived)).Q for _ in bucket.left_factors]
            for number in bucket.unfactored:
                bucket.tensors[number] = next(arrived)
            matrices = list(bucket.matrices.values())
            right = [matrix.T @ left_factors for matrix, left_factors in zip(matrices, bucket.left_factors, strict=True)]
            # A non-finite update is not applied, so no part of it may come back later.
            triples = zip(matrices, bucket.left_factors, right, strict=True)
            errors = [(matrix - left_factors @ total.T).nan_to_num(0.0, 0.0, 0.0) for matrix, left_factors, total in triples]
            self._own[ERRORS + bucket.name] = errors
            message += right
        self._second.append((buckets, super().start(message, op, name=f"{buckets[0].name}.right")))

    def _is_worthwhile(self, tensor: torch.Tensor) -> bool:
        """Whether the factors are at most half as large. Tensors that have to be exact are not float32."""
        if tensor.dtype != torch.float32 or tensor.dim() < 2:
            return False
        rows = len(tensor)
        return 2 * self._rank * (rows + tensor.numel() // max(1, rows)) <= tensor.numel()

    def _memory(self, name: str, matrices: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The errors and the right factors of the last update; before the first update, zeros and random numbers."""
        errors = self._own.get(ERRORS + name, [])
        factors = self._shared.get(FACTORS + name, [])
        if [matrix.shape for matrix in errors] != [matrix.shape for matrix in matrices]:
            errors = [torch.zeros_like(matrix) for matrix in matrices]
        shapes = [(matrix.shape[1], self._rank) for matrix in matrices]
        if [tuple(factor.shape) for factor in factors] != shapes:
            empty = [matrix.new_empty(shape) for matrix, shape in zip(matrices, shapes, strict=True)]
            factors = [_initial_factor(f"{name}.{place}", matrix) for place, matrix in enumerate(empty)]
        return errors, factors


def _initial_factor(name: str, like: torch.Tensor) -> torch.Tensor:
    """An initial right factor, the same on all ranks."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(like.shape, generator=generator).to(like.device)
