"""How the learner for PyTorch is built from a config's keys."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from hvdtrain.config.references import as_function
from hvdtrain.data.randomness import OPTIMIZER, mix_seed
from hvdtrain.learner.epoch_scores import EpochScores
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.optimizer import UpdateGradients, change_gradients, changes_gradients
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.splitting import BatchSplitter
from hvdtrain.learner.torch.config_functions import ConfigFunctions
from hvdtrain.learner.torch.device import (
    autocast_of,
    checkpoint_activations,
    compile_model,
    device_of,
    enable_determinism,
    free_memory,
    is_out_of_memory,
    seed_all,
)
from hvdtrain.learner.torch.extra_models import make_extra_models
from hvdtrain.learner.torch.freezing import Freezing
from hvdtrain.learner.torch.frozen_base import FrozenBase, describe_base
from hvdtrain.learner.torch.gradients import Gradients
from hvdtrain.learner.torch.meter import open_meter
from hvdtrain.learner.torch.metrics import SummedMetric, open_scores
from hvdtrain.learner.torch.model import build_model, check_import_order
from hvdtrain.learner.torch.model_file import check_storable
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.optimizer_modes import OptimizerModes, check_modes
from hvdtrain.learner.torch.optimizer_state import is_of_torch
from hvdtrain.learner.torch.several_optimizers import SeveralOptimizers, has_modes, members_of
from hvdtrain.learner.torch.sharded_optimizer import ShardedOptimizer
from hvdtrain.learner.torch.shares import check_shares
from hvdtrain.learner.torch.state import TorchState, Unsaved, WeightAverage
from hvdtrain.learner.torch.step import StepOptions, TorchLearner
from hvdtrain.learner.torch.sync_batch_norm import synchronize
from hvdtrain.learner.torch.tensors import (
    CudaStaging,
    named_trained,
)
from hvdtrain.learner.torch.update import DeviceSkips, GradientNoise, Optimizer, Skips, Update
from hvdtrain.learner.torch.writer_process import BackgroundWriter
from hvdtrain.runtime import log


def build_learner(keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> TorchLearner:
    """Build a config's model, optimizer and learner, with the same seed on all ranks. The caller broadcasts rank 0's weights.

    Raises:
        ConfigError: get_model returns no torch.nn.Module, the optimizer cannot be made, or the device cannot compute in the type.
    """
    check_import_order()
    torch.set_num_threads(options.threads)
    if keys.deterministic:
        enable_determinism()
    device = device_of(keys.device, options.local_rank)
    seed_all(device, mix_seed(options.seed, 0, 0))
    model, constants = build_model(keys, options, device)
    check_storable(model, options.model_format)
    scale = options.precision.loss_scale(options.precision.dtype)

    def are_reduced() -> bool:
        return gradient_exchange.is_active  # gradients are then the same on the ranks that exchange them, and get the same noise

    limit = keys.num_allowed_consec_invalid_gradient_steps
    check = GradientCheck(limit, scale, same_on_all_ranks=lambda: gradient_exchange.reaches_all)
    on_gpu = device.type == "cuda"
    on_device = DeviceSkips(check, device) if on_gpu and options.sharded is None else None
    whole_optimizer = make_optimizer(keys.optimizer, model, fused=check.is_needed and on_device is not None)
    exchange = None if options.batch_norm is None else synchronize(model, options.batch_norm)
    trained = named_trained(model)
    if options.sharded is not None:
        check_shares(whole_optimizer)
    optimizer: Optimizer = whole_optimizer if options.sharded is None else ShardedOptimizer(whole_optimizer, options.sharded)
    owners = optimizer.owners(list(trained.values())) if isinstance(optimizer, ShardedOptimizer) else None
    gradients = Gradients(trained, gradient_exchange, device, options.bucket_bytes(on_gpu), owners)
    noise = GradientNoise(lambda: (options.seed, None if are_reduced() else options.rank), device)
    base = None if options.saves_frozen else FrozenBase(model, constants)
    if base is not None:
        log.info(f"save_parameters: the model's file has {base.description}; the others are of {describe_base(base.entry)}")
    checkpoint_activations(model, keys.checkpoint_modules)
    watch = compile_model(model, keys.torch_compile)
    average = _average(keys, optimizer, whole_optimizer, trained, gradient_exchange.keeps_ranks_alike)

    def seed_optimizer(step: int) -> None:
        seed_all(device, mix_seed(options.seed, 0 if are_reduced() else 1 + options.rank, step, OPTIMIZER))

    may_draw = not all(map(is_of_torch, members_of(whole_optimizer)))  # random numbers, which have to be the same on all ranks
    seed = seed_optimizer if may_draw else None
    splitter = _splitter(keys, model, device)
    update = Update(model, optimizer, _change(keys, model, optimizer), Skips(check, on_device), noise, seed)
    extra_models = make_extra_models(keys.extra_models, model, device, options.position)
    state = TorchState(model, optimizer, device, average, check, Unsaved(constants, base, extra_models), options.model_format)
    state.writer = BackgroundWriter(options.writer)
    state.freezing = Freezing(keys.freeze_until_step, trained) if keys.freeze_until_step else None
    epoch_scores = open_scores(keys.epoch_scores, device)
    learner = TorchLearner(
        ConfigFunctions(
            model=model,
            train_step=as_function(keys.train_step, "train_step"),
            forward_step=as_function(keys.forward_step, "forward_step"),
            device=device,
            autocast=autocast_of(options.precision.dtype, device),
            watch=watch,
            staging=CudaStaging(device) if on_gpu else None,
            extra_models=extra_models,
            metrics=[metric for metric in epoch_scores.values() if isinstance(metric, SummedMetric)],
        ),
        gradients,
        update,
        state,
        open_meter(state, device, check, update, splitter),
        (options.seed, options.rank),
        StepOptions(exchange, splitter),
    )
    learner.epoch_scores = EpochScores(epoch_scores)
    return learner


def _average(
    keys: LearnerKeys,
    optimizer: Optimizer,
    whole_optimizer: torch.optim.Optimizer | SeveralOptimizers,
    trained: dict[str, torch.nn.Parameter],
    keeps_ranks_alike: bool,
) -> WeightAverage | OptimizerModes | None:
    """The weights that are evaluated and saved instead of the trained ones: an average over time, or those of the optimizer.

    Args:
        whole_optimizer: the config's, which `optimizer` may distribute over the ranks.
    """
    if has_modes(whole_optimizer):
        check_modes(whole_optimizer, keys.ema_decay, keeps_ranks_alike)
        exchange = optimizer.exchange if isinstance(optimizer, ShardedOptimizer) else None
        return OptimizerModes(trained, whole_optimizer, exchange)
    return None if keys.ema_decay is None else WeightAverage(trained, keys.ema_decay)


def _change(keys: LearnerKeys, model: torch.nn.Module, optimizer: Optimizer) -> Callable[[UpdateGradients], None] | None:
    """What is done with reduced gradients before the optimizer: the config's function, then noise and clipping; None: nothing."""
    change_of_config = as_function(keys.change_gradients, "change_gradients")
    if change_of_config is None:
        return partial(change_gradients, keys) if changes_gradients(keys) else None

    def change(gradients: UpdateGradients) -> None:
        change_of_config(model=model, optimizer=optimizer)
        change_gradients(keys, gradients)

    return change


def _splitter(keys: LearnerKeys, model: torch.nn.Module, device: torch.device) -> BatchSplitter | None:
    """The splitter of batches that do not fit into memory, if the config asks for one."""
    if not keys.split_on_oom:
        return None
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    if norms:
        log.warning(
            f"split_on_oom: in a batch that is split, the statistics of BatchNorm ({', '.join(norms[:3])}) are those of a piece"
        )
    return BatchSplitter(is_out_of_memory, partial(free_memory, device))
