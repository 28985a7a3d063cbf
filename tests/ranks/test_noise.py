"""Noise on gradients: its distribution, the same on all ranks where gradients are, and the same again after a stop."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from trainings import Run, Trained, assert_same, trains

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.runtime.timer import Timer

TENSORFLOW = Run("tensorflow", "horovod", 2)

BATCH = Batch({"data": Padded(numpy.ones((1, 1, 1), numpy.float32), numpy.array([1], numpy.int32))}, numpy.array([0]))

OF_WHAT_IS_LEFT = 0.8796
"""Standard deviation of a normal distribution that is truncated at two of its standard deviations."""


def added(reduce: str, rank: int, first_step: int = 0, steps: int = 1, clip: float | None = None) -> tuple[numpy.ndarray, list]:
    """What an optimizer without anything to learn is given, and what dropout drew meanwhile."""
    drawn = []

    def train_step(*, model: torch.nn.Module, **_: Any) -> None:
        drawn.append(torch.rand(3).tolist())
        get_run_ctx().mark_as_loss(model.weight.sum() * 0.0, "nothing")

    def get_model(**_: Any) -> torch.nn.Module:
        model = torch.nn.Linear(300, 200)
        model.unused = torch.nn.Parameter(torch.ones(3))
        return model

    keys = LearnerKeys(
        get_model=get_model,
        train_step=train_step,
        optimizer={"class": "sgd"},
        gradient_noise=0.5,
        gradient_clip=clip,
    )
    comm, timer = SingleCommunicator(), Timer()
    gradients = GradientExchange(comm, timer, steps=None if reduce == "grad" else 0)
    learner = build_learner(keys, gradients, BuildOptions(rank=rank, local_rank=0, threads=1, seed=1))
    learner.begin_epoch(1, first_step)
    for _ in range(steps):
        before = learner.model.weight.detach().numpy().copy()
        learner.backward(BATCH)
        learner.update(1.0)
    assert learner.model.unused.tolist() == [1.0] * 3, "a parameter without a gradient gets no noise either"
    return before - learner.model.weight.detach().numpy(), drawn


def assert_cut_off_normal(noise: numpy.ndarray, deviation: float) -> None:
    assert numpy.abs(noise).max() <= 2 * deviation + 1e-6
    assert numpy.abs(noise).max() >= 1.99 * deviation
    assert abs(noise.mean()) <= 5 * deviation / noise.size**0.5
    assert noise.std() == pytest.approx(OF_WHAT_IS_LEFT * deviation, rel=0.01)
    # 71.5 % of a normal distribution that is cut off at two are within one
    assert (numpy.abs(noise) < deviation).mean() == pytest.approx(0.6827 / 0.9545, abs=0.01)


def test_it_is_normally_distributed_up_to_two_deviations() -> None:
    noise, _ = added("grad", rank=0)
    assert_cut_off_normal(noise, 0.5)
    clipped, _ = added("grad", rank=0, clip=0.1)  # after the noise
    assert numpy.abs(clipped).max() == pytest.approx(0.1, rel=1e-4)


def test_it_follows_from_the_step_and_where_ranks_train_apart_from_the_rank() -> None:
    first, drawn = added("grad", rank=0)
    same, drawn_by_other = added("grad", rank=1)
    assert numpy.abs(first - same).max() < 1e-6  # weights differ, so rounding does
    assert drawn != drawn_by_other  # dropout continues differing
    other, _ = added("grad", rank=0, first_step=1)
    second, _ = added("grad", rank=0, steps=2)
    assert numpy.abs(first - other).max() > 0.1
    assert numpy.abs(second - other).max() < 1e-6
    apart = [added("param", rank=rank)[0] for rank in (0, 1)]
    assert numpy.abs(apart[0] - apart[1]).max() > 0.1


@trains(slow=[TENSORFLOW])
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """test_update_together.py trains both frameworks with noise, together and apart, and stops them."""
    only_noise = {"part": "two.hdf", "max_seqs": 1, "learning_rate": 1.0, "gradient_noise": 0.5, "optimizer": {"class": "sgd"}}
    return {"idle": {"layers": "embedding", **only_noise}}


@pytest.mark.slow
def test_ranks_of_tensorflow_have_the_same_noise_and_every_parameter_its_own(trained: Trained) -> None:
    made = trained(trainings, TENSORFLOW)
    assert_same(made.weights("idle"), made.weights("idle", 1))
    first, second = (1 - made.weights("idle")[f"idle.{number}"] for number in (0, 1))
    assert_cut_off_normal(first, 0.5)
    assert abs(numpy.corrcoef(first, second)[0, 1]) < 0.01
