"""The communicator of a job of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from hvdtrain.comm.base import LARGE_BUCKET, SMALL_BUCKET, Narrow, Op, Tensor

T = TypeVar("T")


class SingleCommunicator:
    """A job of size 1: every collective is the identity.

    Args:
        local_rank, local_size: this process's rank and the number of processes on its host, if several jobs of size 1 share
            the host; they determine the device and the number of threads.
    """

    rank = 0
    size = 1
    transport = "one process"
    sent = 0

    def __init__(self, local_rank: int = 0, local_size: int = 1) -> None:
        self.local_rank = local_rank
        self.local_size = local_size

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> list[Tensor]:
        return list(tensors)

    def finish(self, handle: list[Tensor]) -> list[Tensor]:
        return handle

    def bucket_bytes(self, on_gpu: bool) -> int:
        return LARGE_BUCKET if on_gpu else SMALL_BUCKET

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return list(tensors)

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        return list(tensors)

    def gather(self, value: T, *, name: str) -> list[T]:
        return [value]

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        return value

    def all_to_all(self, rows: Tensor, *, name: str) -> list[Tensor]:
        return [rows]

    def channel(self, name: str) -> SingleCommunicator:
        return self

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> SingleCommunicator | None:
        return self if any(sets) else None

    def close(self) -> None:
        pass
