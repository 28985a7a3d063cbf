"""What the ranks agree on: the plan of an epoch, and who has a batch in a step."""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor, all_reduce, gather_together
from hvdtrain.config.plugins import Registry
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.plan.inputs import differences
from hvdtrain.data.plan.order_keys import ORDER_VERSION, changed_since
from hvdtrain.errors import CheckpointError, DataError, HvdtrainError

Planner = Callable[[Communicator, Feed, int], tuple[Plan, Sequence[object]]]
"""Collective. Makes the plan of an epoch; returns it, and by rank the checksum of its plan, or None where its order is another
one. Raises: DataError, on all ranks alike."""

PLANNERS: Registry[Planner] = Registry("planners")
"""Those of plug-ins; the last one is used."""


def plan_together(comm: Communicator, feed: Feed, epoch: int) -> Plan:
    """Collective. The plan of an epoch, as `Feed.plan`.

    Raises:
        ConfigError: the ranks make different plans, because of keys or lengths that the error names; on all ranks alike.
        DataError: on all ranks alike.
    """
    planner = PLANNERS.last or plan_on_each
    plan, checksums = planner(comm, feed, epoch)
    if different := [rank for rank, checksum in enumerate(checksums) if checksum != checksums[0]]:
        check_alike(comm, "plan", feed.plan_inputs(epoch), of=f"{feed.name}: ")
        raise DataError(
            f"{feed.name}: expected the same sequences on all ranks, got others on rank {different[0]} "
            "(are the files the same on all hosts?)"
        ).on_all_ranks()
    return plan


def plan_on_each(comm: Communicator, feed: Feed, epoch: int) -> tuple[Plan, Sequence[object]]:
    """As of a `Planner`: each rank makes the whole plan."""
    plans: list[Plan] = []

    def make() -> int | None:
        plans.append(feed.plan(epoch))
        is_same = feed.only is None and feed.distribution == "shard" and comm.size > 1
        return plans[0].fingerprint if is_same else None

    checksums = gather_together(comm, make, name=f"plan_{feed.name}")
    return plans[0], checksums


def completed_share(
    comm: Communicator, feed: Feed, plan: Plan, tensor: Callable[[Sequence[float]], Tensor]
) -> Callable[[int], float]:
    """Collective. A function that returns the share of an epoch's sequences (chunks, frames) before a position, from 0 to 1.

    A share of the batches would depend on the number of ranks if batches differ in size: in the last step of an epoch, in which
    some ranks may have none, and if batches are limited by their frames.

    Args:
        feed: if its ranks share a plan, a position is the number of batches that they did together, else that each did.
        tensor: makes a tensor that can be sent to other ranks (`Learner.numbers`).
    """
    done = plan.done
    if feed.distribution != "shard" and comm.size > 1:
        rounds = max(comm.gather(plan.num_batches, name="rounds"))
        done_by_rank = done[numpy.minimum(numpy.arange(rounds + 1), plan.num_batches)]
        [sums] = all_reduce(comm, [tensor(done_by_rank.tolist())], "sum", name="completed")  # the same rate on all ranks
        done = numpy.asarray(sums)

    last = len(done) - 1
    total = float(done[-1])

    def share_done(position: int) -> float:
        return done.item(position if position < last else last) / total if total else 0.0

    return share_done


UNCHANGED_KEYS = "continue with the same data and the same keys for batches"


class RanksInStep(Sequence[bool]):
    """By rank, whether it has a batch in a step. It costs the same whatever the number of ranks."""

    def __init__(self, by_rank: Sequence[int], step: int, ranks: int) -> None:
        self._by_rank = by_rank
        self._step = step
        self._ranks = ranks

    def __len__(self) -> int:
        return len(self._by_rank)

    def __getitem__(self, rank: Any) -> Any:
        return self._by_rank[rank] > self._step

    def count(self, value: Any) -> int:
        return self._ranks if value else len(self) - self._ranks


class BatchCounts:
    """How many batches the ranks have left of an epoch. Questions about a step cost the same whatever the number of ranks.

    >>> counts = BatchCounts([2, 1, 2])
    >>> counts.most, [counts.ranks_in(step) for step in range(3)]
    (2, [3, 2, 0])
    >>> list(counts.with_batch(1)), counts.with_batch(1).count(True)
    ([True, False, True], 2)
    """

    def __init__(self, by_rank: Iterable[int]) -> None:
        self._by_rank = tuple(by_rank)
        self._ascending = sorted(self._by_rank)
        self._least = self._ascending[0]
        self._all_ranks = RanksInStep(self._by_rank, self._least - 1, len(self._by_rank))

    @property
    def most(self) -> int:
        """The largest number of a rank."""
        return self._ascending[-1]

    def ranks_in(self, step: int) -> int:
        """The number of ranks that have a batch in a step, counted from 0."""
        return len(self._by_rank) if step < self._least else len(self._ascending) - bisect_right(self._ascending, step)

    def with_batch(self, step: int) -> RanksInStep:
        """By rank, whether it has a batch in a step."""
        return self._all_ranks if step < self._least else RanksInStep(self._by_rank, step, self.ranks_in(step))


def check_trained(comm: Communicator, trained: Mapping[str, str] | None) -> None:
    """Collective. Compare what the ranks train.

    Args:
        trained: by the name of a parameter, whether it is trained now, as text. None: this rank had no batch in the last step,
            so that its train_step, which may change that, has not run.

    Raises:
        ConfigError: a parameter is trained on one rank, and not on another.
    """
    checksum = None if trained is None else zlib.crc32(repr(sorted(trained.items())).encode())
    checksums = comm.gather(checksum, name="trained")
    ran = [rank for rank, checksum in enumerate(checksums) if checksum is not None]
    if any(checksums[rank] != checksums[ran[0]] for rank in ran):
        of_first = comm.gather({} if trained is None or comm.rank != ran[0] else trained, name="trained.values")[ran[0]]
        check_alike(comm, "trained", of_first if trained is None else trained)


def agree_on_batches(
    comm: Communicator,
    feed: Feed,
    plan: Plan,
    num_left: int,
    current: EpochProgress,
    file: Path | None,
) -> BatchCounts:
    """Collective. How many batches the ranks have left of an epoch; stores what identifies the plan in its progress.

    Args:
        num_left: the number of this rank.
        file: the model's file from which training resumes.

    Raises:
        CheckpointError: the epoch began with another plan, or the position is beyond its end.
    """
    answers = comm.gather((num_left, plan.fingerprint, plan.num_batches), name="plan")
    fingerprints = [fingerprint for _, fingerprint, _ in answers]
    plan_inputs = feed.plan_inputs(current.epoch)
    error: HvdtrainError | None = None
    if feed.distribution == "shard":
        fingerprints = fingerprints[:1]  # `plan_together` has compared them
    if current.fingerprints and not _is_same_plan(current, feed, fingerprints):
        error = _changed_plan_error(current, feed, plan_inputs, file)
    elif current.position > (most := max(num_batches for _, _, num_batches in answers)):
        error = CheckpointError(
            f"{file}: expected a position of at most {most}, the batches of epoch {current.epoch}, got "
            f"{current.position} (remove this file to repeat the epoch from its beginning)"
        )
    if error is not None:
        raise error.on_all_ranks()
    current.fingerprints = fingerprints
    current.order_version = ORDER_VERSION
    current.made_from = plan_inputs
    return BatchCounts(count for count, _, _ in answers)


def _is_same_plan(current: EpochProgress, feed: Feed, fingerprints: Sequence[int]) -> bool:
    """Whether an epoch goes on with the batches that it began with. Where each rank has a plan, there may be more or fewer ranks
    now: those that were there before go on."""
    before = current.fingerprints
    if feed.distribution != "shard" and current.made_from.get("horovod_dataset_distribution") == feed.distribution:
        before, fingerprints = before[: len(fingerprints)], fingerprints[: len(before)]
    return before == list(fingerprints)


def _changed_plan_error(current: EpochProgress, feed: Feed, plan_inputs: Mapping[str, str], file: Path | None) -> CheckpointError:
    """The error if an epoch cannot resume with the batches it began with, and the reason if it is known."""
    changed = changed_since(current.order_version, feed.order_keys, current.epoch)
    differing = differences(current.made_from, plan_inputs)
    same = "continue with what was expected" if differing else UNCHANGED_KEYS
    why = f"{changed}: continue with the version of hvdtrain that wrote the checkpoint" if changed else same
    return CheckpointError(
        f"epoch {current.epoch}: expected the batches it began with, got others after {current.position} of them"
        f"{differing and ': '}{differing} ({why}, or remove {file} to repeat the epoch from its beginning)"
    )
