"""SpeechBrain's functions for several processes, such as run_on_main: they concern the ranks of hvdtrain.

`ddp_all_reduce` does so in hooks as there, and in training steps, in which some ranks may have no batch. InputNormalization and
GlobalNorm add up their statistics with it in every forward of the training. So that all ranks know when this ends, a rank with a
batch says so at the end of its step; one without a batch waits for it, and takes over their statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import speechbrain
import torch
from speechbrain.processing import features
from speechbrain.utils import distributed
from torch.distributed import ReduceOp

import hvdtrain
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.trees import change_leaves

STATISTICS = {
    features.InputNormalization: ("count", "glob_mean", "glob_std"),
    features.GlobalNorm: ("weight", "running_mean", "running_std", "step_count"),
}
"""What modules with statistics of all batches keep."""

OPERATIONS: dict[Any, Any] = {
    ReduceOp.SUM: torch.sum,
    ReduceOp.AVG: torch.mean,
    ReduceOp.MAX: torch.amax,
    ReduceOp.MIN: torch.amin,
}

END = "end"


class Sums:
    """Sums over the ranks for the modules of a Brain."""

    is_training = False  # whether all ranks take their training steps; one that is tried before has its own statistics

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._step: str | None = None  # what is computed; None: a hook is called

    def of(self, model: torch.nn.Module) -> None:
        """Find a Brain's modules with statistics. Raises: ConfigError, if several ranks cannot have the same."""
        modules: list[Any] = [module for module in model.modules() if isinstance(module, tuple(STATISTICS))]
        self._modules = [module for module in modules if getattr(module, "norm_type", "global") == "global"]
        if self._modules and hvdtrain.size() > 1 and not hasattr(features, "combine_gaussian_statistics_distributed"):
            raise ConfigError.of(
                "unsupported",
                f"brain: expected SpeechBrain 1.1 or newer for {type(self._modules[0]).__name__} on several ranks, got "
                f"{speechbrain.__version__}, where each process has the statistics of its own batches",
            )

    @contextmanager
    def step(self, is_training: bool) -> Iterator[None]:
        """Inside the `with` block, a batch is computed."""
        self._step = "an evaluation" if not is_training else "training" if self.is_training else "a trial"
        try:
            yield
            if self._step == "training" and self._is_needed:
                self._share(self._exchange(END))
        finally:
            self._step = None

    def join(self) -> None:
        """Collective, on a rank without a batch, while the others train theirs."""
        by_rank: Sequence[Any] = [] if self._is_needed else [END]
        while END not in [value for value in by_rank if isinstance(value, str)]:
            by_rank = self._exchange(None)
        self._share(by_rank)

    def reduce(self, tensor: torch.Tensor, op: Any = ReduceOp.SUM) -> None:
        """Collective, in a training step among the ranks with a batch: as torch.distributed.all_reduce. Raises: ConfigError."""
        if self._step == "a trial":
            return
        if op not in OPERATIONS or self._step == "an evaluation" or (self._step is not None and not self._is_needed):
            raise ConfigError.of(
                "unsupported",
                "brain: expected ddp_all_reduce of sums, means, or the highest or lowest in hooks, or in a training step that of "
                f"{' and '.join(kind.__name__ for kind in STATISTICS)} among its modules, got {op} in {self._step or 'a hook'}",
            )
        by_rank = self._exchange(tensor.detach().cpu())
        tensor.copy_(OPERATIONS[op](torch.stack([value for value in by_rank if value is not None]), 0))

    @property
    def _is_needed(self) -> bool:
        return bool(self._modules) and hvdtrain.size() > 1

    def _exchange(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks. Raises: ConfigError, on all of them, if only some have ended their step."""
        by_rank = hvdtrain.all_gather(value, name="speechbrain.sums")
        if len({type(of_rank) for of_rank in by_rank if of_rank is not None}) > 1:
            ended = [rank for rank, of_rank in enumerate(by_rank) if isinstance(of_rank, str)]
            raise ConfigError.of(
                "rank-mismatch",
                "brain: expected all ranks to call ddp_all_reduce, or modules such as InputNormalization, equally often in a "
                f"step, got the end of the step on rank {ended[0]} first",
            ).on_all_ranks()
        return by_rank

    def _share(self, ended: Sequence[Any]) -> None:
        """Collective, if some rank has no batch. Such a rank takes over the statistics of the first one that has."""
        idle = [rank for rank, of_rank in enumerate(ended) if of_rank is None]
        if not idle:
            return
        first = ended.index(END)
        rank = hvdtrain.rank()
        statistics = hvdtrain.all_gather(self._statistics() if rank == first else [], name="speechbrain.statistics")[first]
        for module, values in zip(self._modules, statistics, strict=True) if rank in idle else ():
            for name, value in values.items():
                setattr(module, name, value.to(getattr(module, name).device) if isinstance(value, torch.Tensor) else value)

    def _statistics(self) -> list[dict[str, Any]]:
        """By module."""
        kinds = [(module, kind) for module in self._modules for kind in STATISTICS if isinstance(module, kind)]
        values = [{name: getattr(module, name) for name in STATISTICS[kind]} for module, kind in kinds]
        cpu: list[dict[str, Any]] = change_leaves(values, lambda leaf: leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf)
        return cpu


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
