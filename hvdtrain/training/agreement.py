"""What the ranks agree on: the plan of an epoch, and whether to stop, to save, or to report a loss that is not finite.

The plan is made by one rank of each host where there is much to plan. As to wishes, no rank waits for the others: after
every N updates (about a tenth of a second; a second if ranks update alone), each rank starts an all-reduce of a few
numbers, and reads its result when it starts the next one. So what one rank wants is known to all after two such intervals,
after the same update, and the exchange runs while they compute.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy

from hvdtrain.checkpoint.progress import EpochProgress
from hvdtrain.comm.base import Communicator, Tensor, all_reduce, together, together_with_message
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.plan.order_keys import ORDER_VERSION, changed_since
from hvdtrain.data.plan.shared import WORTHWHILE, Offer, differences, map_plan, offer_plan
from hvdtrain.errors import CheckpointError, DataError, HvdtrainError
from hvdtrain.learner.reducer import Reducer

Message = Offer | Literal["waits"] | None
"""What a rank tells the others: where its plan is, that it waits for one, or (with a plan of its own for itself) nothing."""


def plan_together(comm: Communicator, feed: Feed, epoch: int) -> Plan:
    """Collective. The plan of an epoch: as `Feed.plan`, but of many sequences only one rank of a host makes it.

    The other ranks map it into their memory, if their lengths and keys have the same checksum. If they cannot, or the rank found
    no memory to share, they make it themselves.

    Raises:
        DataError: on all ranks alike.
    """
    with ExitStack() as shared:
        inputs: int | None = None  # the checksum, where the plan is shared

        def first() -> tuple[Plan | None, Message]:
            nonlocal inputs
            if comm.local_size == 1 or feed.only is not None or feed.distribution != "shard":
                return feed.plan(epoch), None
            arguments = feed.inputs(epoch)
            if arguments.size < WORTHWHILE:
                return arguments.plan(), None
            inputs = arguments.checksum()
            if comm.local_rank != 0:
                return None, "waits"
            made = arguments.plan()
            offer = shared.enter_context(offer_plan(made, inputs))
            return (made if offer is None else map_plan(offer) or made), offer

        made, messages = together_with_message(comm, first, name=f"plan_{feed.name}")
        if "waits" not in messages:
            return made  # type: ignore[return-value]  # only a rank that waits has none

        def second() -> Plan:
            if made is not None:
                return made
            offers = [message for message in messages if isinstance(message, Offer) and message.inputs == inputs]
            found = (map_plan(offer) for offer in offers)
            return next((plan for plan in found if plan is not None), None) or feed.plan(epoch)

        return together(comm, second, name=f"map_plan_{feed.name}")


def completed_share(
    comm: Communicator, feed: Feed, plan: Plan, tensor: Callable[[Sequence[float]], Tensor]
) -> Callable[[int], float]:
    """Collective. The share of an epoch's sequences (or chunks) that precede a position in it, from 0 to 1, as a function.

    Counted in batches, it would depend on the number of ranks wherever batches differ in size: in the last step of an epoch, in
    which some ranks may have none, and with batches that are limited by their frames.

    Args:
        feed: whose ranks share a plan, or have a plan each; a position is the number of batches that all ranks together, or each
            of them, have done.
        tensor: makes a tensor that can be sent to other ranks (`Learner.numbers`).
    """
    done = plan.bounds
    if feed.distribution != "shard" and comm.size > 1:
        rounds = max(comm.gather(plan.num_batches, name="rounds"))
        own = plan.bounds[numpy.minimum(numpy.arange(rounds + 1), plan.num_batches)]
        [sums] = all_reduce(comm, [tensor(own.tolist())], "sum", name="completed")  # the same rate on all ranks
        done = numpy.asarray(sums)

    def completed(position: int) -> float:
        return float(done[min(position, len(done) - 1)]) / float(done[-1]) if done[-1] else 0.0

    return completed


UNCHANGED_KEYS = "go on with the same data and the same keys for batches"


def agree_on_batches(
    comm: Communicator, feed: Feed, plan: Plan, own: int, current: EpochProgress, file: Path | None
) -> list[int]:
    """Collective. The number of batches each rank has left of an epoch, whose progress gets what identifies its plan.

    Args:
        own: the number of this rank.
        file: the model's file from which training goes on.

    Raises:
        DataError: the ranks planned different epochs.
        CheckpointError: the epoch had begun with another plan, or goes on after its end.
    """
    answers = comm.gather((own, plan.fingerprint(), plan.num_batches), name="plan")
    fingerprints = [fingerprint for _, fingerprint, _ in answers]
    plan_inputs = feed.plan_inputs(current.epoch)
    error: HvdtrainError | None = None
    if feed.distribution == "shard":
        error = _different_plans(feed, fingerprints)
        fingerprints = fingerprints[:1]
    if current.fingerprints and current.fingerprints != fingerprints:
        error = _changed_plan(current, feed, plan_inputs)
    elif current.position > (most := max(num_batches for _, _, num_batches in answers)):
        error = CheckpointError(
            f"{file}: expected a position of at most {most}, the batches of epoch {current.epoch}, got "
            f"{current.position} (remove the checkpoint within the epoch to repeat the epoch from its beginning)"
        )
    if error is not None:
        raise error.on_all_ranks()
    current.fingerprints, current.order_version, current.made_from = fingerprints, ORDER_VERSION, plan_inputs
    return [count for count, _, _ in answers]


def _different_plans(feed: Feed, fingerprints: Sequence[int]) -> DataError | None:
    """The error if ranks that share a plan have planned different epochs."""
    others = [rank for rank, fingerprint in enumerate(fingerprints) if fingerprint != fingerprints[0]]
    if not others:
        return None
    return DataError(
        f"{feed.name}: expected the same sequences on all ranks, got others on rank {others[0]} "
        "(are the files the same on all hosts?)"
    )


def _changed_plan(current: EpochProgress, feed: Feed, plan_inputs: Mapping[str, str]) -> CheckpointError:
    """The error if an epoch cannot go on with the batches it began with, with the reason as far as it is known."""
    changed = changed_since(current.order_version, feed.order_keys, current.epoch)
    differing = differences(current.made_from, plan_inputs)
    same = "go on with what was expected" if differing else UNCHANGED_KEYS
    why = f"{changed}: go on with the version of hvdtrain that wrote the checkpoint" if changed else same
    return CheckpointError(
        f"epoch {current.epoch}: expected the batches it began with, got others after {current.position} of them"
        f"{differing and ': '}{differing} ({why}, or remove the checkpoint within the epoch to repeat the epoch from its "
        "beginning)"
    )


INTERVAL = 0.1
"""Seconds between two exchanges, if updates take less time than that."""

LOCAL_UPDATES_INTERVAL = 1.0
"""The same if ranks do not wait for each other in every update: more exchanges would slow down a rank that runs ahead."""

TASK_INTERVAL = 10.0
"""The same if ranks exchange nothing else before the end, as in `forward`: those with less to compute would wait so long there
that the watchdog took the others for hung. More exchanges would be slower where batches are uneven."""


def vote_interval(reducer: Reducer) -> float:
    """The seconds between two exchanges in a training."""
    return INTERVAL if reducer.gradients.steps is None else LOCAL_UPDATES_INTERVAL


@dataclass(frozen=True)
class StopRequests:
    """What this rank wants (0 or 1), or the number of ranks that want it.

    Attributes:
        stop: end the training with a checkpoint. After Ctrl-C, this is `stop_by_hand`.
        save: write a checkpoint.
        report: report a loss that is not finite.
    """

    stop: int = 0
    stop_by_hand: int = 0
    save: int = 0
    report: int = 0


NONE = StopRequests()


class StopVote:
    """Counts wishes. Collective: all ranks call `step` after every update of a training and every step of an evaluation.

    Args:
        tensor: makes a tensor that can be sent to other ranks (`Learner.numbers`).
        interval: seconds between two exchanges.
    """

    def __init__(
        self,
        comm: Communicator,
        tensor: Callable[[Sequence[float]], Tensor],
        interval: float,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._comm = comm
        self._tensor = tensor
        self._interval = interval
        self._clock = clock
        self._handle: object = None
        self._since = clock()
        self._every = 1
        self._steps = 0

    def step(self, wishes: Callable[[], StopRequests]) -> StopRequests:
        """The ranks' wishes, if they have become known after this update or step.

        Args:
            wishes: gives this rank's; called when an exchange starts.
        """
        self._steps += 1
        if self._steps < self._every:
            return NONE
        counted = self.finish()
        seconds, self._since = self._clock() - self._since, self._clock()
        wanted = max(1, min(10 * self._steps, round(self._steps * self._interval / max(seconds, 1e-6))))
        # Rank 0 decides on the interval, as the ranks' clocks may differ.
        numbers = [*astuple(wishes()), wanted if self._comm.rank == 0 else 0]
        self._handle = self._comm.start([self._tensor(numbers)], "sum", name="wishes")
        self._steps = 0
        return counted

    def finish(self) -> StopRequests:
        """Collective. The result of the last exchange; waits for it if necessary."""
        if self._handle is None:
            return NONE
        [numbers] = self._comm.finish(self._handle)
        self._handle = None
        *counts, self._every = map(round, numpy.asarray(numbers).tolist())
        return StopRequests(*counts)
