"""The running statistics of BatchNorms, computed anew for parameters that no batch has seen yet, such as those of an average.

As in torch.optim.swa_utils.update_bn, they become the mean of the statistics of the batches, here over all ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.data.types import Batch
from hvdtrain.learner.base import Total
from hvdtrain.learner.torch.step import TorchLearner


@torch.no_grad()
def fresh_statistics(learner: TorchLearner, batches: Iterable[Batch | None], total: Total) -> list[str]:
    """What `FreshStatistics` declares, for PyTorch."""
    modules = learner.model.named_modules()
    norms = {name: module for name, module in modules if isinstance(module, _BatchNorm) and module.running_mean is not None}
    with fresh_batch_norms(norms.values()):
        learner.observe(batches)
        total_statistics(norms.values(), total)
    return list(norms)


@contextmanager
def fresh_batch_norms(norms: Iterable[_BatchNorm]) -> Iterator[None]:
    """Inside the `with` block, the running statistics are the mean over the batches since its beginning.

    The statistics of a BatchNorm that no batch has reached stay as they were; so does the count of batches, which a training
    continues.
    """
    before = [(norm, norm.momentum, {name: buffer.clone() for name, buffer in norm.named_buffers()}) for norm in norms]
    for norm, *_ in before:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        yield
    finally:
        for norm, momentum, buffers in before:
            norm.momentum = momentum
            reached = bool(norm.num_batches_tracked)
            for name, buffer in norm.named_buffers():
                if name == "num_batches_tracked" or not reached:
                    buffer.copy_(buffers[name])


def total_statistics(norms: Iterable[_BatchNorm], total: Total) -> None:
    """Collective. Make the statistics those of all ranks, each with the weight of its batches."""
    for norm in norms:
        buffers = dict(norm.named_buffers())
        count = buffers.pop("num_batches_tracked")
        *sums, batches = total([*(buffer.double() * count for buffer in buffers.values()), count.double().reshape(1)])
        count.copy_(batches[0])
        if batches[0] > 0:
            for buffer, values in zip(buffers.values(), sums, strict=True):
                buffer.copy_(values / batches[0])
