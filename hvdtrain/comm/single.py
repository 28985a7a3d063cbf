"""One process alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hvdtrain.comm.base import Op, Tensor

T = TypeVar("T")


class SingleCommunicator:
    """A job of size 1: every collective is the identity."""

    rank = 0
    size = 1
    local_rank = 0
    local_size = 1

    def start(self, tensors: Sequence[Tensor], op: Op, *, name: str) -> list[Tensor]:
        return list(tensors)

    def finish(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather_rows(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather(self, value: T, *, name: str) -> list[T]:
        return [value]

    def channel(self, name: str) -> SingleCommunicator:
        return self

    def close(self) -> None:
        pass
