"""SpeechBrain's functions for several processes, such as run_on_main: they concern the ranks of hvdtrain."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from speechbrain.utils import distributed

import hvdtrain
from hvdtrain.plugins.speechbrain.sums import Sums


def as_one_job(sums: Sums) -> None:
    """Let them ask hvdtrain which rank this is, instead of torchrun's environment and torch.distributed.

    They are called in hooks, in which all ranks take part; sums also in training steps.
    """

    def broadcast(values: list[Any], src: int = 0) -> None:
        values[:] = hvdtrain.all_gather(list(values), name="speechbrain.broadcast")[src]

    def barrier(**_: Any) -> None:
        hvdtrain.all_gather(None, name="speechbrain.barrier")

    distributed.get_rank = hvdtrain.rank
    distributed.is_distributed_initialized = lambda: hvdtrain.size() > 1
    theirs = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: hvdtrain.size() > 1,
        barrier=barrier,
        all_reduce=sums.reduce,
        broadcast_object_list=broadcast,
        get_backend=lambda: "hvdtrain",
        Backend=torch.distributed.Backend,
    )
    distributed.torch = Torch(theirs)


@contextmanager
def alone() -> Iterator[None]:
    """Inside the `with` block, each rank does what else only rank 0 does, and waits for no other."""
    usual = distributed.is_distributed_initialized
    distributed.is_distributed_initialized = lambda: False
    try:
        yield
    finally:
        distributed.is_distributed_initialized = usual


class Torch:
    """The module torch, with another `distributed`."""

    def __init__(self, theirs: Any) -> None:
        self.distributed = theirs

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)
