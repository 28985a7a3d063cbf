"""Class weights, tasks with changing weights, and models that are only asked: exact on any number of ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from launching import refused
from learners import learner_of
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.frameworks import NEW
from hvdtrain.learner.torch.model_file import write_model
from hvdtrain.plugins.extra_models import ExtraModelKeys
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, changed_scales_line

RATE = 0.5
WEIGHTS = torch.tensor([0.2, 1.0, 7.0])
generator = numpy.random.default_rng(3)
FRAMES = [generator.normal(size=(size, 2)).astype("float32") for size in (2, 5, 1, 3)]
CLASSES = [generator.integers(0, 3, size=len(frames)).astype("int32") for frames in FRAMES]
"""Sequences of very different numbers of frames, one for a batch."""


class Linear(torch.nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 3)
        with torch.no_grad():
            self.weight.copy_(torch.arange(6.0).reshape(3, 2) / 10)
            self.bias.zero_()


def learner(comm: Communicator, train_step: Callable[..., None], **keys: Any) -> Any:
    return learner_of(lambda **_: Linear(), train_step, comm, **keys)


def batch(number: int) -> Batch:
    frames, classes = FRAMES[number], CLASSES[number]
    lengths = numpy.array([len(frames)], numpy.int32)
    return Batch({"data": Padded(frames[None], lengths), "classes": Padded(classes[None], lengths)}, numpy.array([number]))


def train(
    comm: Communicator, train_step: Callable[..., None], updates: int = 1, per_epoch: int = 100, **keys: Any
) -> dict[str, torch.Tensor]:
    """The parameters after some updates on all sequences; every rank has some of them, a rank with few none in the last step."""
    made = learner(comm, train_step, **keys)
    own = list(range(comm.rank, len(FRAMES), comm.size))
    rounds = -(-len(FRAMES) // comm.size)
    for update in range(updates):
        if update % per_epoch == 0:
            made.begin_epoch(1 + update // per_epoch, update * rounds)
        for step in range(rounds):
            made.backward(batch(own[step]) if step < len(own) else None, completes_update=step == rounds - 1)
        made.update(RATE)
    return {name: parameter.detach().clone() for name, parameter in made.model.named_parameters()}


def each_size(work: Callable[[Communicator], dict[str, torch.Tensor]], sizes: Sequence[int] = (1, 2, 3)) -> list[Any]:
    return [found for size in sizes for found in ([work(SingleCommunicator())] if size == 1 else on_ranks(size, work))]


def scores_and_targets(model: torch.nn.Module, extern_data: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    data, classes = extern_data["data"], extern_data["classes"]
    return model(data.raw_tensor)[data.mask], classes.raw_tensor[classes.mask].long()


def weighted(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    """As docs/training.md shows it."""
    scores, targets = scores_and_targets(model, extern_data)
    losses = torch.nn.functional.cross_entropy(scores, targets, weight=WEIGHTS, reduction="none")
    get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True, custom_inv_norm_factor=WEIGHTS[targets])


def test_class_weights_are_pytorchs_weighted_mean_over_all_ranks() -> None:
    model = Linear()
    scores = model(torch.from_numpy(numpy.concatenate(FRAMES)))
    targets = torch.from_numpy(numpy.concatenate(CLASSES)).long()
    loss = torch.nn.functional.cross_entropy(scores, targets, weight=WEIGHTS)
    loss.backward()
    expected = {name: parameter.detach() - RATE * parameter.grad for name, parameter in model.named_parameters()}
    for found in each_size(partial(train, train_step=weighted)):
        for name, values in expected.items():
            torch.testing.assert_close(found[name], values)
    made = learner(SingleCommunicator(), weighted)
    made.begin_epoch(1, 0)
    for number in range(len(FRAMES)):
        made.evaluate(batch(number))
    assert made.meter.take_scores().means()["ce"] == pytest.approx(loss.item(), rel=1e-6), "as it is reported"


def tasks(first: Callable[[int], float], second: Callable[[int], float]) -> Callable[..., None]:
    """Two normalized losses with weights that depend on the step."""

    def train_step(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
        context = get_run_ctx()
        scores, targets = scores_and_targets(model, extern_data)
        losses = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        context.mark_as_loss(losses, "ce", scale=first(context.step), use_normalized_loss=True)
        energies = scores.square().sum(-1)[targets > 0]
        context.mark_as_loss(energies, "energy", scale=second(context.step), use_normalized_loss=True)

    return train_step


def by_hand(weights: Sequence[tuple[float, float]]) -> dict[str, torch.Tensor]:
    """A loop of PyTorch on all sequences at once."""
    model = Linear()
    frames, targets = torch.from_numpy(numpy.concatenate(FRAMES)), torch.from_numpy(numpy.concatenate(CLASSES)).long()
    for first, second in weights:
        model.zero_grad()
        scores = model(frames)
        energy = scores.square().sum(-1)[targets > 0].mean()
        (first * torch.nn.functional.cross_entropy(scores, targets) + second * energy).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= RATE * parameter.grad
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_weights_that_change_over_training_and_from_or_to_zero() -> None:
    """One rank takes four steps an update, two ranks two: the weights below are constant within an update for both. One
    grows from zero with an epoch, and one is zero when an epoch begins."""
    for weights, per_epoch in (((0.1, 0.05, 0.0), 3), ((0.0, 0.05, 0.1), 1), ((0.1, 0.05, 0.0, 0.1), 2)):
        expected = by_hand([(1.0, weight) for weight in weights])
        for size, steps in ((1, 4), (2, 2)):
            changing = tasks(lambda step: 1.0, lambda step, steps=steps, weights=weights: weights[step // steps])  # type: ignore[misc]
            for found in each_size(partial(train, train_step=changing, updates=len(weights), per_epoch=per_epoch), [size]):
                for name, values in expected.items():
                    torch.testing.assert_close(found[name], values)


def test_a_weight_that_grows_from_zero_says_what_to_do() -> None:
    with refused("train_step: wrong-result"):
        train(SingleCommunicator(), tasks(lambda step: 1.0, lambda step: 0.1 * (step // 4)), updates=2)


def test_sums_with_other_weights_are_not_compared_silently() -> None:
    history = [EpochRecord(1, 0.1, {"dev_loss_total": 2.0}, {"ce": 1.0, "ctc": 0.5})]
    history.append(EpochRecord(2, 0.1, {"dev_loss_total": 1.0}, {"ce": 1.0, "ctc": 0.25}))
    line = changed_scales_line(history, Measure())
    assert line is not None
    assert "the weights of ctc differ between epochs 1 and 2" in line
    assert changed_scales_line([history[0], history[0]], Measure()) is None
    assert changed_scales_line(history, Measure(["dev_loss_ce"])) is None


class Teacher(Linear):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(3)

    def forward(self, frames: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(frames).transpose(1, 2)).transpose(1, 2)


def distill(*, model: torch.nn.Module, extern_data: dict[str, Any], **_: Any) -> None:
    """As docs/training.md shows it."""
    context, data = get_run_ctx(), extern_data["data"]
    wanted = context.extra_models["teacher"](data.raw_tensor)[data.mask].log_softmax(-1)
    found = model(data.raw_tensor)[data.mask].log_softmax(-1)
    losses = torch.nn.functional.kl_div(found, wanted, reduction="none", log_target=True).sum(-1)
    context.mark_as_loss(losses, "distillation", use_normalized_loss=True)


def test_a_teacher_is_loaded_frozen_and_not_saved(tmp_path: Path) -> None:
    teacher = Teacher()
    with torch.no_grad():
        teacher.weight.copy_(torch.tensor([[3.0, -1.0], [0.0, 2.0], [-3.0, 1.0]]))
        teacher.norm.running_mean.fill_(0.5)
    file = tmp_path / "teacher.pt"
    write_model(file, teacher.state_dict(), {"epoch": 3, "step": 7}, "pt")
    positions = set()

    def get_teacher(*, epoch: int, step: int, **_: Any) -> Teacher:
        positions.add((epoch, step))
        return Teacher()

    keys = {"extra_models": {"teacher": {"get_model": get_teacher, "load": str(file)}}}
    first, *others = each_size(partial(train, train_step=distill, updates=3, **keys))
    for other in others:
        for name, values in first.items():
            torch.testing.assert_close(other[name], values)
    made = learner(SingleCommunicator(), distill, **keys)
    made.begin_epoch(1, 0)
    losses = []
    for _ in range(60):
        for number in range(len(FRAMES)):
            made.backward(batch(number), completes_update=number == len(FRAMES) - 1)
        made.update(RATE)
        losses.append(made.meter.take_scores().means()["distillation"])
    assert losses[-1] < losses[0] / 20, "the student becomes the teacher"
    inner = made._functions.extra_models["teacher"]
    assert not inner.training
    assert all(torch.equal(values, inner.state_dict()[name]) for name, values in teacher.state_dict().items())
    assert made.state.model_tensors().keys() == {"weight", "bias"}
    assert made.num_parameters == 9
    assert positions == {NEW}, "as get_model gets them"


def distill_teacher(**_: Any) -> torch.nn.Module:
    return Teacher()


def test_mistakes_of_extra_models(tmp_path: Path) -> None:
    model = Linear()

    def build(**entry: Any) -> Any:
        return learner_of(lambda **_: model, distill, extra_models={"teacher": entry})

    with refused("extra_models.teacher.get_model: wrong-result"):
        build(get_model=lambda **_: model)
    with refused("extra_models.teacher.get_model: wrong-result"):
        build(get_model=lambda **_: None)
    write_model(tmp_path / "other.pt", {"weight": torch.zeros(3, 2)}, {}, "pt")
    for name, wanted in (("other.pt", "bias"), ("none.pt", "no such file")):
        with pytest.raises(CheckpointError, match=wanted):
            build(get_model=lambda **_: Linear(), load=str(tmp_path / name))
    entries = {
        "a": {"load": "x"},
        "b": {"get_model": 3},
        "c": {"get_model": distill_teacher, "load": 3},
        "d": {"get_model": distill_teacher, "x": 1},
    }
    keys = ExtraModelKeys(extra_models=entries)
    assert [f"{one.key}: {one.rule}" for one in keys.problems()] == [
        "extra_models.a: wrong-type",
        "extra_models.b.get_model: wrong-type",
        "extra_models.c.load: wrong-type",
        "extra_models.d.x: unknown-key",
    ]
