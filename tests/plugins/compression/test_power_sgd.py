"""PowerSGD on ranks that are threads: what it sends, what it leaves out, and that nothing of this is lost."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import problems
from thread_ranks import ThreadCommunicator, on_ranks

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.checkpoint.saver import Saver
from hvdtrain.comm.base import SMALL_BUCKET, Communicator
from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.learner.reducer import EpochStart
from hvdtrain.learner.reducers import ReduceKeys
from hvdtrain.learner.torch.state import TorchState, Unsaved
from hvdtrain.runtime.timer import Timer

ROWS, COLUMNS = 40, 30


class Job:
    """A rank that reduces a matrix, a vector and a count."""

    def __init__(self, comm: Communicator, rank: int = 2, average: bool = False) -> None:
        self.comm = comm
        self.model = torch.nn.Linear(COLUMNS, ROWS)
        self.state = TorchState(
            self.model, torch.optim.SGD(self.model.parameters(), 0.1), torch.device("cpu"), None, None, Unsaved()
        )
        keys = ReduceKeys(compression="powersgd", compression_rank=rank, average_gradients=average)
        self.reducer = keys.reducer(comm, Timer())

    def begin(self, is_resumed: bool = False) -> None:
        self.reducer.sync.begin_epoch(self.state, EpochStart(1, 0, 100, 0.1, is_resumed))

    def reduce(self, matrix: torch.Tensor) -> torch.Tensor:
        vector, count = torch.full((ROWS,), 1 + 2.0**-20), torch.tensor([2.0**30 + 1], dtype=torch.float64)
        counting = self.reducer.gradients.start([count], name="loss_counts")
        handle = self.reducer.gradients.start([vector, matrix.clone()], name="gradients.0")
        total, result = self.reducer.gradients.finish(handle)
        assert torch.equal(total, torch.full((ROWS,), 1 + 2.0**-20) * self.comm.size)  # exact, as are counts
        assert self.reducer.gradients.finish(counting)[0].item() == (2.0**30 + 1) * self.comm.size
        return result

    def saver(self, folder: Path) -> Saver:
        return Saver(self.loader(folder), "shard")

    def loader(self, folder: Path) -> Loader:
        return Loader(self.comm, self.state, self.reducer.sync, CheckpointFolder(folder / "model"))


def gradient(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(100 * step + rank))


def sum_of(size: int, step: int = 0) -> torch.Tensor:
    return sum((gradient(rank, step) for rank in range(size)), torch.zeros(ROWS, COLUMNS))


def on_jobs(size: int, work: Callable[[Job], Any], **keys: Any) -> list[Any]:
    def run(comm: Communicator) -> Any:
        job = Job(comm, **keys)
        job.begin()
        return work(job)

    return on_ranks(size, run)


@pytest.mark.parametrize("size", [2, 3])
def test_a_sum_of_low_rank_arrives_whole_and_in_few_bytes(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    left, right = torch.randn(ROWS, 2, generator=generator), torch.randn(2, COLUMNS, generator=generator)

    def work(job: Job) -> tuple[torch.Tensor, list[tuple[str, int]]]:
        assert isinstance(job.comm, ThreadCommunicator)
        return job.reduce(left @ right * (job.comm.rank + 1)), job.comm.messages

    (first, messages), *others = on_jobs(size, work)
    torch.testing.assert_close(first, left @ right * size * (size + 1) / 2, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(first, other) for other, _ in others)
    counts, factors = ("loss_counts", 8), ("gradients.0", 4 * (2 * ROWS + ROWS))  # with the vector
    assert messages == [counts, factors, ("gradients.0.right", 4 * 2 * COLUMNS)]


def messages_of(monkeypatch: pytest.MonkeyPatch, capacity: int) -> tuple[list[str], list[torch.Tensor]]:
    """The messages of an update with three buckets, if one is worth sending at this size, and the results of the third update."""
    monkeypatch.setattr(ThreadCommunicator, "bucket_bytes", lambda *_, **__: capacity)

    def work(job: Job) -> tuple[list[str], list[torch.Tensor]]:
        assert isinstance(job.comm, ThreadCommunicator)
        gradients, results = job.reducer.gradients, []
        for update in range(3):
            job.comm.messages.clear()
            buckets = [[gradient(job.comm.rank, 3 * update + number), torch.ones(7)] for number in range(3)]
            handles = [gradients.start(bucket, name=f"gradients.{number}") for number, bucket in enumerate(buckets)]
            results = [tensor for handle in handles for tensor in gradients.finish(handle)]
        return [name for name, _ in job.comm.messages], results

    first, second = on_jobs(2, work)
    assert all(map(torch.equal, first[1], second[1]))
    return first


def test_small_buckets_share_messages_and_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    names, results = messages_of(monkeypatch, 1)
    assert names == [f"gradients.{number}{side}" for side in ("", ".right") for number in range(3)]
    assert len(results) == 6
    for capacity, expected in {
        4 * (2 * ROWS + 7) + 1: ["gradients.0", "gradients.2", "gradients.0.right", "gradients.2.right"],
        SMALL_BUCKET: ["gradients.0", "gradients.0.right"],
    }.items():
        names, joined = messages_of(monkeypatch, capacity)
        assert names == expected
        assert all(map(torch.equal, results, joined))


def test_what_is_left_out_comes_later() -> None:
    """The mean over many updates with the same gradients is their sum, though each of them is of rank 2."""

    def work(job: Job) -> tuple[list[int], torch.Tensor]:
        results = [job.reduce(gradient(job.comm.rank)) for _ in range(200)]
        ranks = [int(torch.linalg.matrix_rank(one, rtol=1e-3)) for one in results[:3]]
        return ranks, sum(results, torch.zeros(ROWS, COLUMNS)) / len(results)

    (ranks, mean), (_, other) = on_jobs(2, work)
    assert ranks == [2, 2, 2]
    assert torch.equal(mean, other)
    assert (mean - sum_of(2)).norm() < 0.1 * sum_of(2).norm()


def test_an_average_is_the_sum_divided_by_the_ranks() -> None:
    (total, *_), (mean, *_) = (
        on_ranks(2, lambda comm, average=average: first_of(comm, average))  # type: ignore[misc]
        for average in (False, True)
    )
    torch.testing.assert_close(total / 2, mean)


def first_of(comm: Communicator, average: bool) -> torch.Tensor:
    job = Job(comm, average=average)
    job.begin()
    handle = job.reducer.gradients.start([gradient(comm.rank)], name="gradients.0")
    return job.reducer.gradients.finish(handle)[0]


def test_an_update_that_is_not_finite_is_forgotten() -> None:
    def work(job: Job) -> torch.Tensor:
        job.reduce(gradient(job.comm.rank))
        infinite = gradient(job.comm.rank)
        infinite[3, 4] = float("inf") if job.comm.rank == 1 else 0.0
        assert not job.reduce(infinite).isfinite().all()
        return sum((job.reduce(gradient(job.comm.rank)) for _ in range(200)), torch.zeros(ROWS, COLUMNS)) / 200

    mean, other = on_jobs(2, work)
    assert torch.equal(mean, other)
    assert (mean - sum_of(2)).norm() < 0.1 * sum_of(2).norm()


def test_a_stop_changes_nothing_and_other_ranks_begin_without_errors(tmp_path: Path) -> None:
    def work(job: Job) -> tuple[torch.Tensor, torch.Tensor]:
        for step in range(3):
            job.reduce(gradient(job.comm.rank, step))
        saver = job.saver(tmp_path)
        saver.save(Progress(step=3, current=EpochProgress(1, 0, position=3)), saver.prepare())
        gone_on = Job(job.comm)
        newest = CheckpointFolder(tmp_path / "model").newest()
        assert newest is not None
        gone_on.loader(tmp_path).load(newest)
        gone_on.begin(is_resumed=True)
        assert gone_on.state.own
        return job.reduce(gradient(job.comm.rank, 3)), gone_on.reduce(gradient(job.comm.rank, 3))

    for whole, after in on_jobs(2, work):
        assert torch.equal(whole, after)

    def more(job: Job) -> None:
        newest = CheckpointFolder(tmp_path / "model").newest()
        assert newest is not None
        job.loader(tmp_path).load(newest)
        job.begin(is_resumed=True)
        assert job.state.own == job.state.shared == {}
        job.reduce(gradient(job.comm.rank, 3))

    on_jobs(3, more)


def test_one_rank_sends_nothing_and_small_matrices_travel_as_they_are() -> None:
    alone = Job(SingleCommunicator())
    alone.begin()
    given = gradient(0)
    assert torch.equal(alone.reduce(given), given)
    assert not alone.state.own
    for size in (2, 3):
        for rank, total in enumerate(on_jobs(size, lambda job: job.reduce(gradient(job.comm.rank)), rank=9)):
            assert torch.allclose(total, sum_of(size), atol=1e-5), rank


def test_what_a_config_gets_wrong_is_told_before_training(tmp_path: Path) -> None:
    for text, rule in {
        "horovod_reduce_type = 'param'\n": "conflict",
        "mixed_precision = 'float16'\n": "conflict",
        "backend = 'tensorflow'\n": "needs-backend",
    }.items():
        assert problems(tmp_path, "horovod_compression = 'powersgd'\n" + text) == [f"horovod_compression: {rule}"]
