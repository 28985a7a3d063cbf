"""A data key of a batch without padding, and what models do with it.

Attention, convolutions and recurrent layers treat every sequence by itself, without a frame of padding.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hvdtrain.data.types import Array

STEP_COST = 3
"""The cost of a time step of a recurrent layer on a CPU, apart from its sequences, in sequences."""

CALL_COST = 50
"""The cost of calling a recurrent layer on a CPU, apart from its time steps, in sequences of one step."""


@dataclass
class PackedData:
    """One data key of a batch without padding, as passed to `train_step`.

    The methods take values with the same frames as `raw_tensor`, such as the output of a layer.

    Attributes:
        raw_tensor: shape (frames, ...), the frames of one sequence after the other, on the device. Strings remain a numpy array.
        seq_lens: int32 of shape (batch,), on the CPU.
        device_seq_lens: the same on the device.
    """

    raw_tensor: Any
    seq_lens: torch.Tensor
    device_seq_lens: torch.Tensor

    @cached_property
    def offsets(self) -> torch.Tensor:
        """Where each sequence begins, then the number of frames: int32 of shape (batch + 1,), on the device."""
        return nn.functional.pad(self.device_seq_lens.cumsum(0, dtype=torch.int32), (1, 0))

    @cached_property
    def max_seq_len(self) -> int:
        """The number of frames of the longest sequence."""
        return int(self.seq_lens.max())

    @cached_property
    def num_frames(self) -> int:
        """The number of frames of all sequences."""
        return int(self.seq_lens.sum())

    @cached_property
    def owners(self) -> torch.Tensor:
        """The number of every frame's sequence in the batch; int64 of shape (frames,), on the device."""
        numbers = torch.arange(len(self.seq_lens), device=self.device_seq_lens.device)
        return numbers.repeat_interleave(self.device_seq_lens, output_size=self.num_frames)

    @cached_property
    def positions(self) -> torch.Tensor:
        """The number of every frame in its sequence; int64 of shape (frames,), on the device."""
        return torch.arange(self.num_frames, device=self.offsets.device) - self.offsets[self.owners]

    def with_values(self, values: torch.Tensor, seq_lens: torch.Tensor | None = None) -> PackedData:
        """Other values as packed data, with other lengths of the sequences if they changed."""
        if seq_lens is None or seq_lens is self.seq_lens:
            data = copy.copy(self)  # with what is known by now about the places of frames
            data.raw_tensor = values
            return data
        seq_lens = seq_lens.to("cpu", torch.int32)
        return PackedData(values, seq_lens, seq_lens.to(values.device))

    def split(self, values: torch.Tensor | None = None) -> Sequence[torch.Tensor]:
        """The values of every sequence."""
        return torch.split(self._values(values), self.seq_lens.tolist())

    def padded(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """The values with padding, for a part of a model that cannot do without: shape (batch, time, ...)."""
        values = self._values(values)
        places = self._places_from(torch.arange(len(self.seq_lens)) * self.max_seq_len)
        rows = values.new_zeros((len(self.seq_lens) * self.max_seq_len, *values.shape[1:]))
        return rows.index_copy(0, places, values).reshape(len(self.seq_lens), self.max_seq_len, *values.shape[1:])

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """The values without padding of a tensor of shape (batch, time, ...)."""
        return padded[self.owners, self.positions]

    def nested(self, values: torch.Tensor | None = None) -> torch.Tensor:
        """The values as a jagged tensor of torch.nested, of shape (batch, time of each sequence, ...)."""
        return torch.nested.nested_tensor_from_jagged(
            self._values(values), self.offsets.long(), min_seqlen=int(self.seq_lens.min()), max_seqlen=self.max_seq_len
        )

    def packed_sequence(self, values: torch.Tensor | None = None) -> PackedSequence:
        """The values as PyTorch's recurrent layers take them: the first frames of all sequences, then the second ones, ..."""
        order, places, batch_sizes = self._time_major
        return PackedSequence(self._values(values)[places], batch_sizes, order, _inverse(order))

    def from_packed_sequence(self, sequence: PackedSequence) -> torch.Tensor:
        """The output of a recurrent layer for `packed_sequence`, in the order of the frames here."""
        _, places, _ = self._time_major
        return sequence.data[_inverse(places)]

    def attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, is_causal: bool = False, dropout: float = 0.0
    ) -> torch.Tensor:
        """Scaled dot-product attention within every sequence.

        Args:
            query, key, value: shape (frames, heads, features).

        Returns:
            Shape (frames, heads, features).
        """
        attend = partial(nn.functional.scaled_dot_product_attention, dropout_p=dropout, is_causal=is_causal)
        if query.device.type == "cuda":
            attended = attend(*(self.nested(values).transpose(1, 2) for values in (query, key, value)))
            return attended.transpose(1, 2).values()
        of_sequences = zip(*(self.split(values) for values in (query, key, value)), strict=True)
        return torch.cat([attend(*(values.transpose(0, 1) for values in sequence)).transpose(0, 1) for sequence in of_sequences])

    def conv1d(self, layer: nn.Conv1d, values: torch.Tensor | None = None) -> PackedData:
        """A convolution over the frames of every sequence, with zeros around it as the layer's padding says.

        Args:
            values: shape (frames, features).

        Returns:
            Fewer frames if the layer has a stride.
        """
        [size] = layer.kernel_size
        [stride] = layer.stride
        [dilation] = layer.dilation
        if layer.padding_mode != "zeros":
            raise ValueError(f"conv1d: expected a layer with padding_mode='zeros', got {layer.padding_mode!r}")
        if isinstance(layer.padding, str):
            around = dilation * (size - 1) if layer.padding == "same" else 0
            before = around // 2
            after = around - before
        else:
            before = after = layer.padding[0]
        values = self._values(values)
        # Every sequence has a slot with its padding, which begins at a multiple of the stride: a window at any of the valid
        # places lies within the slot.
        lengths = self.seq_lens.long()
        slots = (lengths + before + after + stride - 1).div(stride, rounding_mode="floor") * stride
        starts = slots.cumsum(0) - slots
        window = dilation * (size - 1) + 1  # PyTorch's layers refuse less
        rows = values.new_zeros((max(int(slots.sum()), window), *values.shape[1:]))
        rows = rows.index_copy(0, self._places_from(starts + before), values)
        sizes = (lengths + before + after - window).div(stride, rounding_mode="floor") + 1
        sizes = sizes.clamp(min=0)
        # As a picture of height 1 whose features are the channels, which come last in memory: no copy in another order.
        picture = rows[None, None].permute(0, 3, 1, 2)
        kernel = layer.weight[:, :, None]
        frames = nn.functional.conv2d(picture, kernel, layer.bias, (1, stride), 0, (1, dilation), layer.groups)
        frames = frames.permute(0, 2, 3, 1)[0, 0]
        result = self.with_values(frames, sizes)
        result.raw_tensor = frames.index_select(0, result._places_from(starts // stride))
        return result

    def recurrent(self, layer: nn.LSTM | nn.GRU | nn.RNN, values: torch.Tensor | None = None) -> torch.Tensor:
        """The output of a recurrent layer of PyTorch for every sequence, of shape (frames, features).

        On a CPU, PyTorch computes a PackedSequence several times slower than padded sequences. So there, each direction is
        computed by itself, from the first frames of all sequences on. After some time steps, it goes on with the sequences that
        have not ended. What follows the end of the others until then reaches no frame.
        """
        if not self.num_frames:  # none of an imaginary frame: PyTorch's layers refuse sequences without frames
            return layer(self._values(values).new_zeros(1, 1, layer.input_size))[0][0, :0]  # type: ignore[no-any-return]
        if self.device_seq_lens.device.type != "cpu":
            output, _ = layer(self.packed_sequence(values))
            return self.from_packed_sequence(output)
        values = self._values(values)
        directions = 2 if layer.bidirectional else 1
        for number in range(layer.num_layers):
            weights = layer.all_weights[number * directions : (number + 1) * directions]
            outputs = [self._in_direction(layer, values, tensors, direction) for direction, tensors in enumerate(weights)]
            values = torch.cat(outputs, dim=1) if directions == 2 else outputs[0]
            if number < layer.num_layers - 1:
                values = nn.functional.dropout(values, layer.dropout, layer.training)
        return values

    def _in_direction(
        self, layer: nn.LSTM | nn.GRU | nn.RNN, values: torch.Tensor, weights: Sequence[torch.Tensor], direction: int
    ) -> torch.Tensor:
        """Of one layer of a recurrent layer; direction 1: backwards."""
        is_lstm = isinstance(layer, nn.LSTM)
        compute: Any = torch.lstm if is_lstm else torch.gru if isinstance(layer, nn.GRU) else getattr(torch, layer.mode.lower())
        spans, directions = self._spans
        rows, places = directions[direction]
        widths = (getattr(layer, "proj_size", 0) or layer.hidden_size, layer.hidden_size)[: 1 + is_lstm]
        states = [values.new_zeros(1, spans[0][1], width) for width in widths]
        outputs = []
        values_of_spans = torch.split(values.index_select(0, rows), [steps * size for steps, size in spans])
        for span_values, (steps, size) in zip(values_of_spans, spans, strict=True):
            states = [state[:, :size] for state in states]
            first = states if is_lstm else states[0]
            output, *states = compute(
                span_values.view(steps, size, -1), first, weights, layer.bias, 1, 0.0, layer.training, False, False
            )
            outputs.append(output.flatten(0, 1))
        return torch.cat(outputs).index_select(0, places)

    @cached_property
    def _spans(self) -> tuple[list[tuple[int, int]], list[tuple[torch.Tensor, torch.Tensor]]]:
        """How recurrent layers go through the frames: in spans of time steps with the same number of sequences.

        Returns: the steps and the sequences of every span; and for each direction, the frames of all spans, one step after the
            other, and the place of every frame among them.
        """
        order, _, batch_sizes = self._time_major
        starts = self.offsets[:-1].long()[order]
        last = self.seq_lens.long()[order] - 1
        spans = []
        forwards = []
        backwards = []
        is_frame = []
        for begin, end in pairwise([0, *_ends_of_spans(batch_sizes.numpy())]):
            size = int(batch_sizes[begin])
            steps = torch.arange(begin, end)[:, None]
            spans.append((end - begin, size))
            inside = torch.minimum(steps, last[:size])  # after the end of a sequence, its last frame again
            forwards.append((starts[:size] + inside).flatten())
            backwards.append((starts[:size] + last[:size] - inside).flatten())
            is_frame.append((steps <= last[:size]).flatten())
        frames = torch.cat(is_frame).nonzero()[:, 0]
        directions = []
        for rows in (torch.cat(forwards), torch.cat(backwards)):
            places = torch.empty_like(frames)
            places[rows[frames]] = frames
            directions.append((rows, places))
        return spans, directions

    def _places_from(self, starts: torch.Tensor) -> torch.Tensor:
        """Where every frame is if the sequences begin at these places; int64 of shape (frames,), on the device."""
        shift = starts.to(self.offsets.device) - self.offsets[:-1]
        numbers = torch.arange(self.num_frames, device=shift.device)
        return numbers + shift.repeat_interleave(self.device_seq_lens, output_size=self.num_frames)

    def _values(self, values: torch.Tensor | None) -> torch.Tensor:
        """The values that a method was given. Raises: ValueError, if they have other frames."""
        if values is None:
            return self.raw_tensor  # type: ignore[no-any-return]
        if len(values) != self.num_frames:
            raise ValueError(
                f"expected values of shape ({self.num_frames}, ...), as the sequences have frames, got {tuple(values.shape)}"
            )
        return values

    @cached_property
    def _time_major(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The sequences from the longest to the shortest, the frames in the order of PackedSequence, and how many sequences have
        a first frame, a second one, ... (on the CPU)."""
        order = self.seq_lens.argsort(descending=True, stable=True)
        lengths = self.seq_lens[order]
        frames = torch.arange(self.max_seq_len)
        valid = frames[:, None] < lengths[None, :]
        starts = (self.seq_lens.long().cumsum(0) - self.seq_lens)[order]
        places = (starts[None, :] + frames[:, None])[valid]
        device = self.device_seq_lens.device
        return order.to(device), places.to(device), valid.sum(1)


def _inverse(order: torch.Tensor) -> torch.Tensor:
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse


def _ends_of_spans(sizes: Array) -> list[int]:
    """After which time steps a recurrent layer goes on without the sequences that have ended, so that it costs least.

    Args:
        sizes: how many sequences have a first frame, a second one, ...
    """
    begins = numpy.flatnonzero(numpy.diff(sizes, prepend=0))
    ends = numpy.append(begins[1:], len(sizes))
    least = numpy.zeros(len(ends) + 1)  # the costs until each end, and where the span before it begins
    first = []
    for number, end in enumerate(ends, 1):
        costs = least[:number] + CALL_COST + (end - begins[:number]) * (STEP_COST + sizes[begins[:number]])
        first.append(int(costs.argmin()))
        least[number] = costs[first[-1]]
    ends_of_spans = []
    number = len(ends)
    while number:
        ends_of_spans.append(int(ends[number - 1]))
        number = first[number - 1]
    return ends_of_spans[::-1]
