"""From a config's keys to a learner for PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import LearnerKeys, Take, as_function
from hvdtrain.learner.precision import FLOAT32, Precision
from hvdtrain.learner.reduce import Reducer
from hvdtrain.learner.torch.compile import compile_model
from hvdtrain.learner.torch.device import autocast_of, device_of, seed_all
from hvdtrain.learner.torch.learner import TorchLearner
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.sharded import ShardedOptimizer
from hvdtrain.learner.torch.state import WeightAverage, preload
from hvdtrain.learner.torch.sync_batch_norm import Exchange, synchronize
from hvdtrain.learner.torch.tensors import trained_of
from hvdtrain.learner.torch.update import GradientNoise

WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
WRAPPED = (
    "get_model: expected the model itself, got it inside a {name}: hvdtrain reduces gradients itself. DataParallel "
    "copies the model to every GPU in every step, and its threads wait for Python's lock; PyTorch advises against it (a process "
    "for each GPU instead: python -m hvdtrain CONFIG ++ngpu 4)"
)


def build_torch_learner(
    keys: LearnerKeys,
    reducer: Reducer,
    *,
    rank: int,
    local_rank: int,
    threads: int,
    seed: int,
    epoch: int,
    step: int,
    precision: Precision = FLOAT32,
    batch_norm: Communicator | None = None,
    sharded: Communicator | None = None,
    constants: Callable[[Take], list[str]] | None = None,
) -> TorchLearner:
    """Build the model and the optimizer of a config. All ranks seed alike; weights still are to be broadcast from rank 0.

    Args:
        precision: what the model computes in.
        batch_norm: the ranks over which BatchNorm's statistics are taken, on a channel of their own; None: each by itself.
        constants: takes over, by what it is handed, parameters that are neither trained nor saved; returns their names.
        sharded: the ranks among which the optimizer's state is divided; None: each has all of it.

    Raises:
        ConfigError: get_model returns no torch.nn.Module, the optimizer cannot be made, or the device cannot compute so.
    """
    torch.set_num_threads(threads)
    device = device_of(keys.device, local_rank)
    seed_all(device, seed, 0, 0)
    model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=str(device))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError([f"get_model: expected it to return a torch.nn.Module, got {type(model).__name__}"])
    if isinstance(model, WRAPPERS):
        raise ConfigError([WRAPPED.format(name=type(model).__name__)])
    model.to(device)
    constant = frozenset(constants(partial(preload, model.state_dict(), device)) if constants is not None else [])
    for name, parameter in model.named_parameters():
        if name in constant:
            parameter.requires_grad_(False)
    exchange: Exchange | None = None
    if batch_norm is not None:
        model, exchange = synchronize(model, batch_norm)
    noise_rank = None if reducer.updates_without_batch else rank  # where gradients were reduced, all ranks add the same
    optimizer = make_optimizer(keys.optimizer, model)
    trained = trained_of(model)
    return TorchLearner(
        model,
        as_function(keys.train_step, "train_step"),
        optimizer if sharded is None else ShardedOptimizer(optimizer, sharded),
        reducer,
        device=device,
        seed=(seed, rank),
        clip_global_norm=keys.gradient_clip_global_norm,
        clip_value=keys.gradient_clip,
        noise=GradientNoise(keys.gradient_noise, (seed, noise_rank), device) if keys.gradient_noise else None,
        skips=keys.num_allowed_consec_invalid_gradient_steps,
        forward_step=as_function(keys.forward_step, "forward_step"),
        batch_norm=exchange,
        constants=constant,
        autocast=autocast_of(precision.dtype, device),
        scale=precision.loss_scale(precision.dtype),
        watch=compile_model(model, keys.torch_compile),
        average=None if keys.ema_decay is None else WeightAverage(trained, keys.ema_decay),
    )
