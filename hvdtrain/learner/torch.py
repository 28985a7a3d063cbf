"""The learner for PyTorch."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy
import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.context import Loss, RunContext, running
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import CheckpointError, ConfigError, TrainingError
from hvdtrain.learner.base import Kind, LearnerKeys, NotFinite, Part, Shapes, as_function
from hvdtrain.learner.clock import CpuClock
from hvdtrain.learner.losses import TINY, Normalized, check_marked, check_same, minimized, normalized, nothing_to_minimize
from hvdtrain.learner.numbers import mixed_seed, widened
from hvdtrain.learner.outputs import by_sequence, check_outputs
from hvdtrain.learner.torch_clock import CudaClock
from hvdtrain.learner.torch_gradients import GradientStream
from hvdtrain.learner.torch_optimizer import make_optimizer
from hvdtrain.learner.torch_sharded import ShardedOptimizer
from hvdtrain.learner.torch_sync_batch_norm import Exchange, synchronize
from hvdtrain.learner.waiting import WaitingScores
from hvdtrain.reduce import Reducer
from hvdtrain.scores import Scores

WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
WRAPPED = (
    "get_model: expected the model itself, got it inside a {name}: hvdtrain reduces gradients itself. DataParallel "
    "copies the model to every GPU in every step, and its threads wait for Python's lock; PyTorch advises against it (a process "
    "for each GPU instead: python -m hvdtrain CONFIG ++ngpu 4)"
)


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
        optimizer: torch.optim.Optimizer | ShardedOptimizer,
        reducer: Reducer,
        *,
        device: torch.device,
        seed: tuple[int, int],
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        skips: int | None = None,
        forward_step: Callable[..., None] | None = None,
        batch_norm: Exchange | None = None,
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
        self._forward_step = forward_step
        self._skips = skips
        self._skipped = 0
        self._batch_norm = batch_norm
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = GradientStream(self._trained, reducer)
        self._clock = CudaClock() if device.type == "cuda" else CpuClock()
        self._epoch = 0
        self._step = 0
        self._has_batch = False
        self._normalized: Normalized | None = None
        self._counting: Any = None
        self._scores = WaitingScores(
            lambda tensors: torch.cat(tensors).tolist(), self._broken, at_once=device.type == "cpu", finite_only=skips is not None
        )
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
            self._end_of_batch_norms(batch, forward=True)
            divisors = self._start_counting(losses)
            self._gradients.begin()
            total = _total(losses or {}, divisors)
            if total is not None:
                total.backward()  # type: ignore[no-untyped-call]
            self._end_of_batch_norms(batch, forward=False)

    def update(self, learning_rate: float) -> None:
        if self._has_batch or self._reducer.updates_without_batch:
            with self._clock.span():
                self._gradients.finish()
                if self._counting is not None:
                    [counts] = self._reducer.finish_gradients(self._counting)
                    gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
                    torch._foreach_div_(gradients, counts.clamp(min=TINY)[0])
                if self._skips is None or self._is_finite():
                    self._apply(learning_rate)
                self.optimizer.zero_grad(set_to_none=True)
        self._step += 1

    def _apply(self, learning_rate: float) -> None:
        if self._clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._trained, self._clip_value)
        if self._clip_global_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._trained, self._clip_global_norm)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate * group.get("learning_rate_multiplier", 1.0)
        self.optimizer.step()

    def _is_finite(self) -> bool:
        """Whether all gradients are finite numbers. Where they were reduced, all ranks come to the same answer.

        Raises:
            TrainingError: too many updates in a row were left out.
        """
        gradients = [parameter.grad for parameter in self._trained if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, float("inf"))
        if bool(torch.stack(norms).isfinite().all()):
            self._skipped = 0
            return True
        self._skipped += 1
        if self._skips is not None and self._skipped > self._skips:
            names = [name for name, parameter in self.model.named_parameters() if _is_broken(parameter.grad)]
            error = TrainingError(
                f"num_allowed_consec_invalid_gradient_steps: expected finite gradients after {self._skips} were left out, "
                f"got others in step {self._step} of the training, for {', '.join(names)}"
            )
            error.on_every_rank = self._reducer.updates_without_batch  # gradients are the same on all ranks then
            raise error
        return False

    def evaluate(self, batch: Batch) -> None:
        with torch.no_grad():
            self._losses(batch, train=False)

    def forward(self, batch: Batch) -> list[dict[str, Array]]:
        if self._forward_step is None:
            raise ConfigError(["forward_step: expected a function in the config, got nothing"])
        self.model.eval()
        with torch.no_grad(), running(RunContext(self._epoch, self._step, False)) as context:
            self._forward_step(model=self.model, extern_data=self._extern_data(batch))
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

    def peak_memory(self) -> int | None:
        return torch.cuda.max_memory_reserved(self._device) if self._device.type == "cuda" else None

    def map_tensors(self, kind: Kind, change: Callable[[list[torch.Tensor]], list[torch.Tensor]]) -> None:
        tensors = [tensor.detach() for tensor in self._tensors(kind)]
        with torch.no_grad():
            for tensor, new in zip(tensors, change(tensors), strict=True):
                if new is not tensor:
                    tensor.copy_(new)

    def gather_state(self) -> None:
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.gather()

    def save(self, model_file: Path, optimizer_file: Path, progress: dict[str, Any], state: Any | None = None) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        model, optimizer = (self.model.state_dict(), self.optimizer.state_dict()) if state is None else state
        torch.save({"optimizer": optimizer, "param_names": names, **progress}, optimizer_file)
        torch.save({"model": model, **progress}, model_file)

    def copied(self) -> tuple[Any, Any]:
        return _copied(self.model.state_dict()), _copied(self.optimizer.state_dict())

    def load(self, model_file: Path, optimizer_file: Path | None) -> dict[str, Any]:
        stored = _load(model_file, self._device)
        try:
            self.model.load_state_dict(stored.pop("model"))
        except (KeyError, RuntimeError) as error:
            raise CheckpointError(f"{model_file}: expected the parameters of this config's model, got others: {error}") from None
        if optimizer_file is not None:
            self._load_optimizer(_load(optimizer_file, self._device).get("optimizer"), optimizer_file)
        return stored

    def preload(self, file: Path, entry: str | None, chosen: Callable[[Shapes, Shapes], dict[str, str]]) -> None:
        contents = _load(file, self._device)
        if entry is not None and isinstance(contents.get(entry), dict):
            contents = contents[entry]
        theirs = {name: tensor for name, tensor in contents.items() if isinstance(tensor, torch.Tensor)}
        ours = self.model.state_dict()
        pairs = chosen(_shapes(ours), _shapes(theirs))
        with torch.no_grad():
            for name, other in pairs.items():
                ours[name].copy_(theirs[other])  # shares its memory with the model's

    def save_own(self, file: Path, parts: Sequence[Part]) -> None:
        own: dict[str, Any] = {}
        for part in parts:
            if part != "optimizer":
                own[part] = [tensor.detach() for tensor in self._tensors(part)]
        if "optimizer" in parts:
            own["optimizer"] = self.optimizer.state_dict()
        torch.save(own, file)

    def load_own(self, file: Path) -> None:
        own = _load(file, self._device)
        self._load_optimizer(own.pop("optimizer", None), file)
        for kind, stored in own.items():
            self.map_tensors(kind, lambda _, stored=stored: stored)  # type: ignore[arg-type, misc]

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    def take_not_finite(self) -> list[NotFinite]:
        return self._scores.take_not_finite()

    def _broken(self) -> tuple[str, ...]:
        """The names of parameters that hold other than finite numbers."""
        return tuple(name for name, values in self.model.named_parameters() if not bool(values.isfinite().all()))

    def _load_optimizer(self, state: dict[str, Any] | None, file: Path) -> None:
        if state is None:
            return
        try:
            self.optimizer.load_state_dict(state)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"{file}: expected the state of this config's optimizer, got another: {error}") from None

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
        with running(RunContext(self._epoch, self._step, train)) as context:
            self._train_step(model=self.model, extern_data=self._extern_data(batch))
        check_marked(context.losses)
        sums = [loss.value.detach().sum(dtype=torch.float64) for loss in context.losses.values()]
        counts = [_count(loss).to(self._device) for loss in context.losses.values()]
        names = {name: train and name in minimized(context.losses) for name in context.losses}
        self._scores.add(names, torch.stack(sums + counts), self._step, batch.indices)
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

    def _extern_data(self, batch: Batch) -> dict[str, TorchData]:
        return {key: self._to_device(padded.values, padded.seq_lens) for key, padded in batch.data.items()}

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
    keys: LearnerKeys,
    reducer: Reducer,
    *,
    rank: int,
    local_rank: int,
    threads: int,
    seed: int,
    epoch: int,
    step: int,
    batch_norm: Communicator | None = None,
    sharded: Communicator | None = None,
) -> TorchLearner:
    """Build the model and the optimizer of a config. All ranks seed alike; weights still are to be broadcast from rank 0.

    Args:
        batch_norm: the ranks over which BatchNorm's statistics are taken, on a channel of their own; None: each by itself.
        sharded: the ranks among which the optimizer's state is divided; None: each has all of it.

    Raises:
        ConfigError: get_model returns no torch.nn.Module, or the optimizer cannot be made.
    """
    torch.set_num_threads(threads)
    device = _device(keys.device, local_rank)
    _seed_all(device, seed, 0, 0)
    model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=str(device))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError([f"get_model: expected it to return a torch.nn.Module, got {type(model).__name__}"])
    if isinstance(model, WRAPPERS):
        raise ConfigError([WRAPPED.format(name=type(model).__name__)])
    model.to(device)
    exchange: Exchange | None = None
    if batch_norm is not None:
        model, exchange = synchronize(model, batch_norm)
    optimizer = make_optimizer(keys.optimizer, model)
    return TorchLearner(
        model,
        as_function(keys.train_step, "train_step"),
        optimizer if sharded is None else ShardedOptimizer(optimizer, sharded),
        reducer,
        device=device,
        seed=(seed, rank),
        clip_global_norm=keys.gradient_clip_global_norm,
        clip_value=keys.gradient_clip,
        skips=keys.num_allowed_consec_invalid_gradient_steps,
        forward_step=as_function(keys.forward_step, "forward_step"),
        batch_norm=exchange,
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


def _copied(state: Any) -> Any:
    """A state dict with copies of its tensors, on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.detach().to("cpu", copy=True)
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, (list, tuple)) else state


def _array(value: Any) -> Array:
    """A sequence's output as numpy has it; bfloat16, which numpy does not know, as float32."""
    if isinstance(value, torch.Tensor):
        return numpy.asarray((value.float() if value.dtype == torch.bfloat16 else value).cpu())
    return numpy.asarray(value, dtype=object) if isinstance(value, (str, list)) else numpy.asarray(value)


def _is_broken(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and not bool(gradient.isfinite().all())


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


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
