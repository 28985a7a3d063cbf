"""How the learner for PyTorch is built from a config's keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from hvdtrain.config.absent import absent
from hvdtrain.config.references import as_function
from hvdtrain.data.randomness import OPTIMIZER, mix_seed
from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.optimizer import UpdateGradients, change_gradients, changes_gradients
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.assembly import Assembly, DividedOptimizer, Optimizer
from hvdtrain.learner.torch.config_functions import ConfigFunctions
from hvdtrain.learner.torch.device import autocast_of, device_of, enable_determinism, seed_all
from hvdtrain.learner.torch.gradients import Gradients
from hvdtrain.learner.torch.meter import open_meter
from hvdtrain.learner.torch.model import build_model, check_import_order
from hvdtrain.learner.torch.model_file import check_storable
from hvdtrain.learner.torch.optimizer_state import is_of_torch
from hvdtrain.learner.torch.several_optimizers import AnyOptimizer, has_modes, members_of, name_of
from hvdtrain.learner.torch.state import TorchState, Unsaved, WeightAverage
from hvdtrain.learner.torch.step import TorchLearner
from hvdtrain.learner.torch.tensors import CudaStaging, named_trained
from hvdtrain.learner.torch.update import DeviceSkips, GradientNoise, Skips, Update
from hvdtrain.learner.weight_average import EvaluationWeights


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
    assembly = Assembly(keys, options, gradient_exchange, model, device, constants)
    for extend in options.extensions:
        extend(assembly)
    scale = options.precision.loss_scale(options.precision.dtype)

    def are_reduced() -> bool:
        return gradient_exchange.is_active  # gradients are then the same on the ranks that exchange them, and get the same noise

    limit = keys.num_allowed_consec_invalid_gradient_steps
    check = GradientCheck(limit, scale, same_on_all_ranks=lambda: gradient_exchange.reaches_all)
    on_gpu = device.type == "cuda"
    on_device = DeviceSkips(check, device) if on_gpu and assembly.divide is None else None
    whole_optimizer = assembly.make_optimizer(keys.optimizer, model, check.is_needed and on_device is not None)
    trained = named_trained(model)
    divided = None if assembly.divide is None else assembly.divide(whole_optimizer)
    optimizer: Optimizer = whole_optimizer if divided is None else divided
    owners = None if divided is None else divided.owners(list(trained.values()))
    gradients = Gradients(trained, gradient_exchange, device, options.bucket_bytes(on_gpu), owners)
    noise = GradientNoise(lambda: (options.seed, None if are_reduced() else options.rank), device)
    base = None if assembly.make_base is None else assembly.make_base()
    average = _average(assembly, whole_optimizer, divided, trained)

    def seed_optimizer(step: int) -> None:
        seed_all(device, mix_seed(options.seed, 0 if are_reduced() else 1 + options.rank, step, OPTIMIZER))

    may_draw = not all(map(is_of_torch, members_of(whole_optimizer)))  # random numbers, which have to be the same on all ranks
    seed = seed_optimizer if may_draw else None
    update = Update(model, optimizer, _change(keys, model, optimizer), Skips(check, on_device), noise, seed)
    state = TorchState(
        model, optimizer, device, average, check, Unsaved(constants, base, assembly.extra_models), options.model_format
    )
    state.freezing = None if assembly.freeze is None else assembly.freeze(trained)
    return TorchLearner(
        ConfigFunctions(
            model=model,
            train_step=as_function(keys.train_step, "train_step"),
            forward_step=as_function(keys.forward_step, "forward_step"),
            device=device,
            autocast=autocast_of(options.precision.dtype, device),
            watch=assembly.watch,
            staging=CudaStaging(device) if on_gpu else None,
            extra_models=assembly.extra_models,
            metrics=options.scoring.prepare(device),
        ),
        gradients,
        update,
        state,
        open_meter(state, device, check, update, assembly.splitter),
        (options.seed, options.rank),
        assembly,
    )


def _average(
    assembly: Assembly, optimizer: AnyOptimizer, divided: DividedOptimizer | None, trained: Mapping[str, torch.nn.Parameter]
) -> EvaluationWeights | None:
    """The weights that are evaluated and saved instead of the trained ones: an average over time, or those of the optimizer."""
    decay = assembly.keys.ema_decay
    if not has_modes(optimizer):
        return None if decay is None else WeightAverage(trained, decay)
    if assembly.weights_of_modes is None:
        raise ConfigError.of(
            "unsupported",
            f"optimizer: expected one without train() and eval(), got {name_of(optimizer)}, which needs "
            f"to be switched between them{absent('optimizer_modes')}",
        )
    return assembly.weights_of_modes(optimizer, divided)


def _change(keys: LearnerKeys, model: torch.nn.Module, optimizer: Optimizer) -> Callable[[UpdateGradients], None] | None:
    """What is done with reduced gradients before the optimizer: the config's function, then noise and clipping; None: nothing."""
    change_of_config = as_function(keys.change_gradients, "change_gradients")
    if change_of_config is None:
        return partial(change_gradients, keys) if changes_gradients(keys) else None

    def change(gradients: UpdateGradients) -> None:
        change_of_config(model=model, optimizer=optimizer)
        change_gradients(keys, gradients)

    return change
