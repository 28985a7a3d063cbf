"""The plan of an epoch, made by one rank of a host for all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal

from hvdtrain.comm.base import Communicator, gather_together
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.plugins.shared_plans.offers import Offer, map_plan, offer_plan

WORTHWHILE = 1_000_000
"""Plans of at least this many sequences are shared. Smaller ones take a fraction of a second and some megabytes."""

Message = Offer | Literal["waits"] | int | None
"""A rank's message to the others: where its plan is, that it waits for one, or the checksum of a plan that it made for itself;
None: its order is another one."""


def plan_shared(comm: Communicator, feed: Feed, epoch: int) -> tuple[Plan, Sequence[object]]:
    """Collective. The plan of an epoch, and by rank the checksum of its plan; None: its order is another one.

    The other ranks of a host map the plan into their memory if their lengths and keys have the same checksum. If that fails, or
    there was no memory to share, they make it themselves.

    Raises:
        DataError: on all ranks alike.
    """
    is_shared = feed.only is None and feed.distribution == "shard"
    with ExitStack() as shared:
        inputs: int | None = None  # the checksum, where the plan is shared
        plan: Plan | None = None

        def plan_or_offer() -> Message:
            nonlocal inputs, plan
            if is_shared and min(comm.size, comm.local_size) > 1 and (arguments := feed.inputs(epoch)).size >= WORTHWHILE:
                inputs = arguments.checksum()
                if comm.local_rank != 0:
                    return "waits"
                plan = arguments.plan()
                offer = shared.enter_context(offer_plan(plan, inputs))
                plan = plan if offer is None else map_plan(offer) or plan
                return offer or plan.fingerprint
            plan = feed.plan(epoch)
            return plan.fingerprint if is_shared and comm.size > 1 else None

        messages = gather_together(comm, plan_or_offer, name=f"plan_{feed.name}")

        def map_or_plan() -> int:
            nonlocal plan
            offers = [message for message in messages if isinstance(message, Offer) and message.inputs == inputs]
            mapped = (map_plan(offer) for offer in offers if plan is None)
            plan = plan or next(filter(None, mapped), None) or feed.plan(epoch)
            return plan.fingerprint

        checksums: Sequence[object] = [message.plan if isinstance(message, Offer) else message for message in messages]
        if "waits" in messages:
            checksums = gather_together(comm, map_or_plan, name=f"map_plan_{feed.name}")
    if plan is None:
        raise RuntimeError(f"{feed.name}: expected a plan, got none")
    return plan, checksums
