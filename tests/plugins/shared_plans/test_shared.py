"""One rank of a host plans, the others map its plan: the same plan, without a file left behind, and never without a plan."""

import gc
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from opened_data import Numbers
from thread_ranks import on_ranks

from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.plan.inputs import PlanInputs
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.plugins.shared_plans import offers, planner
from hvdtrain.plugins.shared_plans.offers import Offer, map_plan, offer_plan
from hvdtrain.start_up.announce import check_plans
from hvdtrain.training.agreement import plan_together

LENGTHS = {"data": numpy.random.default_rng(0).integers(1, 90, 5000).astype(numpy.int32)}
ORDER, BATCHES = OrderKeys(seq_ordering="laplace:.100"), BatchKeys(batch_size=500)


def feed(rank: int, size: int, lengths: dict[str, numpy.ndarray] = LENGTHS, **more: object) -> Feed:
    return Feed("train", Numbers(lengths), ORDER, BATCHES, rank, size, **more)  # type: ignore[arg-type]


def inputs(**changed: object) -> PlanInputs:
    return replace(PlanInputs(LENGTHS, ORDER, BATCHES, 1, None, None, None), **changed)  # type: ignore[arg-type]


ALONE = inputs().plan()


@pytest.fixture(autouse=True)
def _few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "WORTHWHILE", 1000)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[PlanInputs]:
    """What plans were made from, in turn."""
    made: list[PlanInputs] = []
    original = PlanInputs.plan

    def plan(self: PlanInputs) -> Plan:
        made.append(self)
        return original(self)

    monkeypatch.setattr(PlanInputs, "plan", plan)
    return made


def on_hosts(hosts: list[int], work: Callable[[Communicator], Plan]) -> list[Plan]:
    """`work` on as many ranks of each host."""
    places = [(local, count) for count in hosts for local in range(count)]

    def run(comm: Communicator) -> Plan:
        comm.local_rank, comm.local_size = places[comm.rank]
        return work(comm)

    return on_ranks(len(places), run)


def test_one_rank_of_a_host_plans_and_the_others_map_it(planned: list[PlanInputs]) -> None:
    gc.collect()  # what other tests left open
    before = len(os.listdir("/proc/self/fd"))
    found = on_ranks(4, lambda comm: plan_together(comm, feed(comm.rank, comm.size), 1))
    assert len(planned) == 1
    for made in found:
        assert not made.order.flags.owndata
        assert not made.order.flags.writeable
        assert made.batch(3).flags.writeable
        assert (made.order.dtype, made.bounds.dtype, made.batch(3).dtype) == (numpy.int32, numpy.int64, numpy.int64)
        numpy.testing.assert_array_equal(made.order, ALONE.order)
        numpy.testing.assert_array_equal(made.bounds, ALONE.bounds)
        assert made.fingerprint == ALONE.fingerprint
    assert len(os.listdir("/proc/self/fd")) <= before + len(found)  # a map keeps a separate descriptor until it is dropped
    del made
    found.clear()
    assert len(os.listdir("/proc/self/fd")) == before


def test_each_host_has_a_rank_that_plans(planned: list[PlanInputs]) -> None:
    found = on_hosts([2, 3, 1], lambda comm: plan_together(comm, feed(comm.rank, comm.size), 1))
    assert len(planned) == 3
    assert {made.fingerprint for made in found} == {ALONE.fingerprint}


@pytest.mark.parametrize(
    ("size", "more"),
    [(1, {}), (3, {"distribution": "random_seed_offset"}), (3, {"lengths": {"data": LENGTHS["data"][:999]}})],
    ids=["one rank", "every rank in its own order", "few sequences"],
)
def test_every_rank_plans_where_there_is_nothing_to_share(size: int, more: dict[str, object], planned: list[PlanInputs]) -> None:
    found = on_ranks(size, lambda comm: plan_together(comm, feed(comm.rank, comm.size, **more), 1))  # type: ignore[arg-type]
    assert len(planned) == size
    assert len({made.fingerprint for made in found}) == (3 if "distribution" in more else 1)


MORE_FRAMES = {"data": LENGTHS["data"] + (numpy.arange(len(LENGTHS["data"])) == 4321)}


@pytest.mark.parametrize(
    ("lengths", "keys", "found"),
    [
        (MORE_FRAMES, BATCHES, "train: the data: expected the same on all ranks, got .* frames of 'data' on rank 0"),
        ({"data": LENGTHS["data"][:999]}, BATCHES, "train: the data: .* and 999 sequences, "),
        ({"data": LENGTHS["data"][::-1]}, BATCHES, "train: expected the same sequences on all ranks, got others on rank "),
        (LENGTHS, replace(BATCHES, max_seqs=7), "train: max_seqs per rank: expected the same .* 7 on rank "),
    ],
    ids=["other lengths", "few sequences", "another order", "another key"],
)
@pytest.mark.parametrize("hosts", [[3], [2, 1], [1, 1, 1]])
def test_ranks_with_other_plans_are_told_why(
    lengths: dict[str, numpy.ndarray], keys: BatchKeys, found: str, hosts: list[int]
) -> None:
    for other in (1, 2):

        def work(comm: Communicator, other: int = other) -> Plan:
            own = replace(feed(comm.rank, 3, lengths), batch_keys=keys) if comm.rank == other else feed(comm.rank, 3)
            return plan_together(comm, own, 1)

        with pytest.raises(HvdtrainError, match=found) as caught:
            on_hosts(hosts, work)
        assert caught.value.on_every_rank


def test_a_dataset_that_will_be_evaluated_with_other_batches_is_told_at_the_start() -> None:
    def work(comm: Communicator) -> None:
        dev = replace(feed(comm.rank, 2), name="dev", batch_keys=replace(BATCHES, max_seqs=1 + comm.rank))
        check_plans(comm, [feed(comm.rank, 2), dev], 1)

    with pytest.raises(
        ConfigError, match="dev: max_seqs per rank: expected the same on all ranks, got 1 on rank 0 and 2 on rank 1"
    ):
        on_ranks(2, work)


@pytest.mark.parametrize("failing", [0, 2])
def test_ranks_fail_together_where_one_cannot_plan(failing: int) -> None:
    def work(comm: Communicator) -> str:
        one = feed(comm.rank, comm.size)
        if comm.rank == failing:
            one = replace(one, batch_keys=replace(BATCHES, max_seqs=lambda **_: 0))
        with pytest.raises(DataError) as caught:
            plan_together(comm, one, 1)
        return str(caught.value)

    expected = f"rank {failing}: max_seqs: expected the function to return a positive integer, -1 or None, got 0 for epoch 1"
    assert on_ranks(3, work) == [expected] * 3


def test_without_memory_to_share_every_rank_plans(planned: list[PlanInputs]) -> None:
    """A limit on the size of files, which the system applies to shared memory, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        found = on_ranks(3, lambda comm: plan_together(comm, feed(comm.rank, comm.size), 1))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(planned) == 3
    assert {made.fingerprint for made in found} == {ALONE.fingerprint}


def test_a_temporary_file_serves_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refused(name: str) -> int:
        raise PermissionError(name)

    monkeypatch.setattr(os, "memfd_create", refused)
    monkeypatch.setattr(offers.tempfile, "tempdir", str(tmp_path))
    with offer_plan(ALONE, 0) as offer:
        made = map_plan(offer)
        assert not list(tmp_path.iterdir())
    assert made.fingerprint == ALONE.fingerprint
    monkeypatch.setattr(offers.tempfile, "tempdir", str(tmp_path / "not_there"))
    with offer_plan(ALONE, 0) as offer:
        assert offer is None


MAKER = """
import pickle, sys, time
import numpy
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.plugins.shared_plans.offers import offer_plan
with offer_plan(Plan(numpy.arange(100_000), numpy.array([0, 70_000, 100_000])), 7) as offer:
    pickle.dump(offer, sys.stdout.buffer)
    sys.stdout.flush()
    time.sleep(60)
"""


def test_the_plan_of_another_process_outlives_it() -> None:
    """Also when it is killed. Afterwards there is nothing to be opened any more."""
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE) as maker:
        assert maker.stdout is not None
        offer: Offer = pickle.load(maker.stdout)
        assert (offer.process, offer.inputs) == (maker.pid, 7)
        made = map_plan(offer)
        maker.send_signal(signal.SIGKILL)
    assert made is not None
    assert made.fingerprint == Plan(numpy.arange(100_000), numpy.array([0, 70_000, 100_000])).fingerprint
    assert map_plan(offer) is None


def test_only_the_file_that_was_offered_is_mapped(tmp_path: Path) -> None:
    with offer_plan(ALONE, 0) as offer:
        assert offer is not None
        for other in (
            replace(offer, host="another"),
            replace(offer, token=b"x" * len(offer.token)),
            replace(offer, num_bounds=offer.num_bounds + 1),
            replace(offer, descriptor=99_999),
        ):
            assert map_plan(other) is None
        os.mkfifo(tmp_path / "fifo")
        fifo = os.open(tmp_path / "fifo", os.O_RDWR)
        assert map_plan(replace(offer, descriptor=fifo)) is None
        os.close(fifo)
    assert map_plan(offer) is None


def test_indices_that_need_64_bits_keep_them() -> None:
    many = Plan(numpy.array([3, 2**31, 5]), numpy.array([0, 2, 3]))
    with offer_plan(many, 0) as offer:
        assert offer is not None
        made = map_plan(offer)
    assert made is not None
    assert [batch.tolist() for batch in made.rank_batches(0, 1)] == [[3, 2**31], [5]]
    assert made.fingerprint == many.fingerprint


def test_the_checksum_covers_all_that_a_plan_depends_on() -> None:
    chunked = make_chunks(LENGTHS, ChunkKeys(chunking="10:5"))
    others = [
        inputs(epoch=2),
        inputs(lengths={"data": LENGTHS["data"][::-1]}),
        inputs(lengths={"classes": LENGTHS["data"]}),
        inputs(subset=numpy.arange(4000)),
        inputs(file_bounds=numpy.array([0, 5000])),
        inputs(chunks=chunked),
        inputs(chunks=make_chunks(LENGTHS, ChunkKeys(chunking="10:4"))),
        *(
            inputs(order_keys=replace(ORDER, **changed))
            for changed in (
                {"seq_ordering": "laplace:.99"},
                {"partition_epoch": 2},
                {"repeat_epoch": 2},
                {"partition_by": "files"},
                {"random_seed_offset": 5},
            )
        ),
        *(
            inputs(batch_keys=replace(BATCHES, **changed))
            for changed in (
                {"batch_size": {"data": 500}},
                {"max_seqs": 7},
                {"max_pad_size": 7},
                {"packed_batch_size": 70},
                {"max_seq_length": 70},
                {"min_seq_length": 7},
                {"shuffle_batches": True},
                {"balance_ranks": 2},
                {"online_shuffle_batches": 2},
            )
        ),
    ]
    assert len({inputs().checksum(), *(other.checksum() for other in others)}) == 1 + len(others)
    alike = inputs(
        order_keys=replace(ORDER, seq_ordering=lambda **_: "laplace:.100"), batch_keys=BatchKeys(batch_size=lambda **_: 500)
    )
    assert alike.checksum() == inputs().checksum()
    assert inputs(chunks=chunked).size == len(chunked.sequences) > inputs().size == 5000
