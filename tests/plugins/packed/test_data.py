"""Batches without padding: what models compute on them is what they compute on each sequence by itself."""

from functools import partial

import numpy
import pytest
import torch
from torch import nn

from hvdtrain.data.padding import pack, pad
from hvdtrain.data.types import Batch, Packed, Padded
from hvdtrain.learner.torch.tensors import tensors_of
from hvdtrain.plugins.packed.data import PackedData

LENGTHS = [5, 1, 9, 3, 9, 2]


def packed_of(width: int = 6) -> PackedData:
    generator = numpy.random.default_rng(1)
    sequences = [generator.normal(size=(length, width)).astype(numpy.float32) for length in LENGTHS]
    [made] = tensors_of(Batch({"data": pack(sequences)}, numpy.arange(len(LENGTHS)))).values()
    assert isinstance(made, PackedData)
    return made


def test_arrays_are_packed_and_split() -> None:
    sequences = [numpy.arange(length * 2).reshape(length, 2) for length in (3, 0, 2)]
    made = pack(sequences)
    assert isinstance(made, Packed)
    assert made.values.shape == (5, 2)
    assert made.seq_lens.tolist() == [3, 0, 2]
    for some in (made, pad(sequences)):
        assert all(numpy.array_equal(one, other) for one, other in zip(some.sequences(), sequences, strict=True))
    texts = pack([numpy.array(["a"], dtype=object), numpy.array(["b", "c"], dtype=object)])
    assert texts.values.tolist() == ["a", "b", "c"]


def test_places_of_frames() -> None:
    data = packed_of()
    assert data.offsets.tolist() == [0, 5, 6, 15, 18, 27, 29]
    assert data.offsets.dtype == torch.int32
    assert data.max_seq_len == 9
    assert data.owners.tolist() == sum(([number] * length for number, length in enumerate(LENGTHS)), [])
    assert data.positions.tolist() == [position for length in LENGTHS for position in range(length)]
    padded = data.padded()
    assert padded.shape == (6, 9, 6)
    assert torch.equal(data.packed(padded), data.raw_tensor)
    assert float(padded[1, 1:].abs().sum()) == 0.0
    with pytest.raises(ValueError, match=r"expected values of shape \(29, ...\), as the sequences have frames, got \(3, 6\)"):
        data.padded(torch.zeros(3, 6))


def test_attention_and_nested_tensors() -> None:
    data = packed_of(width=8)
    values = data.raw_tensor.view(-1, 2, 4).requires_grad_()
    for is_causal in (False, True):
        attended = data.attention(values, values, values, is_causal=is_causal)
        for found, own in zip(data.split(attended), data.split(values), strict=True):
            heads = own.transpose(0, 1)
            expected = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=is_causal).transpose(0, 1)
            torch.testing.assert_close(found, expected)
    nested = data.nested()
    assert nested.is_nested
    for one, other in zip(nested.unbind(), data.split(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(
    "layer",
    [
        partial(nn.Conv1d, 6, 4, 5, stride=2, padding=2),
        partial(nn.Conv1d, 6, 4, 3),
        partial(nn.Conv1d, 6, 6, 3, padding="same", groups=6, dilation=2),
        partial(nn.Conv1d, 6, 4, 4, padding="same", bias=False),
        partial(nn.Conv1d, 6, 4, 3, stride=3, padding=1),
        partial(nn.Conv1d, 6, 4, 2, stride=4),
    ],
)
def test_a_convolution_treats_every_sequence_by_itself(layer: partial[nn.Conv1d]) -> None:
    torch.manual_seed(1)
    convolution = layer()
    data = packed_of()
    made = data.conv1d(convolution)
    for found, own in zip(made.split(), data.split(), strict=True):
        around = 99 if isinstance(convolution.padding, str) else 2 * convolution.padding[0]
        if len(own) + around < convolution.dilation[0] * (convolution.kernel_size[0] - 1) + 1:
            assert len(found) == 0
        else:
            torch.testing.assert_close(found, convolution(own.T[None])[0].T)
    gradient = torch.autograd.grad(made.raw_tensor.square().sum(), convolution.weight)[0]
    whole = [convolution(own.T[None]) for own, found in zip(data.split(), made.split(), strict=True) if len(found)]
    expected = torch.autograd.grad(sum(one.square().sum() for one in whole), convolution.weight)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    "layer",
    [
        partial(nn.LSTM, 6, 3, num_layers=2, bidirectional=True),
        partial(nn.LSTM, 6, 4, proj_size=3, bias=False),
        partial(nn.GRU, 6, 3, bidirectional=True),
        partial(nn.RNN, 6, 3, num_layers=2, nonlinearity="relu"),
    ],
)
def test_a_recurrent_layer_treats_every_sequence_by_itself(layer: partial[nn.LSTM]) -> None:
    torch.manual_seed(1)
    recurrent = layer(batch_first=True)
    data = packed_of()
    data.raw_tensor.requires_grad_()
    output = data.recurrent(recurrent)
    expected = torch.cat([recurrent(own[None])[0][0] for own in data.split()])
    torch.testing.assert_close(output, expected)
    inputs = [data.raw_tensor, *recurrent.parameters()]
    for one, other in zip(*(torch.autograd.grad(one.square().sum(), inputs) for one in (output, expected)), strict=True):
        torch.testing.assert_close(one, other)
    packed = data.from_packed_sequence(recurrent(data.packed_sequence())[0])  # as on a GPU
    torch.testing.assert_close(packed, expected)


def test_values_with_other_lengths() -> None:
    data = packed_of()
    halved = data.with_values(torch.zeros(17, 2), (data.seq_lens + 1) // 2)
    assert [len(one) for one in halved.split()] == [3, 1, 5, 2, 5, 1]
    assert data.with_values(torch.zeros(29)).seq_lens is data.seq_lens
    assert isinstance(pad([numpy.zeros((2, 3))]), Padded)


@pytest.mark.parametrize("layer", [nn.LSTM(6, 4, 2, bidirectional=True), nn.LSTM(6, 4, proj_size=3), nn.GRU(6, 4), nn.RNN(6, 4)])
def test_sequences_without_frames_in_a_recurrent_layer(layer: nn.Module) -> None:
    """As a rank may get such a batch, its gradients are zero, not missing."""
    data = packed_of()
    output = data.with_values(data.raw_tensor[:0], torch.zeros(2, dtype=torch.int32)).recurrent(layer)
    assert output.shape == (0, data.recurrent(layer).shape[1])
    output.sum().backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in layer.parameters())


@pytest.mark.parametrize(("lengths", "remain"), [([0, 0], [0, 0]), ([2, 1], [0, 0]), ([2, 4], [0, 2])])
def test_sequences_shorter_than_the_window_of_a_convolution(lengths: list[int], remain: list[int]) -> None:
    layer = nn.Conv1d(6, 4, 3)
    data = packed_of()
    data = data.with_values(data.raw_tensor[: sum(lengths)], torch.tensor(lengths, dtype=torch.int32))
    made = data.conv1d(layer)
    assert made.seq_lens.tolist() == remain
    assert made.raw_tensor.shape == (sum(remain), 4)
    if sum(remain):
        torch.testing.assert_close(made.raw_tensor, layer(data.raw_tensor[None, 2:].mT)[0].mT)
    made.raw_tensor.sum().backward()
    assert layer.weight.grad is not None
