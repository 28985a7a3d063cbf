"""Noise on gradients: its distribution, the same on all ranks where gradients are, and the same again after a stop."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from trainings import ResultsOf, Run, Trained, assert_same, trains

from hvdtrain.comm.base import SingleCommunicator
from hvdtrain.context import get_run_ctx
from hvdtrain.data.types import Batch, Padded
from hvdtrain.learner.base import LearnerKeys
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.learner.torch.learner import build_learner
from hvdtrain.runtime.timer import Timer

RUNS = [Run(framework, "horovod", 2) for framework in ("torch", "tensorflow")]

BATCH = Batch({"data": Padded(numpy.ones((1, 1, 1), numpy.float32), numpy.array([1], numpy.int32))}, numpy.array([0]))

OF_WHAT_IS_LEFT = 0.8796
"""Standard deviation of a normal distribution that is truncated at two of its standard deviations."""


def added(reduce: str, rank: int, first_step: int = 0, steps: int = 1, clip: float | None = None) -> tuple[numpy.ndarray, list]:
    """What an optimizer without anything to learn is given, and what dropout drew meanwhile."""
    drawn = []

    def train_step(*, model: torch.nn.Module, **_: Any) -> None:
        drawn.append(torch.rand(3).tolist())
        get_run_ctx().mark_as_loss(model.weight.sum() * 0.0, "nothing")

    keys = LearnerKeys(
        get_model=lambda **_: torch.nn.Linear(300, 200),
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


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """TensorFlow is stopped with noise, and trained in param mode, in test_update_together.py."""
    if run.framework == "tensorflow":
        only_noise = {"part": "two.hdf", "max_seqs": 1, "learning_rate": 1.0, "gradient_noise": 0.5}
        return {"idle": {"layers": "embedding", **only_noise, "optimizer": {"class": "sgd"}}}
    noisy = {"layers": "statistics", "gradient_noise": 0.05}
    return {
        "clean": {"layers": "statistics"},
        "whole": noisy,
        "stopped": {**noisy, "fault": "SIGTERM,1,9", "record": True},
        "param": {**noisy, "horovod_reduce_type": "param", "horovod_param_sync_step": 7},
    }


@pytest.fixture
def results(trained: Trained) -> ResultsOf:
    return partial(trained, trainings)


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_ranks_stay_the_same_and_a_continued_training_goes_on_with_the_same_noise(results: ResultsOf, run: Run) -> None:
    made = results(run)
    for name in made.names:
        assert_same(made.weights(name), made.weights(name, 1))
    if run.framework == "tensorflow":
        first, second = (1 - made.weights("idle")[f"idle.{number}"] for number in (0, 1))
        assert_cut_off_normal(first, 0.5)
        assert abs(numpy.corrcoef(first, second)[0, 1]) < 0.01
        return
    assert "stopped by SIGTERM" in made.out("stopped")
    assert_same(made.weights("whole"), made.weights("stopped"))
    weights = made.weights("whole")
    assert not all(numpy.array_equal(values, weights[name]) for name, values in made.weights("clean").items())
    # A parameter without a gradient gets no noise either.
    assert_same(*({"unused": made.weights(name)["unused"]} for name in ("whole", "clean")))
