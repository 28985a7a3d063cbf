"""Batches that do not fit into memory are split: the gradients are those of the whole batch, and nothing else changes."""

import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from learners import learner_of

from hvdtrain.context import get_run_ctx
from hvdtrain.data.padding import join, pack, pad
from hvdtrain.data.types import Batch, BatchParts
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.compute.splitting import split_batch

LENGTHS = [4, 9, 1, 6, 2, 9, 3]


@pytest.fixture(autouse=True)
def little_garbage() -> None:
    """What was imported need not be searched for garbage after every batch that does not fit."""
    gc.freeze()


def batch_of(make: Callable[..., Any], seed: int = 1) -> Batch:
    generator = numpy.random.default_rng(seed)
    frames = [generator.normal(size=(length, 3)).astype(numpy.float32) for length in LENGTHS]
    classes = [generator.integers(0, 4, length) for length in LENGTHS]
    parts = BatchParts(("a", "b"), numpy.array([0, 1, 0, 0, 1, 1, 0]))
    return Batch({"data": make(frames), "classes": make(classes)}, numpy.arange(7), lambda: list("abcdefg"), parts=parts)


@pytest.mark.parametrize("make", [pad, pack])
def test_halves_have_all_sequences(make: Callable[..., Any]) -> None:
    batch = batch_of(make)
    pieces = [batch]
    while any(len(piece.indices) > 1 for piece in pieces):
        largest = max(pieces, key=lambda piece: len(piece.indices))
        place = next(number for number, piece in enumerate(pieces) if piece is largest)
        pieces[place : place + 1] = split_batch(largest)
        for key in ("data", "classes"):
            whole = batch.data[key].sequences()
            made = [values for piece in pieces for values in piece.data[key].sequences()]
            assert all(numpy.array_equal(one, other) for one, other in zip(made, whole, strict=True))
    assert [tag for piece in pieces for tag in piece.seq_tags()] == list("abcdefg")  # type: ignore[misc]
    assert [piece.parts.numbers.tolist() for piece in pieces] == [[0], [1], [0], [0], [1], [1], [0]]  # type: ignore[union-attr]
    if make is pad:
        assert [piece.data["data"].values.shape for piece in pieces] == [(1, length, 3) for length in LENGTHS]


def test_halves_of_a_row_have_all_pieces() -> None:
    generator = numpy.random.default_rng(1)
    frames = [generator.normal(size=(length, 3)).astype(numpy.float32) for length in LENGTHS]
    parts, joined = BatchParts(("a", "b"), numpy.array([0, 1, 0, 0, 1, 1, 0])), numpy.array(LENGTHS)
    waiting = [Batch({"data": join(frames)}, numpy.arange(7), lambda: list("abcdefg"), joined=joined, parts=parts)]
    pieces: list[Batch] = []
    while waiting:
        piece = waiting.pop(0)
        if len(piece.indices) == 1:
            pieces.append(piece)
        else:
            waiting[:0] = split_batch(piece)
    for piece, expected, number in zip(pieces, frames, parts.numbers.tolist(), strict=True):
        numpy.testing.assert_array_equal(piece.data["data"].values, expected[None])
        assert piece.data["data"].seq_lens.tolist() == piece.joined.tolist() == [len(expected)]  # type: ignore[union-attr]
        assert piece.parts.numbers.tolist() == [number]  # type: ignore[union-attr]
        assert piece.row_tags is None
    assert [tag for piece in pieces for tag in piece.seq_tags()] == list("abcdefg")  # type: ignore[misc]


def learner(most: int, losses: str = "sum", **keys: Any) -> Any:
    """A small model. Memory does not suffice for more than this number of padded frames, in forward or in backward."""

    class Limited(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, values: torch.Tensor, frames: int) -> torch.Tensor:
            context.frames = frames
            return values.clone()

        @staticmethod
        def backward(context: Any, *gradients: torch.Tensor) -> Any:
            if context.frames > most:
                raise torch.OutOfMemoryError("CUDA out of memory (planted in backward)")
            return gradients[0], None

    def get_model(**_: Any) -> torch.nn.Module:
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 4))

    def train_step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        data, classes = extern_data["data"], extern_data["classes"]
        frames = data.raw_tensor.shape[0] * data.raw_tensor.shape[1]
        if frames > most + 20:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory (planted)")
        scores = Limited.apply(model(data.raw_tensor)[data.mask], frames)
        targets = classes.raw_tensor[classes.mask]
        context, normalized = get_run_ctx(), losses == "means"
        entropies = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        if losses == "one number":
            entropies = entropies.mean()
        seq_lens = None if losses == "one number" else classes.seq_lens
        context.mark_as_loss(entropies, "ce", use_normalized_loss=normalized or losses == "mean", seq_lens=seq_lens)
        if normalized:
            context.mark_as_loss(scores[targets > 1].square().sum(-1), "energy", scale=0.1, use_normalized_loss=True)
            context.mark_as_loss(scores[:, 0].square(), "first", scale=0.01)

    return learner_of(get_model, train_step, **keys)


@pytest.mark.parametrize(("losses", "accumulated"), [("sum", 1), ("mean", 2), ("means", 1), ("means", 2)])
def test_the_weights_are_those_of_whole_batches(losses: str, accumulated: int) -> None:
    trained = []
    for most, keys in ((1000, {}), (1000, {"split_on_oom": True}), (14, {"split_on_oom": True})):
        made = learner(most, losses, **keys)
        for step in range(4):
            made.backward(batch_of(pad, step), completes_update=step % accumulated == accumulated - 1)
            if step % accumulated == accumulated - 1:
                made.update(0.1)
        trained.append((list(made.model.parameters()), made.meter.take_scores().means(), made.meter.take_splits()))
    (weights, scores, none), *others = trained
    assert none == 0
    for other, other_scores, _ in others:
        for one, another in zip(weights, other, strict=True):
            torch.testing.assert_close(one, another, rtol=1e-6, atol=1e-6)
        assert other_scores == pytest.approx(scores, rel=1e-6)
    assert [splits for *_, splits in trained] == [0, 0, 4]
    assert {"ce", "ce.a", "ce.b"} <= scores.keys()


def test_what_cannot_be_split() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        learner(5, split_on_oom=True).backward(batch_of(pad))
    assert "split_on_oom: this is a single sequence, which cannot be split" in caught.value.__notes__[0]
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        learner(5).backward(batch_of(pad))
    with pytest.raises(
        ConfigError, match="expected losses with one number per element, .* got one number for a whole batch in ce"
    ):
        learner(14, "one number", split_on_oom=True).backward(batch_of(pad))
    learner(1000, "one number", split_on_oom=True).backward(batch_of(pad))  # as long as nothing is split


def test_statistics_are_those_of_the_pieces_that_fit() -> None:
    class Counted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = torch.nn.BatchNorm1d(3, momentum=None)
            self.out = torch.nn.Linear(3, 4)

    def train_step(*, model: Counted, extern_data: dict[str, Any], **_: Any) -> None:
        data = extern_data["data"]
        made = model.out(model.norm(data.raw_tensor[data.mask]))
        if len(data.seq_lens) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory (planted)")
        get_run_ctx().mark_as_loss(made.square().sum(-1), "square")

    made = learner_of(lambda **_: Counted(), train_step, split_on_oom=True)
    made.backward(batch_of(pad))
    assert int(made.model.norm.num_batches_tracked) == 2  # not the attempt that failed


def test_a_batch_can_be_tried() -> None:
    made = learner(30)
    before = [parameter.clone() for parameter in made.model.parameters()]
    assert not made.try_batch(batch_of(pad))
    assert made.try_batch(split_batch(split_batch(batch_of(pad))[0])[0])
    assert all(parameter.grad is None for parameter in made.model.parameters())
    assert all(torch.equal(one, other) for one, other in zip(before, made.model.parameters(), strict=True))
    assert made.meter.take_scores().means() == {}
