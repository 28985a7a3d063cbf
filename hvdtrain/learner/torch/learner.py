"""The learner for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy
import torch

from hvdtrain.context import Loss, RunContext, running
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import FILE_SUFFIX, NotFinite, Then
from hvdtrain.learner.loss_scale import BrokenUpdates, LossScale
from hvdtrain.learner.marked import TINY, Normalized, by_sequence, check_marked, check_outputs, check_same, minimized, normalized
from hvdtrain.learner.pending_scores import WaitingScores
from hvdtrain.learner.reduce import Reducer
from hvdtrain.learner.torch.compile import Watch
from hvdtrain.learner.torch.device import Autocast, CudaClock, seed_all
from hvdtrain.learner.torch.gradients import GradientStream, LossGradients
from hvdtrain.learner.torch.state import TorchState, WeightAverage
from hvdtrain.learner.torch.sync_batch_norm import Exchange
from hvdtrain.learner.torch.tensors import count_of, extern_data_of, numbers_of, total_of, trained_of
from hvdtrain.learner.torch.update import GradientNoise, Optimizer, Update
from hvdtrain.runtime.scores import Scores
from hvdtrain.runtime.timer import CpuClock


class TorchLearner:
    """A torch.nn.Module, its optimizer and its losses.

    Args:
        noise: what is added to gradients.
        average: of the weights over time.
        seed: random numbers of a step (dropout) come from this, the rank and the number of the step, so that ranks differ
            and a continued training goes on with the same numbers.
        constants: names of parameters that checkpoints do not hold, as they always come from another model's file.
        autocast: what goes around the config's functions.
        scale: of the loss; None: it is left as it is.
        watch: what goes around whatever may have to compile the model.
    """

    file_suffix = FILE_SUFFIX["torch"]

    def __init__(
        self,
        model: torch.nn.Module,
        train_step: Callable[..., None],
        optimizer: Optimizer,
        reducer: Reducer,
        *,
        device: torch.device,
        seed: tuple[int, int],
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        noise: GradientNoise | None = None,
        skips: int | None = None,
        forward_step: Callable[..., None] | None = None,
        batch_norm: Exchange | None = None,
        constants: frozenset[str] = frozenset(),
        average: WeightAverage | None = None,
        autocast: Autocast = nullcontext,
        scale: LossScale | None = None,
        watch: Watch = nullcontext,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._train_step = train_step
        self._reducer = reducer
        self._device = device
        self._seed = seed
        self._forward_step = forward_step
        self._batch_norm = batch_norm
        self._average = average
        self._autocast = autocast
        self._scale = scale
        self._watch = watch
        state = TorchState(model, optimizer, device, average, scale, constants)
        self.map_tensors, self.gather_state, self.preload = state.map_tensors, state.gather_state, state.preload
        self.save, self.copied, self.load = state.save, state.copied, state.load
        self.save_own, self.load_own = state.save_own, state.load_own
        self._trained = trained_of(model)
        self._gradients = GradientStream(self._trained, reducer)
        self._update = Update(
            model,
            optimizer,
            clip_global_norm=clip_global_norm,
            clip_value=clip_value,
            noise=noise,
            scale=scale,
            broken=BrokenUpdates(skips, scale, same_on_all_ranks=reducer.updates_without_batch),
        )
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._epoch = 0
        self._step = 0
        self._updates = False  # whether the next update changes anything: it has a batch, here or on some rank
        self._means: Normalized | None = None
        self._counts: Any = 0.0
        self._counting: Any = None
        self._loss_gradients = LossGradients(self._trained)
        self._scores = WaitingScores(
            lambda tensors: torch.cat(tensors).tolist(), self._broken, at_once=device.type == "cpu", finite_only=skips is not None
        )
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())

    @property
    def loss_scale(self) -> float | None:
        return None if self._scale is None else self._scale.scale

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step
        if self._average is not None and not self._average.started:
            self._average.start()

    def backward(self, batch: Batch | None, then: Then = "update") -> None:
        self._updates = self._updates or batch is not None or self._reducer.updates_without_batch
        if self._updates:
            with self._clock.span(), self._watch():
                seed_all(self._device, *self._seed, self._step)
                losses = self._losses(batch, train=True) if batch is not None else None
                self._end_of_batch_norms(batch, forward=True)
                means = self._agree_on_means(losses)
                self._count(losses, means)
                if then == "update":
                    self._add_last(losses or {}, means)
                elif losses is not None:
                    self._add(losses, means)
                self._end_of_batch_norms(batch, forward=False)
        self._step += 1

    def update(self, learning_rate: float) -> None:
        if self._updates:
            with self._clock.span():
                self._gradients.finish()
                if self._counting is not None:
                    [counts] = self._reducer.finish_gradients(self._counting)
                    gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
                    torch._foreach_div_(gradients, counts.clamp(min=TINY)[0])
                self._update.apply(learning_rate, self._step - 1)
        self._updates = False

    def average_weights(self, updates: int) -> None:
        if self._average is not None:
            self._average.follow(updates)

    def averaged(self) -> AbstractContextManager[None]:
        return self._average.used() if self._average is not None and self._average.started else nullcontext()

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad(), self._watch():
            self._losses(batch, train=False)

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        if self._forward_step is None:
            raise ConfigError(["forward_step: expected a function in the config, got nothing"])
        self.model.eval()
        running_step = running(RunContext(self._epoch, self._step, False, seq_tags=batch.seq_tags))
        with torch.no_grad(), self._watch(), self._autocast(), running_step as context:
            self._forward_step(model=self.model, extern_data=extern_data_of(batch, self._device))
        check_outputs(context.outputs)
        outputs = {}
        for name, output in context.outputs.items():
            lengths = None if output.seq_lens is None else [int(length) for length in output.seq_lens]
            outputs[name] = [_array(row) for row in output.value], lengths
        return by_sequence(outputs, len(batch.indices))

    def take_scores(self) -> Scores:
        return self._scores.take()

    def take_step_seconds(self) -> float:
        return self._clock.take()

    def arrays(self) -> Iterator[tuple[str, Array]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to("cpu", torch.float32, copy=True).numpy()

    def peak_memory(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def take_not_finite(self) -> list[NotFinite]:
        return self._scores.take_not_finite()

    def _broken(self) -> tuple[str, ...]:
        """The names of parameters that hold other than finite numbers."""
        return tuple(name for name, values in self.model.named_parameters() if not bool(values.isfinite().all()))

    def _end_of_batch_norms(self, batch: Batch | None, forward: bool) -> None:
        """Collective, where BatchNorms are synchronized. A rank without a batch takes part in what the others exchange."""
        if self._batch_norm is not None and batch is not None:
            self._batch_norm.done(self._device)
        elif self._batch_norm is not None:
            self._batch_norm.stand_by(self._device, forward)

    def _losses(self, batch: Batch, train: bool) -> dict[str, Loss]:
        """Run the config's train_step and note the scores."""
        if self.model.training != train:
            self.model.train(train)
        running_step = running(RunContext(self._epoch, self._step, train, seq_tags=batch.seq_tags))
        with self._autocast(), running_step as context:
            self._train_step(model=self.model, extern_data=extern_data_of(batch, self._device))
        check_marked(context.losses)
        names = {name: train and name in minimized(context.losses) for name in context.losses}
        self._scores.add(names, numbers_of(context.losses, self._device), self._step, batch.indices)
        return context.losses

    def _agree_on_means(self, losses: dict[str, Loss] | None) -> Normalized:
        """Collective in the first step: a rank without a batch has to be told which losses are means."""
        own = None if losses is None else normalized(losses)
        if self._means is None:
            self._means = self._reducer.agree(own)
        if own is not None:
            check_same(self._means, own)
        return self._means

    def _count(self, losses: dict[str, Loss] | None, means: Normalized) -> None:
        """Add up the elements of the losses that are means, over this rank's batches since the last update."""
        if losses is not None and means.names:
            self._counts = self._counts + torch.stack([count_of(losses[name]) for name in means.names]).to(self._device)

    def _add(self, losses: dict[str, Loss], means: Normalized) -> None:
        """The gradients of a batch after which others are to come."""
        if means.names and not means.alone:
            self._loss_gradients.add(losses, means.names, self.loss_scale or 1.0)
        elif (total := total_of(losses, {}, self.loss_scale or 1.0)) is not None:
            total.backward()  # type: ignore[no-untyped-call]

    def _add_last(self, losses: dict[str, Loss], means: Normalized) -> None:
        """Collective. The gradients of the last batch before an update, which leave as soon as they are there."""
        divisors = self._start_counting(means)
        self._loss_gradients.combine(divisors)
        self._gradients.begin()
        if (total := total_of(losses, divisors, self.loss_scale or 1.0)) is not None:
            total.backward()  # type: ignore[no-untyped-call]

    def _start_counting(self, means: Normalized) -> dict[str, torch.Tensor]:
        """Collective. What the losses that are means are divided by: their number of elements over all batches and ranks.

        Where such a loss is the only one, gradients of its sum are as good: they are divided when both they and the count
        have come together, and no rank waits for the others between forward and backward. Then nothing is returned.
        """
        if not means.names:
            return {}
        counts = torch.zeros(len(means.names), dtype=torch.float64, device=self._device) + self._counts
        self._counts = 0.0
        counting = self._reducer.start_gradients([counts], name="loss_counts")
        if means.alone:
            self._counting = counting
            return {}
        [totals] = self._reducer.finish_gradients(counting)
        return dict(zip(means.names, totals.clamp(min=TINY), strict=True))


def _array(value: Any) -> Array:
    """A sequence's output as numpy has it; bfloat16, which numpy does not know, as float32."""
    if isinstance(value, torch.Tensor):
        return numpy.asarray((value.float() if value.dtype == torch.bfloat16 else value).cpu())
    return numpy.asarray(value, dtype=object) if isinstance(value, (str, list)) else numpy.asarray(value)
