"""BatchNorm over the batches of all ranks, on CPUs and GPUs, over Horovod or torch.distributed.

torch's own SyncBatchNorm needs a GPU and torch.distributed, and hangs if a rank has no batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.comm.base import Communicator, all_reduce

DONE, RANKS, MODULE, SUMS = 0, 1, 2, 3
"""Positions in an exchanged vector: whether this was the last exchange, the number of ranks with a batch, the sum of their module
numbers, and the start of the sums."""


class Exchange:
    """Sums over the ranks for the BatchNorms of a model.

    A rank without a batch does not know which sums the others exchange, nor which exchange is the last. So all exchanges are
    vectors of the same length that include this, and `end_pass` ends the forward and the backward of a step.

    Args:
        comm: a separate channel, as a rank without a batch sends sums and gradients in a different order.
    """

    def __init__(self, comm: Communicator, modules: list[SyncBatchNorm]) -> None:
        self._comm = comm
        self._modules = modules
        self._length = SUMS + 1 + 2 * max(module.num_features for module in modules)

    def sums(self, number: int, values: torch.Tensor) -> torch.Tensor:
        """Collective. The sum of the values over the ranks; float64 of the same shape."""
        vector = values.new_zeros(self._length, dtype=torch.float64)
        vector[RANKS], vector[MODULE] = 1, number
        vector[SUMS : SUMS + len(values)] = values
        return self._reduce(vector)[SUMS : SUMS + len(values)]

    def end_pass(self, device: torch.device) -> None:
        """Collective. Signal to the ranks without a batch that a forward or a backward has no more sums."""
        vector = torch.zeros(self._length, dtype=torch.float64, device=device)
        vector[DONE] = 1
        self._reduce(vector)

    def join_without_batch(self, device: torch.device, forward: bool) -> None:
        """Collective, on a rank without a batch. Add zeros to the others' sums, and update the running statistics as they do."""
        while True:
            vector = self._reduce(torch.zeros(self._length, dtype=torch.float64, device=device))
            if vector[DONE] > 0 or vector[RANKS] == 0:
                return
            if forward:
                module = self._modules[int(vector[MODULE] / vector[RANKS])]
                module.update_running_statistics(*module.statistics(vector[SUMS:]))

    def _reduce(self, vector: torch.Tensor) -> torch.Tensor:
        return all_reduce(self._comm, [vector], "sum", name="sync_batch_norm")[0]  # type: ignore[no-any-return]


class SyncBatchNorm(_BatchNorm):
    """A BatchNorm1d, 2d or 3d whose statistics in training are computed over the batches of all ranks. It shares the parameters
    and buffers of the module that it replaces.

    Takes tensors of shape (batch, features, ...).
    """

    def __init__(self, other: _BatchNorm, number: int) -> None:
        super().__init__(1, other.eps, other.momentum, affine=False, track_running_stats=False)
        self.num_features = other.num_features
        self.affine = other.affine
        self.track_running_stats = other.track_running_stats
        self.weight, self.bias = other.weight, other.bias
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(other, name))
        self.training = other.training
        self.number = number
        self.exchange: Exchange | None = None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training or self.exchange is None:
            return super().forward(input)
        normalized, mean, variance, count = _Normalize.apply(input, self)  # type: ignore[no-untyped-call]
        self.update_running_statistics(mean, variance, count)
        if self.weight is None:
            return normalized
        shape = [1, -1] + [1] * (input.dim() - 2)
        return normalized * self.weight.view(shape) + self.bias.view(shape)  # type: ignore[no-any-return]

    def _check_input_dim(self, input: torch.Tensor) -> None:
        """Accept two or more dimensions."""

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
        own = input.new_full((1,), input.numel() / input.shape[1], dtype=torch.float64)
        sums = module.exchange.sums(  # type: ignore[union-attr]
            module.number, torch.cat([input.sum(dims, dtype=torch.float64), squares, own])
        )
        mean, variance, count = module.statistics(sums)
        shape = [1, -1] + [1] * (input.dim() - 2)
        scale = (variance + module.eps).rsqrt()
        normalized = (input - mean.to(input.dtype).view(shape)) * scale.to(input.dtype).view(shape)
        context.save_for_backward(normalized, scale, count)
        context.module, context.dims, context.shape = module, dims, shape
        context.mark_non_differentiable(mean, variance, count)
        return normalized, mean, variance, count

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor, *unused: torch.Tensor) -> tuple[torch.Tensor, None]:
        normalized, scale, count = context.saved_tensors
        dims, shape = context.dims, context.shape
        features = len(scale)
        own = torch.cat([gradient.sum(dims, dtype=torch.float64), (gradient * normalized).sum(dims, dtype=torch.float64)])
        means = (context.module.exchange.sums(context.module.number, own) / count).to(gradient.dtype)
        first, second = means[:features].view(shape), means[features:].view(shape)
        return (gradient - first - normalized * second) * scale.to(gradient.dtype).view(shape), None


def synchronize(model: torch.nn.Module, comm: Communicator) -> tuple[torch.nn.Module, Exchange | None]:
    """The model with its BatchNorms replaced by synchronized ones that share their parameters and buffers.

    Returns: the model (a new object only if it is itself a BatchNorm), and the exchange; None if it has no BatchNorm.
    """
    replaced: list[SyncBatchNorm] = []
    model = _replace(model, replaced, {})
    if not replaced:
        return model, None
    exchange = Exchange(comm, replaced)
    for module in replaced:
        module.exchange = exchange
    return model, exchange


def _replace(module: torch.nn.Module, replaced: list[SyncBatchNorm], known: dict[int, torch.nn.Module]) -> torch.nn.Module:
    if id(module) in known:  # a module used in several places
        return known[id(module)]
    new = module
    if isinstance(module, (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)):
        new = SyncBatchNorm(module, len(replaced))
        replaced.append(new)
    known[id(module)] = new
    for name, child in module.named_children():
        setattr(new, name, _replace(child, replaced, known))
    return new
