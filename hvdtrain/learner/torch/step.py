"""The learner for PyTorch: a step from a batch to losses, gradients and an update."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from typing import Any

import torch

from hvdtrain.context import Loss
from hvdtrain.data.randomness import EVALUATION, StepSeeds, mix_seed
from hvdtrain.data.types import Batch
from hvdtrain.errors import ConfigError, first_few
from hvdtrain.learner.attributes import kinds_of
from hvdtrain.learner.base import Layer, Learner
from hvdtrain.learner.marks import MarksOfSteps
from hvdtrain.learner.meter import BatchOutputs, Meter, scales_of
from hvdtrain.learner.model_state import BUFFERS
from hvdtrain.learner.torch.assembly import Assembly, BatchNormExchange
from hvdtrain.learner.torch.config_functions import ConfigFunctions
from hvdtrain.learner.torch.device import device_name, free_memory, is_out_of_memory, seed_all
from hvdtrain.learner.torch.gradients import Gradients
from hvdtrain.learner.torch.inspect import layers_of
from hvdtrain.learner.torch.state import TorchState
from hvdtrain.learner.torch.tensors import await_copy, named_trained, numbers_of, with_parts
from hvdtrain.learner.torch.update import Update
from hvdtrain.runtime import log


class TorchLearner(Learner):
    """A torch.nn.Module, its optimizer and its losses.

    Args:
        functions: the config's.
        gradients: from losses to reduced gradients.
        update: from reduced gradients to new parameters.
        assembly: what it is built from.
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
        assembly: Assembly,
    ) -> None:
        self.model = functions.model
        super().__init__(state, meter, seed)
        self._splitter = assembly.splitter
        self.optimizer = update.optimizer
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.device_name = device_name(functions.device)
        self.staging = functions.staging
        self._functions = functions
        self._gradients = gradients
        self._updater = update
        self._seeds = StepSeeds(1, *seed)
        self._marks = MarksOfSteps()
        self._batch_norm = assembly.batch_norm
        self._device = functions.device
        self._begins_update = True  # whether the next step is the first of an update
        self._has_warned = False  # of an evaluation that changes the model
        self._is_first = True  # whether no step was computed yet
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
                losses = None
                marks = None
                if batch is not None and self._splitter is not None:
                    self._splitter.run(batch, self._add_piece)
                elif batch is not None:
                    losses = self._functions.losses(batch, self._epoch, self._step, train=True)
                    if self._is_first:
                        self._check_has_no_gradients()
                    marks = self._marks.marks_of(losses)
                    self._record(losses, batch, marks.scales)
                if self._batch_norm is not None:
                    self._finish_batch_norms(self._batch_norm, batch, forward=True)
                self._gradients.add(losses, marks, self._updater.loss_factor, completes_update)
                if self._batch_norm is not None:
                    self._finish_batch_norms(self._batch_norm, batch, forward=False)
        self._step += 1

    def _check_has_no_gradients(self) -> None:
        """Before the first backward. Raises: ConfigError, if the config's functions have called it."""
        self._is_first = False
        gradients = {name: parameter.grad for name, parameter in named_trained(self.model).items() if parameter.grad is not None}
        if found := [name for name, gradient in gradients.items() if gradient.norm()]:  # zeros add nothing
            raise ConfigError.of(
                "wrong-result",
                "train_step: expected no gradients before those of the marked losses, which hvdtrain computes, got one of "
                f"{found[0]} (call no backward; torch.autograd.grad returns gradients without adding them up)",
            )

    def _update(self, learning_rate: float) -> None:
        if self._is_update_due:
            with self.meter.clock.span():
                self._gradients.finish()
                if self.observer is not None:
                    self.observer(self._updater.gradients())
                self._updater.apply(learning_rate, self._step - 1)
        self._is_update_due = False

    @contextmanager
    def evaluating(self, dataset: str) -> Iterator[None]:
        before = self._buffer_digests()
        with super().evaluating(dataset):
            yield
        changed = [name for name, digest in self._buffer_digests().items() if digest != before.get(name)]
        if changed and not self._has_warned:
            self._has_warned = True
            log.warning(
                f"{dataset}: evaluating it changed tensors of the model: {first_few(changed, 5)} (change them only where "
                "model.training is true: else they depend on what was evaluated, and each rank goes on with its own)"
            )

    def _buffer_digests(self) -> dict[str, bytes]:
        named = [zip(self.state.tensors(role), self.state.digests(role), strict=True) for role in BUFFERS]
        return dict(chain.from_iterable(named))

    def flush(self) -> None:
        super().flush()
        self._updater.flush()

    def evaluate(self, batch: Batch) -> None:
        await_copy(batch)
        self._seed_evaluation(batch)
        with torch.no_grad(), self._functions.watch():
            self._record(self._functions.losses(batch, self._epoch, self._step, False, self.dataset), batch)

    @torch.no_grad()
    def observe(self, batches: Iterable[Batch | None]) -> None:
        """Compute the losses of batches in training mode, which change buffers only. Collective, as BatchNorms may be."""
        for number, batch in enumerate(batches):
            await_copy(batch)
            with self._functions.watch():
                seed_all(self._device, self._seeds.number(self._step + number))
                if batch is not None:
                    self._functions.losses(batch, self._epoch, self._step + number, train=True)
                if self._batch_norm is not None:
                    self._finish_batch_norms(self._batch_norm, batch, forward=True)

    def forward(self, batch: Batch) -> BatchOutputs:
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

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def try_batch(self, batch: Batch) -> bool:
        fits = True
        with self.trial(batch) as step:
            try:
                step()
            except BaseException as error:
                if not is_out_of_memory(error):
                    raise
                fits = False
        free_memory(self._device)
        return fits

    @contextmanager
    def trial(self, batch: Batch) -> Iterator[Callable[[], None]]:
        """Buffers are restored at the end."""
        await_copy(batch)
        buffers = self._copy_buffers()

        def step() -> None:
            losses = self._functions.losses(batch, self._epoch, self._step, train=True)
            self._gradients.compute(losses, self._marks.marks_of(losses), self._updater.loss_factor)

        with nullcontext() if self._batch_norm is None else self._batch_norm.pause():
            yield step
        self._restore_buffers(buffers)

    def _add_piece(self, piece: Batch) -> None:
        """Compute the gradients of a batch, or of a piece of one that did not fit, and its scores."""
        buffers = self._copy_buffers()
        try:
            losses = self._functions.losses(piece, self._epoch, self._step, train=True)
            if self._is_first:
                self._check_has_no_gradients()
            marks = self._marks.marks_of(losses)
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

    def _finish_batch_norms(self, exchange: BatchNormExchange, batch: Batch | None, forward: bool) -> None:
        """Collective. A rank without a batch takes part in the others' exchanges."""
        if batch is not None:
            exchange.end_pass(self._device)
        else:
            exchange.join_without_batch(self._device, forward)


def _module_settings(module: torch.nn.Module) -> str | None:
    """The settings of a module of PyTorch's, as text; None for others, whose extra_repr may name the rank."""
    return module.extra_repr() if type(module).__module__.startswith("torch.nn.") else None
