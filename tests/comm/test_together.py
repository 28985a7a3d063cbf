"""What ranks do together and one for all, and how an error of one becomes that of all: ranks as threads."""

import time
from collections.abc import Callable

import pytest
import torch
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator, all_reduce, on_rank_zero, together
from hvdtrain.errors import DataError, PeerFailure
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.copies.heartbeat import run_with_heartbeat
from hvdtrain.runtime.timer import Timer


def test_sums_averages_and_rows() -> None:
    def work(comm: Communicator) -> tuple[list[float], ...]:
        mine = torch.tensor([1.0, comm.rank])
        rows = torch.full((comm.rank, 1), float(comm.rank))
        reduced = (all_reduce(comm, [mine], op, name=op)[0].tolist() for op in ("sum", "average"))
        return (*reduced, comm.gather_rows([rows], name="rows")[0][:, 0].tolist())

    assert on_ranks(3, work) == [([3.0, 3.0], [1.0, 1.0], [1.0, 2.0, 2.0])] * 3


def test_the_lowest_ranks_error_is_raised_on_all_ranks() -> None:
    def work(comm: Communicator) -> tuple[str, bool]:
        def fails() -> None:
            if comm.rank > 0:
                raise DataError(f"planted on {comm.rank}")

        with pytest.raises(DataError) as caught:
            together(comm, fails, name="fails")
        return str(caught.value), caught.value.on_every_rank

    assert on_ranks(3, work) == [("rank 1: planted on 1", True)] * 3


def test_an_error_on_all_ranks_is_told_as_one() -> None:
    def work(comm: Communicator) -> str:
        def fails() -> None:
            raise DataError("planted")

        with pytest.raises(DataError) as caught:
            together(comm, fails, name="fails")
        return str(caught.value)

    assert on_ranks(2, work) == ["planted"] * 2


def test_rank_0_does_it_for_all() -> None:
    def work(comm: Communicator) -> tuple[list[int], str]:
        did: list[int] = []
        value = on_rank_zero(comm, lambda: did.append(comm.rank) or "done", name="it")  # type: ignore[func-returns-value]
        return did, value

    assert on_ranks(3, work) == [([0], "done"), ([], "done"), ([], "done")]


def test_a_crash_is_no_mistake_of_the_users_and_ends_all() -> None:
    def work(comm: Communicator) -> None:
        def crashes() -> None:
            if comm.rank == 1:
                raise ZeroDivisionError
            time.sleep(0.01)

        if comm.rank == 1:
            together(comm, crashes, name="crashes")
        with pytest.raises(PeerFailure):
            together(comm, crashes, name="crashes")

    with pytest.raises(ZeroDivisionError):
        on_ranks(3, work)


def test_who_waits_for_long_work_hears_of_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hvdtrain.plugins.copies.heartbeat.MAX_PAUSE", 0.02)

    def work(comm: Communicator) -> tuple[int, list[list[int]]]:
        heard: list[list[int]] = []

        def long(progress: Callable[[int], None]) -> int:
            for number in range(5) if comm.rank == 1 else ():
                progress(number)
                time.sleep(0.05)
            return 10 + comm.rank

        return run_with_heartbeat(comm, long, lambda numbers: heard.append(list(numbers)), name="long"), heard

    for rank, (result, heard) in enumerate(on_ranks(2, work)):
        assert result == 10 + rank
        assert heard


def test_what_one_rank_knows_all_agree_on() -> None:
    def work(comm: Communicator) -> str:
        gradients = GradientExchange(comm, Timer())
        return gradients.agree("known" if comm.rank == 1 else None)

    assert on_ranks(3, work) == ["known"] * 3


@pytest.mark.parametrize("average", [False, True])
def test_sparse_gradients_of_all_ranks_come_one_after_the_other(average: bool) -> None:
    def work(comm: Communicator) -> tuple[list[float], list[int]]:
        gradients = GradientExchange(comm, Timer(), "average" if average else "sum")
        values, indices = torch.full((2, 1), 1.0 + comm.rank), torch.tensor([comm.rank, 7])
        values, indices = gradients.rows(values, indices, name="rows")
        return values[:, 0].tolist(), indices.tolist()

    scale = 2 if average else 1
    assert on_ranks(2, work) == [([1 / scale, 1 / scale, 2 / scale, 2 / scale], [0, 7, 1, 7])] * 2
