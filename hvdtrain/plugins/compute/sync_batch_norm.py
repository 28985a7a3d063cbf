"""BatchNorm over the batches of all ranks, on CPUs and GPUs, over Horovod or torch.distributed.

torch's own SyncBatchNorm needs a GPU and torch.distributed, and hangs if a rank has no batch, or skips a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.base import Communicator, all_reduce
from hvdtrain.errors import ConfigError
from hvdtrain.learner.torch.device import AsyncCopy

KINDS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)

NOTHING, DONE = 0, -1
"""What a rank computes that has no batch, or has computed all modules of a forward or a backward; else the module's number."""


class Exchange:
    """Sums over the ranks for the BatchNorms of a model.

    A rank without a batch does not know which sums the others exchange, nor which exchange is the last. So all exchanges are
    vectors of the same length, which begin with what each rank computes, and `end_pass` ends the forward and the backward of a
    step. Where ranks compute different modules, as some skip a layer, their sums would be mixed: they end with an error. On a
    GPU, whose numbers a rank does not wait for, this is found when they have arrived.

    Args:
        comm: a separate channel, as a rank without a batch sends sums and gradients in a different order.

    Attributes:
        modules: by name; a module's number is its place, counted from 1.
        is_active: whether statistics are computed over all ranks.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.modules: dict[str, SyncBatchNorm] = {}
        self.is_active = True
        self._computed: list[torch.Tensor] = []  # on a GPU, what the ranks computed in the exchanges of this pass
        self._copies: list[AsyncCopy] = []  # and of those before

    def sums(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Collective. The sum of the values over the ranks; float64 of the same shape. Raises: ConfigError."""
        computed, sums = self._exchange(number, values)
        self._note(computed)
        return sums[: len(values)]

    def end_pass(self, device: torch.device) -> None:
        """Collective. Signal to the ranks without a batch that a forward or a backward has no more sums. Raises: ConfigError."""
        computed, _ = self._exchange(DONE, torch.zeros(0, device=device))
        self._note(computed)
        if self._computed:
            self._copies.append(AsyncCopy(torch.stack(self._computed)))
            self._computed = []

    def join_without_batch(self, device: torch.device, forward: bool) -> None:
        """Collective, on a rank without a batch. Add zeros to the others' sums, and update the running statistics as they do."""
        while True:
            computed, sums = self._exchange(NOTHING, torch.zeros(0, device=device))
            number = self._check(computed.tolist(), device)
            if number <= 0:
                return
            if forward:
                module = list(self.modules.values())[number - 1]
                module.update_running_statistics(*module.statistics(sums))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Inside the `with` block, each rank computes statistics of its own batch, without the others."""
        self.is_active = False
        try:
            yield
        finally:
            self.is_active = True

    def _exchange(self, number: int, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. What each rank computes, and the sums of the values, followed by zeros."""
        size = self._comm.size
        longest = 1 + 2 * max(module.num_features for module in self.modules.values())
        vector = values.new_zeros(size + longest, dtype=torch.float64)
        vector[self._comm.rank] = number
        vector[size : size + len(values)] = values
        [sums] = all_reduce(self._comm, [vector], "sum", name="sync_batch_norm")
        return sums[:size], sums[size:]

    def _note(self, computed: torch.Tensor) -> None:
        """Check what the ranks compute: now, or on a GPU what has arrived. Raises: ConfigError."""
        if computed.device.type == "cpu":
            self._check(computed.tolist(), computed.device)
            return
        self._computed.append(computed)
        while self._copies and self._copies[0].has_arrived():
            for numbers in self._copies.pop(0).values().tolist():
                self._check(numbers, computed.device)

    def _check(self, computed: Sequence[float], device: torch.device) -> int:
        """What the ranks with a batch compute. Raises: ConfigError, if it is not the same; on all ranks, unless on a GPU."""
        ranks = {int(number): rank for rank, number in enumerate(computed) if number != NOTHING}
        if len(ranks) > 1:
            names = ["the end of the pass", *self.modules]  # DONE is -1
            got = ", ".join(f"{names[max(0, number)]} on rank {rank}" for number, rank in sorted(ranks.items()))
            error = ConfigError.of(
                "rank-mismatch",
                "sync_batch_norm: expected all ranks to compute the same BatchNorm layers in a step, in the same order, got "
                f"{got} (draw which layers are skipped from get_run_ctx().step, which is the same on all ranks)",
            )
            raise error.on_all_ranks() if device.type == "cpu" else error
        return next(iter(ranks), NOTHING)


class SyncBatchNorm(_BatchNorm):
    """What a BatchNorm1d, 2d or 3d does whose statistics in training are computed over the batches of all ranks.

    The model's modules stay the same objects, of a subclass of their own class, so that `isinstance` finds what it is used to.
    Takes tensors of shape (batch, features, ...).
    """

    exchange: Exchange
    number: int

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.exchange.is_active:
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]
        wide = input.to(torch.promote_types(input.dtype, torch.float32))  # in which PyTorch computes it, too
        normalized, mean, variance, count = _Normalize.apply(wide, self)  # type: ignore[no-untyped-call]
        self.update_running_statistics(mean, variance, count)
        if self.weight is not None:
            shape = [1, -1] + [1] * (input.dim() - 2)
            normalized = normalized * self.weight.view(shape) + self.bias.view(shape)
        return normalized.to(input.dtype)  # type: ignore[no-any-return]

    def statistics(self, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean, variance (over the count) and count, from the features' sums, their sums of squares, and the count."""
        features = self.num_features
        count = sums[2 * features].clamp(min=1)
        mean = sums[:features] / count
        return mean, (sums[features : 2 * features] / count - mean * mean).clamp(min=0), count

    def update_running_statistics(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        """Update the running statistics as BatchNorm does, with the variance over the count minus one."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.double() if self.momentum is None else self.momentum
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.copy_((1 - share) * self.running_mean + share * mean)
            self.running_var.copy_((1 - share) * self.running_var + share * unbiased)


class _Normalize(torch.autograd.Function):
    """(input - mean) / deviation over all ranks; the gradient includes the losses of the other ranks."""

    @staticmethod
    def forward(context: Any, input: torch.Tensor, module: SyncBatchNorm) -> tuple[torch.Tensor, ...]:
        dims = [0, *range(2, input.dim())]
        squares = torch.linalg.vector_norm(input.detach(), dim=dims, dtype=torch.float64).square()
        count_here = input.new_full((1,), input.numel() / input.shape[1], dtype=torch.float64)
        sums = module.exchange.sums(module.number, torch.cat([input.sum(dims, dtype=torch.float64), squares, count_here]))
        mean, variance, count = module.statistics(sums)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + module.eps).rsqrt()
        normalized = (input - mean.to(input.dtype).view(shape)) * scale.to(input.dtype).view(shape)
        context.save_for_backward(normalized, scale, count)
        context.module = module
        context.dims = dims
        context.shape = shape
        context.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor, None]:
        normalized, scale, count = context.saved_tensors
        dims = context.dims
        shape = context.shape
        features = len(scale)
        sums_here = torch.cat([gradient.sum(dims, dtype=torch.float64), (gradient * normalized).sum(dims, dtype=torch.float64)])
        means = (context.module.exchange.sums(context.module.number, sums_here) / count).to(gradient.dtype)
        first, second = means[:features].view(shape), means[features:].view(shape)
        return (gradient - first - normalized * second) * scale.to(gradient.dtype).view(shape), None


def synchronize(model: torch.nn.Module, comm: Communicator) -> Exchange | None:
    """Let the BatchNorms of a model compute their statistics over all ranks; None: it has none.

    Raises:
        ConfigError: the class of one has its own `forward`, which would not be computed.
    """
    exchange = Exchange(comm)
    for name, module in model.named_modules():
        if isinstance(module, KINDS):
            kind = type(module)
            if kind.forward is not _BatchNorm.forward:
                raise ConfigError.of(
                    "unsupported",
                    f"sync_batch_norm: expected BatchNorm layers with PyTorch's forward, got {name}, whose class {kind.__name__} "
                    "has its own",
                )
            module.__class__ = type(f"Sync{kind.__name__}", (SyncBatchNorm, kind), {"exchange": exchange})
            synchronized: Any = module  # it is a SyncBatchNorm now
            synchronized.number = 1 + len(exchange.modules)
            exchange.modules[name] = synchronized
    return exchange if exchange.modules else None
