"""Groups of ranks that are one model, and are averaged: with PyTorch, on ranks that are threads."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from learners import batch_of, learner_of
from thread_ranks import on_ranks
from torch_ranks import SavedRank, small_model, step
from trainings import marked

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.runtime.timer import Timer

UPDATES = 17
"""Of an epoch: no multiple of the numbers of updates between syncs below."""

ROWS = 12
"""In an update."""

BMUF = {"class": "bmuf", "momentum": 0.5}

Weights = list[torch.Tensor]


def small(**_: Any) -> torch.nn.Module:
    return small_model(30)


class Job(SavedRank):
    """One of some ranks, which share the rows of an update evenly, in order. In every fifth one, the second half is missing."""

    def __init__(self, comm: Communicator, optimizer: str = "adam", **keys: Any) -> None:
        self.comm = comm
        self.reducer = ReduceKeys(**keys).reducer(comm, Timer())
        self.learner = learner_of(small, step, comm, gradients=self.reducer.gradients, optimizer={"class": optimizer})
        self.state = self.learner.state
        self.done = 0

    def begin(self) -> None:
        self.learner.begin_epoch(1, self.done)
        start = EpochStart(1, self.done, UPDATES, 0.05, is_resumed=self.done > 0)
        self.reducer.sync.begin_epoch(self.learner.state, start)

    def run(self, until: int = UPDATES) -> list[Weights]:
        """The parameters after every update."""
        seen = []
        size, state = self.comm.size, self.learner.state
        while self.done < until:
            rows = numpy.random.default_rng(self.done).normal(size=(ROWS, 3, 4)).astype(numpy.float32)
            own = rows[self.comm.rank * ROWS // size :][: ROWS // size]
            has_batch = [rank < (size // 2 if self.done % 5 == 4 else size) for rank in range(size)]
            self.reducer.gradients.begin_update(has_batch)
            self.learner.backward(batch_of(own) if has_batch[self.comm.rank] else None)
            self.learner.update(0.05)
            self.done += 1
            self.reducer.sync.after_update(state, FinishedUpdate(has_batch, self.done, 0.05))
            seen.append(self.weights())
        return seen

    def weights(self) -> Weights:
        return [parameter.detach().clone() for parameter in self.learner.model.parameters()]

    def epoch(self) -> list[Weights]:
        """The parameters after every update, and at the end of the epoch."""
        self.begin()
        seen = self.run()
        self.reducer.sync.end_of_epoch(self.learner.state)
        return [*seen, self.weights()]


def trained(size: int, **keys: Any) -> list[list[Weights]]:
    return on_ranks(size, lambda comm: Job(comm, **keys).epoch())


def same(one: Weights, other: Weights) -> bool:
    return all(map(torch.equal, one, other))


def close(one: Weights, other: Weights, tolerance: float = 1e-5) -> bool:
    return all(bool((left - right).abs().max() <= tolerance * left.abs().max()) for left, right in zip(one, other, strict=True))


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"sync_steps": 5},
    "outer": {"sync_steps": 5, "outer_optimizer": BMUF},
    "delayed parts": {"sync_steps": 6, "sync_parts": 3, "sync_delay": 4, "outer_optimizer": BMUF},
    "narrow": {"sync_steps": 6, "sync_parts": 2, "compression": "bf16"},
    "quadratic": {"sync_steps": 2, "sync_rule": {"class": "quadratic", "alpha": 0.11}},
}


@pytest.mark.parametrize("kind", ["delayed parts", "quadratic", *marked(["plain", "outer", "narrow"], pytest.mark.slow)])
def test_groups_of_ranks_learn_what_single_ranks_learn_from_the_batches_of_the_groups(kind: str) -> None:
    keys = {"reduce_type": "param", **KINDS[kind]}
    singles, ranks = trained(2, **keys), trained(4, **keys, group=2)
    for number, single in enumerate(singles):
        first, second = ranks[2 * number : 2 * number + 2]
        assert all(map(same, first, second))  # to the last bit, after every update
        assert all(close(one, other, 2e-3 if kind == "narrow" else 1e-4) for one, other in zip(single, first, strict=True))
    assert same(ranks[0][-1], ranks[2][-1])
    assert not close(ranks[0][2 if kind != "quadratic" else 0], ranks[2][2 if kind != "quadratic" else 0], 1e-4)


def test_averaging_groups_after_every_update_with_sgd_is_averaging_gradients() -> None:
    """Also where a group has no batch: its weight is 0."""
    gradients = trained(4, optimizer="sgd", average_gradients=True)
    groups = trained(4, optimizer="sgd", reduce_type="param", group=2)
    assert all(close(one, other) for one, other in zip(gradients[0], groups[0], strict=True))
    assert all(map(same, groups[0], groups[3]))


def test_a_group_of_all_ranks_averages_gradients_and_the_ranks_of_one_host_are_a_group() -> None:
    gradients = trained(4, average_gradients=True)
    for group in (4, "host"):
        whole = trained(4, reduce_type="param", sync_steps=100, group=group)
        assert all(close(one, other) for one, other in zip(gradients[0], whole[0], strict=True))
    alone = trained(2, reduce_type="param", sync_steps=5)
    for each in (1, None):
        assert all(map(same, alone[1], trained(2, reduce_type="param", sync_steps=5, group=each)[1]))


def test_the_bytes_between_groups_fall_with_the_interval() -> None:
    size = sum(one.nbytes for one in small().parameters())

    def traffic(comm: Communicator, every: int) -> tuple[int, int, int]:
        job = Job(comm, reduce_type="param", sync_steps=every, group=2)
        job.begin()
        job.run(16)
        return tuple(job.reducer.traffic)

    for every in (1, 2, 8):
        first, second, *_ = on_ranks(4, lambda comm, every=every: traffic(comm, every))  # type: ignore[misc]
        syncs = 16 // every
        assert first[0] == syncs
        assert first[2] == syncs * size
        assert second[2] == 0  # the first rank of a group passes the average on
        assert first[1] - first[2] == second[1] >= 16 * size


@pytest.mark.parametrize("kind", ["plain", "delayed parts"])
def test_a_stop_changes_nothing(kind: str, tmp_path: Path) -> None:
    keys = {"reduce_type": "param", "group": 2, **KINDS[kind]}

    def stopped(comm: Communicator) -> list[Weights]:
        job = Job(comm, **keys)
        job.begin()
        job.run(8)
        job.save(tmp_path)
        resumed = Job(comm, **keys)
        resumed.load(tmp_path)
        resumed.begin()
        return resumed.run()

    for one, other in zip(on_ranks(4, stopped), trained(4, **keys), strict=True):
        assert all(map(same, one, other[8:-1]))


@pytest.mark.parametrize(("before", "after", "size"), [(2, 2, 6), (2, 4, 4), (None, 2, 4)])
def test_a_checkpoint_of_other_groups_continues_from_the_average(
    tmp_path: Path, before: int | None, after: int, size: int
) -> None:
    def save(comm: Communicator) -> Weights:
        job = Job(comm, reduce_type="param", sync_steps=50, group=before)
        job.begin()
        job.run(8)
        job.save(tmp_path)
        with job.reducer.sync.averaged_model(job.learner.state):
            return job.weights()

    def load(comm: Communicator) -> tuple[Weights, list[Weights]]:
        job = Job(comm, reduce_type="param", sync_steps=50, group=after)
        job.load(tmp_path)
        loaded = job.weights()
        job.begin()
        return loaded, job.run()

    average, *_ = on_ranks(4, save)
    ranks = on_ranks(size, load)
    assert all(same(average, loaded) for loaded, _ in ranks)
    for first in range(0, size, after):
        assert all(map(same, ranks[first][1], ranks[first + 1][1]))


def test_ranks_that_were_a_group_do_not_train_alone_within_the_epoch(tmp_path: Path) -> None:
    def work(comm: Communicator) -> None:
        job = Job(comm, reduce_type="param", sync_steps=50, group=2)
        job.begin()
        job.run(3)
        job.save(tmp_path)
        Job(comm, reduce_type="param", sync_steps=50).load(tmp_path)

    with pytest.raises(ConfigError, match="horovod_param_group: expected 2 ranks in a group, as when the epoch began, got 1"):
        on_ranks(4, work)


@pytest.mark.parametrize("is_earlier", [False, True])
def test_ranks_with_optimizers_of_their_own_become_one_model_when_they_average_gradients(
    tmp_path: Path, is_earlier: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from a checkpoint of a release that did not write which ranks are alike."""

    def begin(comm: Communicator) -> None:
        job = Job(comm, reduce_type="param", sync_steps=50)
        job.begin()
        job.run(8)
        job.save(tmp_path)

    def continued(comm: Communicator) -> list[Weights]:
        job = Job(comm, average_gradients=True)
        job.load(tmp_path)
        job.begin()
        return job.run()

    with monkeypatch.context() as changed:
        if is_earlier:
            changed.setattr("hvdtrain.checkpoint.saver.ALIKE", "unknown")
        on_ranks(2, begin)
    first, second = on_ranks(2, continued)
    assert all(map(same, first, second))


def test_what_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="horovod_param_group: expected a number of ranks that divides all 4 .* got 3"):
        trained(4, reduce_type="param", group=3)
    assert [found.key for found in ReduceKeys(group=2).problems()] == ["horovod_param_group"]
    assert [found.key for found in ReduceKeys(reduce_type="param", group=2, local_start=5).problems()] == ["horovod_param_start"]
