"""From a config's keys to a learner for PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from hvdtrain.config.reference import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.meter import LearnerMeter, PendingScores, Transfer
from hvdtrain.learner.optimizer import Clipping
from hvdtrain.learner.precision import GradientCheck, LossScale
from hvdtrain.learner.reducer import Reducer
from hvdtrain.learner.torch.compile import checkpoint_activations, compile_model
from hvdtrain.learner.torch.device import CudaClock, OnTheWay, autocast_of, be_deterministic, device_of, peak_memory, seed_all
from hvdtrain.learner.torch.gradients import Gradients
from hvdtrain.learner.torch.learner import ConfigFunctions, TorchLearner
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.sharded import ShardedOptimizer
from hvdtrain.learner.torch.skipping import DeviceSkips
from hvdtrain.learner.torch.staging import CudaStaging
from hvdtrain.learner.torch.state import TorchState, WeightAverage, preload
from hvdtrain.learner.torch.sync_batch_norm import Exchange, synchronize
from hvdtrain.learner.torch.tensors import trained_of
from hvdtrain.learner.torch.update import GradientNoise, Optimizer, Update
from hvdtrain.runtime.timer import CpuClock

WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
WRAPPED = (
    "get_model: expected the model itself, got it inside a {name}: hvdtrain reduces gradients itself. DataParallel "
    "copies the model to every GPU in every step, and its threads wait for Python's lock; PyTorch advises against it (a process "
    "for each GPU instead: python -m hvdtrain CONFIG ++ngpu 4)"
)


def build_learner(keys: LearnerKeys, reducer: Reducer, options: BuildOptions) -> TorchLearner:
    """Build a config's model, optimizer and learner. All ranks use the same seed; rank 0's weights still have to be broadcast.

    Raises:
        ConfigError: get_model returns no torch.nn.Module, the optimizer cannot be made, or the device cannot compute in the type.
    """
    torch.set_num_threads(options.threads)
    if keys.deterministic:
        be_deterministic()
    device = device_of(keys.device, options.local_rank)
    seed_all(device, options.seed, 0, 0)
    model, constants = _model(keys, options, device)
    exchange: Exchange | None = None
    if options.batch_norm is not None:
        model, exchange = synchronize(model, options.batch_norm)
    scale = options.precision.loss_scale(options.precision.dtype)

    def are_reduced() -> bool:
        return reducer.updates_without_batch  # gradients are then the same on all ranks, and get the same noise

    check = GradientCheck(keys.num_allowed_consec_invalid_gradient_steps, scale, same_on_all_ranks=are_reduced)
    on_gpu = device.type == "cuda"
    on_device = DeviceSkips(check, scale, device) if on_gpu and options.sharded is None else None
    whole = make_optimizer(keys.optimizer, model, fused=check.is_needed and on_device is not None)
    trained = trained_of(model)
    optimizer: Optimizer = whole if options.sharded is None else ShardedOptimizer(whole, options.sharded)
    owners = optimizer.owners(trained) if isinstance(optimizer, ShardedOptimizer) else None
    gradients = Gradients(trained, reducer, device, options.bucket_bytes(on_gpu), owners)
    noise: GradientNoise | None = None
    if keys.gradient_noise:
        seed = options.seed
        noise = GradientNoise(keys.gradient_noise, lambda: (seed, None if are_reduced() else options.rank), device)
    checkpoint_activations(model, keys.checkpoint_modules)
    watch = compile_model(model, keys.torch_compile)
    average = None if keys.ema_decay is None else WeightAverage(trained, keys.ema_decay)
    return TorchLearner(
        ConfigFunctions(
            model=model,
            train_step=as_function(keys.train_step, "train_step"),
            forward_step=as_function(keys.forward_step, "forward_step"),
            device=device,
            autocast=autocast_of(options.precision.dtype, device),
            watch=watch,
            staging=CudaStaging(device) if on_gpu else None,
        ),
        gradients,
        Update(model, optimizer, Clipping(keys.gradient_clip, keys.gradient_clip_global_norm), check, scale, noise, on_device),
        TorchState(model, optimizer, device, average, scale, constants),
        _meter(keys, model, device, scale),
        (options.seed, options.rank),
        exchange,
    )


def _model(keys: LearnerKeys, options: BuildOptions, device: torch.device) -> tuple[torch.nn.Module, frozenset[str]]:
    """The config's model on the device, and the names of its constant parameters. Raises: ConfigError, CheckpointError."""
    model = as_function(keys.get_model, "get_model")(epoch=1, step=0, device=str(device))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError([f"get_model: expected it to return a torch.nn.Module, got {type(model).__name__}"])
    if isinstance(model, WRAPPERS):
        raise ConfigError([WRAPPED.format(name=type(model).__name__)])
    model.to(device)
    load = partial(preload, model.state_dict(), device)
    constants = frozenset(options.constants(load) if options.constants is not None else [])
    for name, parameter in model.named_parameters():
        if name in constants:
            parameter.requires_grad_(False)
    return model, constants


def _meter(keys: LearnerKeys, model: torch.nn.Module, device: torch.device, scale: LossScale | None) -> LearnerMeter:
    on_cpu = device.type == "cpu"

    def not_finite() -> tuple[str, ...]:
        return tuple(name for name, values in model.named_parameters() if not bool(values.isfinite().all()))

    def read(tensors: list[torch.Tensor]) -> list[float]:
        return torch.cat(tensors).tolist()

    late = Transfer(lambda several: read([one.values() for one in several]), OnTheWay, OnTheWay.has_arrived)
    scores = PendingScores(
        Transfer(read) if on_cpu else late,
        not_finite,
        on_cpu=on_cpu,
        finite_only=keys.num_allowed_consec_invalid_gradient_steps is not None,
    )
    clock = CudaClock() if device.type == "cuda" else CpuClock()
    return LearnerMeter(scores, clock, scale, lambda: peak_memory(device))
