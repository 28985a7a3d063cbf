"""Groups of ranks of which each trains one model."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from hvdtrain.comm.base import Communicator, Narrow, Op, Tensor
from hvdtrain.comm.groups import RankGroup, single_rank
from hvdtrain.errors import ConfigError

T = TypeVar("T")


class BetweenGroups:
    """Connects groups of ranks, as if each was one rank: the first ranks of the groups exchange, and pass the results on to the
    others, so that these are the same to the last bit.

    Args:
        within: the ranks of this group.
        leaders: the first ranks of all groups; None: this rank is not one of them.
        number: of this group.
        count: the number of groups.
    """

    def __init__(self, within: Communicator, leaders: Communicator | None, number: int, count: int) -> None:
        self._within = within
        self._leaders = leaders
        self.rank = number
        self.size = count
        self.local_rank = within.local_rank
        self.local_size = within.local_size
        self.sent = 0
        self.transport = within.transport

    def start(
        self,
        tensors: Sequence[Tensor],
        op: Op,
        *,
        name: str,
        owners: Sequence[int] | None = None,
        narrow: Narrow | None = None,
    ) -> Any:
        if self._leaders is None:
            return name, None, list(tensors)
        before = self._leaders.sent
        handle = self._leaders.start(tensors, op, name=name, owners=owners, narrow=narrow)
        self.sent += self._leaders.sent - before
        return name, handle, []

    def all_to_all(self, rows: Tensor, *, name: str) -> Any:
        if self._leaders is None:
            return name, None, [rows]
        before = self._leaders.sent
        handle = self._leaders.all_to_all(rows, name=name)
        self.sent += self._leaders.sent - before
        return name, handle, []

    def finish(self, handle: Any) -> list[Tensor]:
        name, started, tensors = handle
        return self._pass_on(tensors if self._leaders is None else self._leaders.finish(started), name)

    def bucket_bytes(self, on_gpu: bool) -> int:
        return self._within.bucket_bytes(on_gpu)

    def broadcast(self, tensors: Sequence[Tensor], *, name: str) -> list[Tensor]:
        return self._pass_on(tensors if self._leaders is None else self._leaders.broadcast(tensors, name=name), name)

    def gather_rows(
        self, tensors: Sequence[Tensor], *, name: str, lengths: Sequence[int] | None = None, narrow: Narrow | None = None
    ) -> list[Tensor]:
        # The others contribute no rows, so what they get is what the first rank of their group has.
        rows = (
            [tensor[:0] for tensor in tensors]
            if self._leaders is None
            else self._leaders.gather_rows(tensors, name=name, lengths=lengths, narrow=narrow)
        )
        return self._within.gather_rows(rows, name=f"{name}.pass_on")

    def gather(self, value: T, *, name: str) -> list[T]:
        values = [value] if self._leaders is None else self._leaders.gather(value, name=name)
        return self._within.gather(values, name=f"{name}.pass_on")[0]

    def send_to_first(self, value: T | None, source: int, *, name: str) -> T | None:
        return None if self._leaders is None else self._leaders.send_to_first(value, source, name=name)

    def channel(self, name: str) -> BetweenGroups:
        raise RuntimeError(f"channel {name}: expected the communicator of the job, got that between groups")

    def split(self, sets: Sequence[Sequence[int]], *, name: str) -> Communicator | None:
        raise RuntimeError(f"split {name}: expected the communicator of the job, got that between groups")

    def close(self) -> None:
        """Do nothing: the connection of the job is closed."""

    def _pass_on(self, tensors: Sequence[Tensor], name: str) -> list[Tensor]:
        return self._within.broadcast(tensors, name=f"{name}.pass_on")


def make_groups(comm: Communicator, wanted: int | Literal["host"] | None, where: str) -> RankGroup:
    """Collective. The group of this rank.

    Args:
        wanted: the number of ranks in a group; "host": the ranks of a host are a group; None: each rank is one.
        where: the key that says so, for messages.

    Raises:
        ConfigError: the ranks cannot be divided into groups of this size.
    """
    alone = single_rank(comm)
    if comm.size == 1 or wanted is None or wanted == 1:
        return alone
    if isinstance(wanted, int) and comm.size % wanted:
        raise ConfigError.of(
            "conflict",
            f"{where}: expected a number of ranks that divides all {comm.size} into groups, got {wanted} "
            "('host' makes a group of the ranks of each host)",
        ).on_all_ranks()
    hosts = comm.gather(socket.gethostname(), name="param_group")
    names = [host if wanted == "host" else rank // int(wanted) for rank, host in enumerate(hosts)]
    groups = [[rank for rank, name in enumerate(names) if name == wanted_name] for wanted_name in dict.fromkeys(names)]
    if len(groups) == comm.size:
        return alone
    if len(groups) == 1:
        return RankGroup(tuple(groups[0]), comm, alone.within, comm)
    within = comm.split(groups, name="group")
    leaders = comm.split([[ranks[0] for ranks in groups]], name="between_groups")
    number = next(number for number, ranks in enumerate(groups) if comm.rank in ranks)
    if within is None:
        raise RuntimeError(f"rank {comm.rank} is in no group")
    between = BetweenGroups(within, leaders, number, len(groups))
    return RankGroup(tuple(groups[number]), within, between, comm)
