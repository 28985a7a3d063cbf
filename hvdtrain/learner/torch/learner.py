"""The learner for PyTorch, which combines a config's functions, gradients and optimizer; and how it is built from keys."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hvdtrain.config.references import as_function
from hvdtrain.context import Loss
from hvdtrain.data.randomness import EVALUATION, OPTIMIZER, StepSeeds, mix_seed
from hvdtrain.data.types import Batch
from hvdtrain.learner.attributes import kinds_of
from hvdtrain.learner.base import Layer, Learner, StepCost, Total
from hvdtrain.learner.epoch_scores import EpochScores
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.marks import MarksOfSteps
from hvdtrain.learner.meter import Meter, Outputs, scales_of
from hvdtrain.learner.optimizer import UpdateGradients, change_gradients, changes_gradients
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.splitting import BatchSplitter
from hvdtrain.learner.torch.batch_norm import batch_norms_of, fresh_batch_norms, total_statistics
from hvdtrain.learner.torch.config_functions import ConfigFunctions
from hvdtrain.learner.torch.cost import compute_dtype, step_cost
from hvdtrain.learner.torch.device import (
    autocast_of,
    checkpoint_activations,
    compile_model,
    device_name,
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
from hvdtrain.learner.torch.inspect import layers_of
from hvdtrain.learner.torch.meter import open_meter
from hvdtrain.learner.torch.metrics import SummedMetric, open_scores
from hvdtrain.learner.torch.model import build_model, check_import_order
from hvdtrain.learner.torch.model_file import check_storable
from hvdtrain.learner.torch.optimizer import make_optimizer
from hvdtrain.learner.torch.optimizer_modes import OptimizerModes, check_modes
from hvdtrain.learner.torch.optimizer_state import is_of_torch
from hvdtrain.learner.torch.several_optimizers import has_modes, members_of
from hvdtrain.learner.torch.sharded_optimizer import ShardedOptimizer
from hvdtrain.learner.torch.shares import check_shares
from hvdtrain.learner.torch.state import TorchState, Unsaved, WeightAverage
from hvdtrain.learner.torch.sync_batch_norm import Exchange, synchronize
from hvdtrain.learner.torch.tensors import (
    CudaStaging,
    await_copy,
    named_trained,
    numbers_of,
    with_parts,
)
from hvdtrain.learner.torch.update import DeviceSkips, GradientNoise, Optimizer, Skips, Update
from hvdtrain.learner.torch.writer_process import BackgroundWriter
from hvdtrain.runtime import log


@dataclass(frozen=True)
class StepOptions:
    """What a step does only if the config asks for it.

    Attributes:
        batch_norm: the exchange between the ranks' BatchNorms; None: there is none.
        splitter: splits batches that do not fit into memory; None: such a batch is an error.
    """

    batch_norm: Exchange | None = None
    splitter: BatchSplitter | None = None


class TorchLearner(Learner):
    """A torch.nn.Module, its optimizer and its losses.

    Args:
        functions: the config's.
        gradients: from losses to reduced gradients.
        update: from reduced gradients to new parameters.
    """

    state: TorchState

    def __init__(
        self,
        functions: ConfigFunctions,
        gradients: Gradients,
        update: Update,
        state: TorchState,
        meter: Meter,
        seed: tuple[int, int],
        options: StepOptions,
    ) -> None:
        self.model = functions.model
        super().__init__(state, meter, seed)
        self._splitter = options.splitter
        self.optimizer = update.optimizer
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.device_name = device_name(functions.device)
        self.staging = functions.staging
        self._functions = functions
        self._gradients = gradients
        self._updater = update
        self._seeds = StepSeeds(1, *seed)
        self._marks = MarksOfSteps()
        self._batch_norm = options.batch_norm
        self._device = functions.device
        self._begins_update = True  # whether the next step is the first of an update
        self._is_update_due = False  # whether the next update changes anything, as some rank has a batch for it

    def begin_epoch(self, epoch: int, step: int) -> None:
        super().begin_epoch(epoch, step)
        self._begins_update = True
        self._gradients.begin_epoch()
        self._freeze()  # reducers ask what is frozen before the first step

    def backward(self, batch: Batch | None, completes_update: bool = True) -> None:
        if self._begins_update:
            self._freeze()
        self._begins_update = completes_update
        self._is_update_due = self._is_update_due or batch is not None or self._gradients.are_exchanged
        if self._is_update_due:
            if self.staging is not None:
                await_copy(batch)  # before the clock starts, as this is not computing
            with self.meter.clock.span(), self._functions.watch():
                seed_all(self._device, self._seeds.number(self._step))
                losses, marks = None, None
                if batch is not None and self._splitter is not None:
                    self._splitter.run(batch, self._add_piece)
                elif batch is not None:
                    losses = self._functions.losses(batch, self._epoch, self._step, train=True)
                    marks = self._marks.of(losses)
                    self._record(losses, batch, marks.scales)
                if self._batch_norm is not None:
                    self._finish_batch_norms(self._batch_norm, batch, forward=True)
                self._gradients.add(losses, marks, self._updater.loss_factor, completes_update)
                if self._batch_norm is not None:
                    self._finish_batch_norms(self._batch_norm, batch, forward=False)
        self._step += 1

    def _update(self, learning_rate: float) -> None:
        if self._is_update_due:
            with self.meter.clock.span():
                self._gradients.finish()
                if self.observer is not None:
                    self.observer(self._updater.gradients())
                self._updater.apply(learning_rate, self._step - 1)
        self._is_update_due = False

    def flush(self) -> None:
        super().flush()
        self._updater.flush()

    def evaluate(self, batch: Batch) -> None:
        await_copy(batch)
        self._seed_evaluation(batch)
        with torch.no_grad(), self._functions.watch():
            self._record(self._functions.losses(batch, self._epoch, self._step, False, self.dataset), batch)

    def fresh_statistics(self, batches: Iterable[Batch | None], total: Total) -> list[str]:
        norms = dict(batch_norms_of(self.model))
        with torch.no_grad(), fresh_batch_norms(norms.values()):
            for number, batch in enumerate(batches):
                await_copy(batch)
                with self._functions.watch():
                    seed_all(self._device, self._seeds.number(self._step + number))
                    if batch is not None:
                        self._functions.losses(batch, self._epoch, self._step + number, train=True)
                    if self._batch_norm is not None:
                        self._finish_batch_norms(self._batch_norm, batch, forward=True)
            total_statistics(norms.values(), total)
        return list(norms)

    def forward(self, batch: Batch) -> list[Outputs]:
        await_copy(batch)
        self._seed_evaluation(batch)
        return self._functions.outputs(batch, self._epoch, self._step, self.dataset)

    def _seed_evaluation(self, batch: Batch) -> None:
        """Give functions that draw while they evaluate the same numbers for a batch in every epoch and on any number of ranks."""
        seed_all(self._device, mix_seed(self._seed[0], EVALUATION, *batch.indices[:1].ravel().tolist()))

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from self.model.named_modules()

    def kinds_of_modules(self) -> Iterator[tuple[str, str]]:
        return kinds_of(self.model.named_modules(), _module_settings)

    def trained_now(self) -> dict[str, str]:
        return {name: str(parameter.requires_grad) for name, parameter in self.model.named_parameters()}

    def layers(self) -> Iterator[Layer]:
        return layers_of(self.model)

    def step_cost(self, batch: Batch) -> StepCost | None:
        with self._trial(batch) as step:
            return step_cost(step, self._device, compute_dtype(self._functions.autocast))

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def try_batch(self, batch: Batch) -> bool:
        fits = True
        with self._trial(batch) as step:
            try:
                step()
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
        free_memory(self._device)
        return fits

    @contextmanager
    def _trial(self, batch: Batch) -> Iterator[Callable[[], None]]:
        """A function that computes a batch's gradients without the other ranks, and drops them; buffers are restored."""
        await_copy(batch)
        buffers = self._copy_buffers()

        def step() -> None:
            losses = self._functions.losses(batch, self._epoch, self._step, train=True)
            self._gradients.compute(losses, self._marks.of(losses), self._updater.loss_factor)

        with nullcontext() if self._batch_norm is None else self._batch_norm.pause():
            yield step
        self._restore_buffers(buffers)

    def _add_piece(self, piece: Batch) -> None:
        """Compute the gradients of a batch, or of a piece of one that did not fit, and its scores."""
        buffers = self._copy_buffers()
        try:
            losses = self._functions.losses(piece, self._epoch, self._step, train=True)
            marks = self._marks.of(losses)
            for name in marks.minimized:
                if self._splitter is not None and losses[name].count is None:
                    self._splitter.check_loss(name, losses[name].value.ndim == 0, len(piece.indices))
            self._gradients.add_piece(losses, marks, self._updater.loss_factor)
        except BaseException:
            self._restore_buffers(buffers)  # a piece is computed again
            raise
        self._record({name: replace(loss, value=loss.value.detach()) for name, loss in losses.items()}, piece, marks.scales)

    def _copy_buffers(self) -> list[torch.Tensor]:
        return [buffer.clone() for buffer in self.model.buffers()]

    @torch.no_grad()
    def _restore_buffers(self, copies: list[torch.Tensor]) -> None:
        for buffer, copy in zip(self.model.buffers(), copies, strict=True):
            buffer.copy_(copy)

    def _freeze(self) -> None:
        if self.state.freezing is not None:
            self.state.freezing.apply(self._step)

    def _trainable(self) -> Iterable[tuple[str, Any]]:
        return named_trained(self.model).items()

    def _record(self, losses: dict[str, Loss], batch: Batch, scales: Mapping[str, float] | None = None) -> None:
        """Count the losses and errors of a batch. `scales`: those that `losses` are minimized with; None: in an evaluation."""
        train = scales is not None
        if scales is None or batch.parts is not None:
            losses = with_parts(losses, batch)
            scales = scales_of(losses, train)
        self.meter.add(scales, numbers_of(losses, self._device), self._step, batch.indices, train)

    def _finish_batch_norms(self, exchange: Exchange, batch: Batch | None, forward: bool) -> None:
        """Collective. A rank without a batch takes part in the others' exchanges."""
        if batch is not None:
            exchange.end_pass(self._device)
        else:
            exchange.join_without_batch(self._device, forward)


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
    average: WeightAverage | OptimizerModes | None = None
    if has_modes(whole_optimizer):
        check_modes(whole_optimizer, keys.ema_decay, gradient_exchange.keeps_ranks_alike)
        average = OptimizerModes(
            trained, whole_optimizer, optimizer.exchange if isinstance(optimizer, ShardedOptimizer) else None
        )
    elif keys.ema_decay is not None:
        average = WeightAverage(trained, keys.ema_decay)

    def seed_optimizer(step: int) -> None:
        seed_all(device, mix_seed(options.seed, 0 if are_reduced() else 1 + options.rank, step, OPTIMIZER))

    may_draw = not all(map(is_of_torch, members_of(whole_optimizer)))  # random numbers, which have to be the same on all ranks
    seed = seed_optimizer if may_draw else None
    splitter = _splitter(keys, model, device)
    change_of_config = as_function(keys.change_gradients, "change_gradients")

    def change(gradients: UpdateGradients) -> None:
        if change_of_config is not None:
            change_of_config(model=model, optimizer=optimizer)
        change_gradients(keys, gradients)

    changes = change_of_config is not None or changes_gradients(keys)
    update = Update(model, optimizer, change if changes else None, Skips(check, on_device), noise, seed)
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


def _module_settings(module: torch.nn.Module) -> str | None:
    """The settings of a module of PyTorch's, as text; None for others, whose extra_repr may name the rank."""
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else None


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
