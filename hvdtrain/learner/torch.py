"""The learner for PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch

from hvdtrain.context import Loss, RunContext, running
from hvdtrain.data.types import Batch
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.base import Kind, LearnerKeys, as_function
from hvdtrain.learner.clock import CpuClock
from hvdtrain.learner.losses import (
    TINY,
    Normalized,
    WaitingScores,
    check_marked,
    check_same,
    minimized,
    normalized,
    nothing_to_minimize,
)
from hvdtrain.learner.numbers import mixed_seed, widened
from hvdtrain.learner.torch_clock import CudaClock
from hvdtrain.learner.torch_gradients import GradientStream
from hvdtrain.learner.torch_optimizer import make_optimizer
from hvdtrain.reduce import Reducer
from hvdtrain.scores import Scores


@dataclass
class TorchData:
    """One data key of a batch, as `train_step` gets it.

    Attributes:
        raw_tensor: on the device; (batch, time, ...). Strings stay a numpy array.
        seq_lens: int32 of shape (batch,), on the CPU.
    """

    raw_tensor: Any
    seq_lens: torch.Tensor

    @cached_property
    def mask(self) -> torch.Tensor:
        """True where a frame is not padding; shape (batch, time), on the device."""
        frames = torch.arange(self.raw_tensor.shape[1], device=self.raw_tensor.device)
        return frames[None, :] < self.seq_lens.to(self.raw_tensor.device, non_blocking=True)[:, None]


class TorchLearner:
    """A torch.nn.Module, its optimizer and its losses.

    Args:
        seed: random numbers of a step (dropout) come from this, the rank and the number of the step, so that ranks differ
            and a continued training goes on with the same numbers.
    """

    file_suffix = "pt"

    def __init__(
        self,
        model: torch.nn.Module,
        train_step: Callable[..., None],
        optimizer: torch.optim.Optimizer,
        reducer: Reducer,
        *,
        device: torch.device,
        seed: tuple[int, int],
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
        self._train_step = train_step
        self._reducer = reducer
        self._device = device
        self._seed = seed
        self._clip_global_norm = clip_global_norm
        self._clip_value = clip_value
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = GradientStream(self._trained, reducer)
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._epoch = 0
        self._step = 0
        self._has_batch = False
        self._normalized: Normalized | None = None
        self._counting: Any = None
        self._scores = WaitingScores(lambda tensors: torch.cat(tensors).tolist())
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._epoch = epoch
        self._step = step

    def backward(self, batch: Batch | None) -> None:
        self._has_batch = batch is not None
        if batch is None and not self._reducer.updates_without_batch:
            return
        with self._clock.span():
            _seed_all(self._device, *self._seed, self._step)
            losses = self._losses(batch, train=True) if batch is not None else None
            divisors = self._start_counting(losses)
            self._gradients.begin()
            total = _total(losses or {}, divisors)
            if total is not None:
                total.backward()  # type: ignore[no-untyped-call]

    def update(self, learning_rate: float) -> None:
        if self._has_batch or self._reducer.updates_without_batch:
            with self._clock.span():
                self._gradients.finish()
                if self._counting is not None:
                    [counts] = self._reducer.finish_gradients(self._counting)
                    gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
                    torch._foreach_div_(gradients, counts.clamp(min=TINY)[0])
                if self._clip_value is not None:
                    torch.nn.utils.clip_grad_value_(self._trained, self._clip_value)
                if self._clip_global_norm is not None:
                    torch.nn.utils.clip_grad_norm_(self._trained, self._clip_global_norm)
                for group in self.optimizer.param_groups:
                    group["lr"] = learning_rate * group.get("learning_rate_multiplier", 1.0)
                self.optimizer.step()
                self.optimizer.zero_grad(set_to_none=True)
        self._step += 1

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self._losses(batch, train=False)

    def take_scores(self) -> Scores:
        return self._scores.take()

    def take_step_seconds(self) -> float:
        return self._clock.take()

    def map_tensors(self, kind: Kind, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        tensors = [tensor.detach() for tensor in self._tensors(kind)]
        with torch.no_grad():
            for tensor, new in zip(tensors, change(tensors), strict=True):
                if new is not tensor:
                    tensor.copy_(new)

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any]) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        torch.save({"optimizer": self.optimizer.state_dict(), "param_names": names, **progress}, optimizer_file)
        torch.save({"model": self.model.state_dict(), **progress}, model_file)

    def load(self, model_file: Path, optimizer_file: Path) -> dict[str, Any]:
        stored = _load(model_file, self._device)
        try:
            self.model.load_state_dict(stored.pop("model"))
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{model_file}: expected the parameters of this config's model, got others: {error}") from None
        training = _load(optimizer_file, self._device)
        try:
            self.optimizer.load_state_dict(training["optimizer"])
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"{optimizer_file}: expected the state of this config's optimizer, got another: {error}"
            ) from None
        return stored

    def _losses(self, batch: Batch, train: bool) -> dict[str, Loss]:
        """Run the config's train_step and note the scores."""
        if self.model.training != train:
            self.model.train(train)
        data = {key: self._to_device(padded.values, padded.seq_lens) for key, padded in batch.data.items()}
        with running(RunContext(self._epoch, self._step, train)) as context:
            self._train_step(model=self.model, extern_data=data)
        check_marked(context.losses)
        sums = [loss.value.detach().sum(dtype=torch.float64) for loss in context.losses.values()]
        counts = [_count(loss).to(self._device) for loss in context.losses.values()]
        self._scores.add(tuple(context.losses), torch.stack(sums + counts))
        return context.losses

    def _start_counting(self, losses: dict[str, Loss] | None) -> dict[str, torch.Tensor]:
        """Collective. What the losses that are to be means are divided by: their number of elements over all ranks.

        Where such a loss is the only one, gradients of its sum are as good: they are divided when both they and the count
        have come together, and no rank waits for the others between forward and backward. Then nothing is returned.

        A rank without a batch takes part with zero elements; in the first step it has to be told what there is to count.
        """
        own = None if losses is None else normalized(losses)
        if self._normalized is None:
            self._normalized = self._reducer.agree(own)
        if own is not None:
            check_same(self._normalized, own)
        if not self._normalized.names:
            return {}
        zero = torch.zeros((), dtype=torch.float64)
        counts = torch.stack([_count(losses[name]) if losses else zero for name in self._normalized.names])
        counting = self._reducer.start_gradients([counts.to(self._device)], name="loss_counts")
        if self._normalized.alone:
            self._counting = counting
            return {}
        [totals] = self._reducer.finish_gradients(counting)
        return dict(zip(self._normalized.names, totals.clamp(min=TINY), strict=True))

    def _to_device(self, values: numpy.ndarray[Any, Any], seq_lens: numpy.ndarray[Any, Any]) -> TorchData:
        if values.dtype == object:
            return TorchData(values, torch.from_numpy(seq_lens))
        tensor = torch.from_numpy(widened(values))
        if self._device.type == "cuda":
            tensor = tensor.pin_memory().to(self._device, non_blocking=True)
        return TorchData(tensor, torch.from_numpy(seq_lens))

    def _tensors(self, kind: Kind) -> list[torch.Tensor]:
        if kind == "parameters":
            return list(self._trained)
        if kind == "frozen":
            return [parameter for parameter in self.model.parameters() if not parameter.requires_grad]
        floating = kind == "statistics"
        return [buffer for buffer in self.model.buffers() if buffer.is_floating_point() == floating]


def build_torch_learner(
    keys: LearnerKeys, reducer: Reducer, *, rank: int, local_rank: int, threads: int, seed: int, epoch: int, step: int
) -> TorchLearner:
    """Build the model and the optimizer of a config. All ranks seed alike; weights still are to be broadcast from rank 0.

    Raises:
        ConfigError: get_model returns no torch.nn.Module, or the optimizer cannot be made.
    """
    torch.set_num_threads(threads)
    device = _device(keys.device, local_rank)
    _seed_all(device, seed, 0, 0)
    model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=str(device))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError([f"get_model: expected it to return a torch.nn.Module, got {type(model).__name__}"])
    model.to(device)
    return TorchLearner(
        model,
        as_function(keys.train_step, "train_step"),
        make_optimizer(keys.optimizer, model),
        reducer,
        device=device,
        seed=(seed, rank),
        clip_global_norm=keys.gradient_clip_global_norm,
        clip_value=keys.gradient_clip,
    )


def _device(wanted: str | None, local_rank: int) -> torch.device:
    count = torch.cuda.device_count()
    if wanted is None:
        wanted = "cuda" if count else "cpu"
    if wanted in ("cuda", "gpu"):
        if not count:
            raise ConfigError([f"device: expected a CUDA device for {wanted!r}, got none on this host"])
        wanted = f"cuda:{local_rank % count}"
    try:
        device = torch.device(wanted)
    except RuntimeError:
        raise ConfigError([f"device: expected cpu, cuda or cuda:N, got {wanted!r}"]) from None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _total(losses: dict[str, Loss], divisors: dict[str, torch.Tensor]) -> torch.Tensor | None:
    """The scalar to differentiate; None for a rank without a batch."""
    total: torch.Tensor | None = None
    for name, loss in minimized(losses).items():
        term = loss.value.sum() * loss.scale
        if name in divisors:
            term = term / divisors[name].to(term.dtype)
        total = term if total is None else total + term
    if losses and (total is None or not total.requires_grad):
        raise nothing_to_minimize()
    return total


def _count(loss: Loss) -> torch.Tensor:
    """How many elements a loss's sum goes over."""
    if loss.count is None:
        return torch.tensor(float(loss.value.numel()), dtype=torch.float64)
    return torch.as_tensor(loss.count).detach().sum(dtype=torch.float64)


def _seed_all(device: torch.device, *parts: int) -> None:
    """Seed torch, Python and numpy with a number mixed from the parts."""
    mixed = mixed_seed(*parts)
    # The generators in use only: torch.manual_seed sees to all kinds of devices, which takes a hundred times as long.
    torch.default_generator.manual_seed(mixed)
    if device.type == "cuda":
        torch.cuda.manual_seed(mixed)
    random.seed(mixed)
    numpy.random.seed(mixed)


def _load(path: Path, device: torch.device) -> dict[str, Any]:
    """A checkpoint's contents; no code in it is run (`weights_only`)."""
    try:
        contents = torch.load(path, map_location=device, weights_only=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:
        raise CheckpointError(f"{path}: expected a whole checkpoint, got one that cannot be read: {error}") from None
    if not isinstance(contents, dict):
        raise CheckpointError(f"{path}: expected a checkpoint of hvdtrain, got a {type(contents).__name__}")
    return contents
