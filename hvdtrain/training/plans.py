"""The ranks' agreement on who makes the plan of an epoch."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Literal

from hvdtrain.comm.base import Communicator, together, together_with_message
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.epoch import Plan
from hvdtrain.data.plan.shared import WORTHWHILE, Offer, mapped, offered

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
            offer = shared.enter_context(offered(made, inputs))
            return (made if offer is None else mapped(offer) or made), offer

        made, messages = together_with_message(comm, first, name=f"plan_{feed.name}")
        if "waits" not in messages:
            return made  # type: ignore[return-value]  # only a rank that waits has none

        def second() -> Plan:
            if made is not None:
                return made
            offers = [message for message in messages if isinstance(message, Offer) and message.inputs == inputs]
            found = (mapped(offer) for offer in offers)
            return next((plan for plan in found if plan is not None), None) or feed.plan(epoch)

        return together(comm, second, name=f"map_plan_{feed.name}")
