"""Conversions between numpy and PyTorch: batches to tensors and to the GPU, losses to sums and counts, outputs to arrays.

The reading thread copies batches into pinned memory, and the training thread starts their copy to the device one batch ahead, on
a separate stream. So the copy runs while the device computes the previous step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy
import torch
from torch.autograd.graph import _engine_run_backward

from hvdtrain.config.absent import absent
from hvdtrain.config.plugins import Registry
from hvdtrain.context import Loss
from hvdtrain.data.types import Array, Batch, Padded
from hvdtrain.errors import ConfigError
from hvdtrain.learner.meter import nothing_to_minimize
from hvdtrain.learner.precision import widen
from hvdtrain.learner.torch.device import is_out_of_memory
from hvdtrain.learner.torch.trees import moved, pinned, pinned_copy, sent, tensors_in

Factor = float | torch.Tensor
"""A number, or a scalar on the device."""


def named_trained(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The trained parameters by name, a shared one by its first name; in the model's order."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def trained_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The trained parameters, in the model's order."""
    return list(named_trained(model).values())


def zeros(count: int, local_rank: int) -> torch.Tensor:
    """N float32 zeros, on this rank's GPU if there is one."""
    gpus = torch.cuda.device_count()
    return torch.zeros(count, device=f"cuda:{local_rank % gpus}" if gpus else "cpu")


def size(tensor: torch.Tensor) -> int:
    """A tensor's bytes."""
    return tensor.nbytes


@contextmanager
def preserve_state() -> Iterator[None]:
    """Restore, after the `with` block, PyTorch's global state that a training, or reading its config, may change."""
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    generators = torch.get_rng_state(), torch.cuda.get_rng_state_all() if on_gpu else []
    threads = torch.get_num_threads()
    dtype = torch.get_default_dtype()
    precision = torch.get_float32_matmul_precision()
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32
    device = torch.cuda.current_device() if on_gpu else None
    try:
        yield
    finally:
        torch.set_rng_state(generators[0])
        if on_gpu:
            torch.cuda.set_rng_state_all(generators[1])
            torch.cuda.set_device(device)
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        # Setting it imports torch._inductor even if nothing changes, which takes a second, and triton, which can crash next to
        # TensorFlow.
        if deterministic != (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()):
            torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = cudnn


def wait_for(tensor: torch.Tensor) -> None:
    """Wait until a tensor has been computed: on a GPU, operations return before they are finished."""
    tensor.reshape(-1)[:1].tolist()


@dataclass
class TorchData:
    """One data key of a batch, as passed to `train_step`.

    Attributes:
        raw_tensor: shape (batch, time, ...), on the device. Strings remain a numpy array.
        seq_lens: int32 of shape (batch,), on the CPU.
        device_seq_lens: the same on the device, copied together with the frames.
    """

    raw_tensor: Any
    seq_lens: torch.Tensor
    device_seq_lens: torch.Tensor
    _mask: torch.Tensor | None = field(default=None, init=False, repr=False)  # (a cached_property would take a lock)

    @property
    def mask(self) -> torch.Tensor:
        """True where a frame is not padding; shape (batch, time), on the device."""
        if self._mask is None:
            size = self.raw_tensor.shape[1]
            seq_lens = self.device_seq_lens
            if seq_lens.device.type == "cpu":  # numpy takes a third of the time for so few numbers
                self._mask = torch.from_numpy(numpy.arange(size, dtype=numpy.int32) < seq_lens.numpy()[:, None])
            else:
                self._mask = torch.arange(size, device=seq_lens.device)[None, :] < seq_lens[:, None]
        return self._mask


TENSORS: Registry[type] = Registry("tensors", {"Padded": TorchData})
"""By the name of a class of arrays in a batch, the dataclass that `train_step` gets, made of raw_tensor, seq_lens and
device_seq_lens as in `TorchData`."""

Data = Any
"""One of these."""


def tensors_of(batch: Batch) -> dict[str, Data]:
    """The batch's arrays as CPU tensors that share their memory, by data key. Strings remain numpy arrays."""
    if batch.collate is not None:
        return {}
    return {key: _data_of(padded) for key, padded in batch.data.items()}


def _data_of(padded: Padded) -> Data:
    seq_lens = torch.from_numpy(padded.seq_lens)
    kind = padded.values.dtype.kind
    values: Any = padded.values
    if kind != "O":
        values = torch.from_numpy(widen(values) if kind == "u" else values)
    name = type(padded).__name__
    if name not in TENSORS:
        raise ConfigError.of("missing-package", f"packed: expected False, got True{absent(name)}")
    return TENSORS[name](values, seq_lens, seq_lens)


def with_parts(losses: Mapping[str, Loss], batch: Batch) -> dict[str, Loss]:
    """The losses, and for a batch from a mix of datasets, those of the sequences of each dataset as errors, `loss.dataset`.

    A loss is left out if it is unknown which of its elements belong to a sequence.

    Raises:
        ConfigError: the seq_lens of a loss do not fit it.
    """
    all_losses = dict(losses)
    if batch.parts is None:
        return all_losses
    numbers = torch.from_numpy(batch.parts.numbers)
    if batch.joined is not None:  # the frames take the place of sequences
        numbers = numbers.repeat_interleave(torch.from_numpy(batch.joined))
    for name, loss in losses.items():
        value = loss.value.detach()
        count = loss.count
        if batch.joined is not None and value.shape[:2] == (1, len(numbers)):
            value = value[0]
        owners = _owners(name, loss, value.shape, numbers, batch.joined is not None)
        if owners is None:
            continue
        for number in numpy.unique(batch.parts.numbers).tolist():
            # A count is one number for each sequence, as `_owners` has checked.
            part_count = None if count is None else _select(torch.as_tensor(count), numbers == number)
            all_losses[f"{name}.{batch.parts.names[number]}"] = Loss(
                _select(value, owners == number), 0.0, True, False, part_count
            )
    return all_losses


def _select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The values that a mask on the CPU selects. Indexing with the mask itself would wait for a GPU, to count them."""
    return values.index_select(0, mask.nonzero()[:, 0].to(values.device, non_blocking=True))


def _owners(name: str, loss: Loss, shape: Sequence[int], numbers: torch.Tensor, are_frames: bool) -> torch.Tensor | None:
    """The number of the dataset of every element on the first axis of a loss; None: unknown.

    Args:
        numbers: the number of the dataset of every sequence, or of every frame of joined pieces.
    """
    if loss.seq_lens is None or (loss.count is not None and getattr(loss.count, "shape", None) != numbers.shape):
        return None
    if are_frames:
        return numbers if shape[:1] == numbers.shape else None
    if isinstance(loss.seq_lens, int):
        lengths = torch.full_like(numbers, loss.seq_lens)
    else:
        lengths = torch.as_tensor(loss.seq_lens).cpu().long()
    if len(shape) >= 2 and shape[0] == len(numbers) == len(lengths):
        return numbers  # padded
    if lengths.shape != numbers.shape or shape[:1] != (int(lengths.sum()),):
        raise ConfigError.of(
            "wrong-result",
            "train_step: expected a loss with the elements of all sequences, one after the other, for the seq_lens in "
            f"mark_as_loss(..., {name!r}), {lengths.tolist()!r:.60}, got one of shape {tuple(shape)}",
        )
    return numbers.repeat_interleave(lengths)


def means_of_items(losses: Mapping[str, Loss], count: int) -> dict[str, Loss]:
    """Those losses of a collated batch that are one number without a count, as the means over its items that they are: their
    weight is the number of items."""
    return {
        name: Loss(_sum(loss.value) * count, loss.scale, loss.as_error, not loss.as_error, count, loss.seq_lens)
        for name, loss in losses.items()
        if loss.value.ndim == 0 and loss.count is None
    }


def numbers_of(losses: Mapping[str, Loss], device: torch.device) -> torch.Tensor | list[float]:
    """The losses' sums, then their counts, in float64: a tensor on a GPU, which nothing waits for, and numbers on a CPU."""
    sums, counts = [], []
    for loss in losses.values():
        sums.append(_sum_of(loss.value))
        counts.append(count_of(loss))
    return _together(sums + counts, device)


def counts_of(losses: Iterable[Loss], device: torch.device) -> torch.Tensor | list[float]:
    """The numbers of elements of losses: float64 of shape (losses,) on a GPU, and numbers on a CPU."""
    return _together([count_of(loss) for loss in losses], device)


def count_of(loss: Loss) -> float | torch.Tensor:
    """The number of elements of a loss; a scalar where it is on the device."""
    count = loss.value.numel() if loss.count is None else loss.count
    return float(count) if isinstance(count, (int, float)) else _sum_of(torch.as_tensor(count))


def _sum_of(values: torch.Tensor) -> float | torch.Tensor:
    """The sum in float64; a scalar where it is on the device."""
    total = values.detach().sum(dtype=torch.float64)
    return total.item() if total.is_cpu else total


def _together(numbers: list[float | torch.Tensor], device: torch.device) -> torch.Tensor | list[float]:
    """Numbers as a float64 tensor on a GPU; as they are on a CPU. One from the CPU is created on the GPU instead of copied, as a
    copy would wait for the device."""
    if device.type == "cpu":
        return list(map(float, numbers))
    return torch.stack(
        [
            number if isinstance(number, torch.Tensor) else torch.full((), number, dtype=torch.float64, device=device)
            for number in numbers
        ]
    )


def terms_of(losses: Mapping[str, Loss], minimized: Iterable[str], scale: Factor) -> Iterator[tuple[str, torch.Tensor]]:
    """By name, the minimized losses: their sums, times their scales, times the scale of all losses."""
    for name in minimized:
        loss = losses[name]
        total = _sum(loss.value)
        factor = loss.scale * scale
        is_one = isinstance(factor, (int, float)) and factor == 1  # no kernel for it, nor for its gradient
        yield name, total if is_one else total * factor


def total_of(
    losses: Mapping[str, Loss], minimized: Iterable[str], divisors: Mapping[str, torch.Tensor], scale: Factor
) -> torch.Tensor:
    """The scalar to differentiate.

    Args:
        minimized: the names of those that are.
        divisors: those of the normalized losses, by name.

    Raises:
        ConfigError: no loss depends on a parameter.
    """
    total: torch.Tensor | None = None
    for name, term in terms_of(losses, minimized, scale):
        if name in divisors:
            term = term / divisors[name].to(term.dtype)
        total = term if total is None else total + term
    if total is None or not total.requires_grad:
        raise nothing_to_minimize()
    return total


def run_backward(total: torch.Tensor) -> None:
    """The backward of a scalar. It is `total.backward()` without its checks of arguments, which take as long as a small layer."""
    if type(total) is torch.Tensor and not total.is_complex():  # PyTorch refuses complex ones
        ones = (torch.ones_like(total),)
        _engine_run_backward((total,), ones, False, False, (), allow_unreachable=True, accumulate_grad=True)
    else:
        total.backward()  # type: ignore[no-untyped-call]


def array_of(value: Any) -> Array:
    """One sequence's output as an array; bfloat16, which numpy does not have, becomes float32."""
    if isinstance(value, torch.Tensor):
        return numpy.asarray((value.float() if value.dtype == torch.bfloat16 else value).cpu())
    return numpy.asarray(value, dtype=object) if isinstance(value, (str, list)) else numpy.asarray(value)


def _sum(values: torch.Tensor) -> torch.Tensor:
    wide = values.float() if values.dtype in (torch.float16, torch.bfloat16) else values
    return wide.sum() if wide.ndim else wide


@dataclass(frozen=True, kw_only=True)
class PinnedBatch(Batch):
    """A batch in pinned memory, from which the device copies directly. `data` has the same arrays."""

    tensors: Mapping[str, Data]


@dataclass(frozen=True, kw_only=True)
class SentBatch(Batch):
    """A batch that is being copied to the device.

    Attributes:
        tensors: on the device.
        copied: recorded after the copy.
    """

    tensors: Mapping[str, Data]
    copied: torch.cuda.Event


def _fields(batch: Batch) -> dict[str, Any]:
    """All fields of `Batch`, so that none is lost when one is added there."""
    return {field.name: getattr(batch, field.name) for field in fields(Batch)}


class CudaStaging:
    """`Staging` of data/read_ahead.py for a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, batch: Batch) -> PinnedBatch:
        tensors = {key: _pin(data) for key, data in tensors_of(batch).items()}
        data = {  # not the arrays that were read, which would take the memory twice
            key: replace(batch.data[key], values=_values(data), seq_lens=data.seq_lens.numpy()) for key, data in tensors.items()
        }
        if batch.collate is not None:
            return PinnedBatch(**{**_fields(batch), "tree": pinned(batch.tree)}, tensors={})
        return PinnedBatch(**{**_fields(batch), "data": data}, tensors=tensors)

    def send(self, batch: Batch) -> PinnedBatch | SentBatch:
        """Start the copy to the device. Where it does not fit beside the step that runs, the batch stays in pinned memory until
        its own step, which may be split.
        """
        pinned = batch if isinstance(batch, PinnedBatch) else self.pin(batch)
        try:
            with torch.cuda.stream(self._stream):
                tensors = {key: _send(data, self._device) for key, data in pinned.tensors.items()}
                tree = sent(pinned.tree, self._device)
                copied = self._stream.record_event()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            return pinned
        return SentBatch(**{**_fields(pinned), "tree": tree}, tensors=tensors, copied=copied)


def await_copy(batch: Batch | None) -> None:
    """Make later kernels wait for a batch's copy, if it was sent ahead. The caller does not wait."""
    if isinstance(batch, SentBatch):
        stream = torch.cuda.current_stream()
        stream.wait_event(batch.copied)
        of_data = [tensor for data in batch.tensors.values() for tensor in (data.raw_tensor, data.device_seq_lens)]
        for tensor in (*of_data, *tensors_in(batch.tree)):
            if isinstance(tensor, torch.Tensor) and tensor.is_cuda:
                tensor.record_stream(stream)  # so that its memory is not reused before these kernels have finished


def extern_data_of(batch: Batch, device: torch.device) -> Any:
    """The tensors to pass to `train_step`, by data key, or what `collate` returned; call `await_copy` first."""
    if batch.collate is not None:
        return batch.tree if device.type == "cpu" else moved(batch.tree, device)
    if isinstance(batch, SentBatch):
        return dict(batch.tensors)
    tensors = tensors_of(batch)
    if device.type == "cpu":
        return tensors
    return {key: _send(_pin(data), device) for key, data in tensors.items()}


def _pin(data: Data) -> Data:
    values = data.raw_tensor
    seq_lens = pinned_copy(data.seq_lens)
    values = pinned_copy(values) if isinstance(values, torch.Tensor) else values
    return replace(data, raw_tensor=values, seq_lens=seq_lens, device_seq_lens=seq_lens)


def _send(data: Data, device: torch.device) -> Data:
    values = data.raw_tensor
    seq_lens = data.seq_lens.to(device, non_blocking=True)
    values = values.to(device, non_blocking=True) if isinstance(values, torch.Tensor) else values
    return replace(data, raw_tensor=values, device_seq_lens=seq_lens)


def _values(data: Data) -> Array:
    return data.raw_tensor.numpy() if isinstance(data.raw_tensor, torch.Tensor) else data.raw_tensor
