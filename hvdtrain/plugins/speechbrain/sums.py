"""`ddp_all_reduce` over the ranks of hvdtrain: in hooks as there, and in training steps, in which some ranks may have no batch.

InputNormalization and GlobalNorm add up their statistics with it in every forward of the training. So that all ranks know when
this ends, a rank with a batch says so at the end of its step; one without a batch waits for it, and takes over their statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import speechbrain
import torch
from speechbrain.processing import features
from torch.distributed import ReduceOp

import hvdtrain
from hvdtrain.errors import ConfigError

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
    """Sums over the ranks for the modules of a Brain.

    Attributes:
        is_training: whether all ranks take their training steps; one that is tried before has its own statistics.
    """

    is_training = False

    def __init__(self) -> None:
        self._modules: list[Any] = []
        self._step: str | None = None  # what is computed; None: a hook is called

    def of(self, model: torch.nn.Module) -> None:
        """Find a Brain's modules with statistics. Raises: ConfigError, if several ranks cannot have the same."""
        several: list[Any] = [one for one in model.modules() if isinstance(one, tuple(STATISTICS))]
        self._modules = [one for one in several if getattr(one, "norm_type", "global") == "global"]
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
        everybodys: Sequence[Any] = [] if self._is_needed else [END]
        while END not in [one for one in everybodys if isinstance(one, str)]:
            everybodys = self._exchange(None)
        self._share(everybodys)

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
        everybodys = self._exchange(tensor.detach().cpu())
        tensor.copy_(OPERATIONS[op](torch.stack([one for one in everybodys if one is not None]), 0))

    @property
    def _is_needed(self) -> bool:
        return bool(self._modules) and hvdtrain.size() > 1

    def _exchange(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks. Raises: ConfigError, on all of them, if only some have ended their step."""
        everybodys = hvdtrain.all_gather(value, name="speechbrain.sums")
        if len({type(one) for one in everybodys if one is not None}) > 1:
            ended = [rank for rank, one in enumerate(everybodys) if isinstance(one, str)]
            raise ConfigError.of(
                "rank-mismatch",
                "brain: expected all ranks to call ddp_all_reduce, or modules such as InputNormalization, equally often in a "
                f"step, got the end of the step on rank {ended[0]} first",
            ).on_all_ranks()
        return everybodys

    def _share(self, ended: Sequence[Any]) -> None:
        """Collective, if some rank has no batch. Such a rank takes over the statistics of the first one that has."""
        without = [rank for rank, one in enumerate(ended) if one is None]
        if not without:
            return
        first, rank = ended.index(END), hvdtrain.rank()
        own = self._statistics() if rank == first else []
        theirs = hvdtrain.all_gather(own, name="speechbrain.statistics")[first]
        for module, values in zip(self._modules, theirs, strict=True) if rank in without else ():
            for name, value in values.items():
                setattr(module, name, value.to(getattr(module, name).device) if isinstance(value, torch.Tensor) else value)

    def _statistics(self) -> list[dict[str, Any]]:
        kinds = [(module, kind) for module in self._modules for kind in STATISTICS if isinstance(module, kind)]
        values = [{name: getattr(module, name) for name in STATISTICS[kind]} for module, kind in kinds]
        return [{name: one.cpu() if isinstance(one, torch.Tensor) else one for name, one in each.items()} for each in values]
