"""The learner for PyTorch: it runs the config's functions and brings losses, gradients and the optimizer together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hvdtrain.context import Loss, RunContext, running
from hvdtrain.data.feed import Staging
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Exported, Layer, Observer, Then
from hvdtrain.learner.marked import by_sequence, check_marked, check_outputs, minimized
from hvdtrain.learner.meter import LearnerMeter
from hvdtrain.learner.torch.compile import Watch
from hvdtrain.learner.torch.device import Autocast, device_name, seed_all
from hvdtrain.learner.torch.gradients import Gradients
from hvdtrain.learner.torch.staging import await_copy, extern_data_of
from hvdtrain.learner.torch.state import TorchState
from hvdtrain.learner.torch.sync_batch_norm import Exchange
from hvdtrain.learner.torch.tensors import array_of, layers_of, numbers_of, shapes_in
from hvdtrain.learner.torch.update import Update


@dataclass(frozen=True)
class ConfigFunctions:
    """The config's model and the functions that use it, on one device.

    Attributes:
        forward_step: None if the config has none.
        autocast: makes the context in which the functions compute in half precision.
        watch: makes the context around whatever may compile the model.
        staging: copies batches to the device ahead; None: the device is the CPU.
    """

    model: torch.nn.Module
    train_step: Callable[..., None]
    forward_step: Callable[..., None] | None
    device: torch.device
    autocast: Autocast
    watch: Watch
    staging: Staging | None = None

    def losses(self, batch: Batch, epoch: int, step: int, train: bool) -> dict[str, Loss]:
        """Run train_step; return what it marks by name. Raises: ConfigError."""
        if self.model.training != train:
            self.model.train(train)
        run_context = running(RunContext(epoch, step, train, seq_tags=batch.seq_tags))
        with self.autocast(), run_context as context:
            self.train_step(model=self.model, extern_data=extern_data_of(batch, self.device))
        check_marked(context.losses)
        return context.losses

    def outputs(self, batch: Batch, epoch: int, step: int) -> list[dict[str, Array]]:
        """Run forward_step; return what it marks by name for each sequence. Raises: ConfigError."""
        if self.forward_step is None:
            raise ConfigError(["forward_step: expected a function in the config, got nothing"])
        self.model.eval()
        run_context = running(RunContext(epoch, step, False, seq_tags=batch.seq_tags))
        with torch.no_grad(), self.watch(), self.autocast(), run_context as context:
            self.forward_step(model=self.model, extern_data=extern_data_of(batch, self.device))
        check_outputs(context.outputs)
        outputs = {}
        for name, output in context.outputs.items():
            lengths = None if output.seq_lens is None else [int(length) for length in output.seq_lens]
            outputs[name] = [array_of(row) for row in output.value], lengths
        return by_sequence(outputs, len(batch.indices))


class TorchLearner:
    """A torch.nn.Module, its optimizer and its losses: `Learner` of `learner/base.py`.

    Args:
        functions: the config's.
        gradients: from losses to reduced gradients.
        update: from reduced gradients to new parameters.
        seed: the training's, and the rank. The random numbers of a step (dropout) come from these and the number of the step:
            ranks differ, and a training that continues from a checkpoint gets the same numbers.
        batch_norm: what BatchNorms exchange with other ranks; None: nothing.
    """

    def __init__(
        self,
        functions: ConfigFunctions,
        gradients: Gradients,
        update: Update,
        state: TorchState,
        meter: LearnerMeter,
        seed: tuple[int, int],
        batch_norm: Exchange | None = None,
    ) -> None:
        self.model = functions.model
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.device_name = device_name(functions.device)
        self.staging = functions.staging
        self.state = state
        self.meter = meter
        self.observer: Observer | None = None
        self._functions = functions
        self._gradients = gradients
        self._update = update
        self._seed = seed
        self._batch_norm = batch_norm
        self._device = functions.device
        self._epoch = 0
        self._step = 0
        self._is_update_due = False  # whether the next update changes anything: there is a batch for it, here or on some rank

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step
        self.state.start_average()

    def backward(self, batch: Batch | None, then: Then = "update") -> None:
        self._is_update_due = self._is_update_due or batch is not None or self._gradients.updates_without_batch
        if self._is_update_due:
            await_copy(batch)  # before the clock starts: this is no computing
            with self.meter.clock.span(), self._functions.watch():
                seed_all(self._device, *self._seed, self._step)
                losses = None
                if batch is not None:
                    losses = self._functions.losses(batch, self._epoch, self._step, train=True)
                    self._record(losses, batch, train=True)
                self._finish_batch_norms(batch, forward=True)
                self._gradients.add(losses, self._update.loss_factor, then)
                self._finish_batch_norms(batch, forward=False)
        self._step += 1

    def update(self, learning_rate: float) -> None:
        if self._is_update_due:
            with self.meter.clock.span():
                self._gradients.finish()
                if self.observer is not None:
                    self.observer(self._update.gradients())
                self._update.apply(learning_rate, self._step - 1)
        self._is_update_due = False

    def settle(self) -> None:
        self._update.settle()

    def evaluate(self, batch: Batch) -> None:
        await_copy(batch)
        with torch.no_grad(), self._functions.watch():
            self._record(self._functions.losses(batch, self._epoch, self._step, train=False), batch, train=False)

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        await_copy(batch)
        return self._functions.outputs(batch, self._epoch, self._step)

    def modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        yield from self.model.named_modules()

    def layers(self) -> Iterator[Layer]:
        return layers_of(self.model)

    def output_shapes(self, batch: Batch) -> dict[str, list[tuple[int, ...]]]:
        shapes: dict[str, list[tuple[int, ...]]] = {}

        def note(name: str, output: Any) -> None:
            shapes.setdefault(name, shapes_in(output))

        hooks = [
            module.register_forward_hook(lambda _, __, output, name=name: note(name, output)) for name, module in self.modules()
        ]
        try:
            self.evaluate(batch)
        finally:
            for hook in hooks:
                hook.remove()
        self.meter.take_scores()
        return shapes

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        from hvdtrain.learner.torch.export import export_model  # here: torch.export takes a while to import

        return export_model(self.model, lambda: self.evaluate(batch), folder)

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def _record(self, losses: dict[str, Loss], batch: Batch, train: bool) -> None:
        """Add a batch's losses to the scores."""
        names = {name: train and name in minimized(losses) for name in losses}
        self.meter.scores.add(names, numbers_of(losses, self._device), self._step, batch.indices)

    def _finish_batch_norms(self, batch: Batch | None, forward: bool) -> None:
        """Collective, if BatchNorms are synchronized. A rank without a batch takes part in what the others exchange."""
        if self._batch_norm is not None and batch is not None:
            self._batch_norm.done(self._device)
        elif self._batch_norm is not None:
            self._batch_norm.stand_by(self._device, forward)
