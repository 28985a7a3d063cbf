"""Processes that each do a part of a job and seldom speak: the converter's ranks."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from hvdtrain.errors import ConfigError, HvdtrainError, PeerFailure

T = TypeVar("T")


class Peers(Protocol):
    """The ranks of a job without tensors. One process alone is a job of size 1."""

    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Collective. Every rank's picklable value, in rank order, on every rank."""
        ...

    def tell_failure(self) -> None:
        """Let the other ranks know, at once and without waiting for them, that this one failed."""
        ...

    def has_failed(self) -> bool:
        """Whether another rank told its failure. Costs a microsecond, so it can be asked for every sequence."""
        ...

    def abort(self, status: int) -> None:
        """End all ranks, wherever they are. One process alone goes on and ends by itself."""
        ...


class Alone:
    """One process: everything collective is the identity."""

    rank = 0
    size = 1

    def gather(self, value: T) -> list[T]:
        return [value]

    def tell_failure(self) -> None:
        pass

    def has_failed(self) -> bool:
        return False

    def abort(self, status: int) -> None:
        pass


class Crashed(HvdtrainError):
    """A bug on one of several ranks, such as an exception in a user's own Python. The message is its traceback."""


def agreed(peers: Peers, work: Callable[[], T]) -> T:
    """Collective. Run `work` on every rank; where it fails on any rank, all ranks raise the error of the lowest such rank.

    `work` should ask `peers.has_failed()` now and then and raise PeerFailure if so: then nobody works on in vain.
    """
    error: Exception | None = None
    result: Any = None
    try:
        result = work()
    except Exception as failure:
        error = failure
        if peers.size > 1 and not isinstance(failure, HvdtrainError):  # any other might not travel
            error = Crashed("".join(traceback.format_exception(failure)).rstrip())
        if not isinstance(failure, PeerFailure):
            peers.tell_failure()
    failures = [(rank, one) for rank, one in enumerate(peers.gather(error)) if one is not None]
    causes = [(rank, one) for rank, one in failures if not isinstance(one, PeerFailure)]
    if failures:
        rank, first = (causes or failures)[0]
        if len(causes) < peers.size and isinstance(first, HvdtrainError) and not isinstance(first, ConfigError):
            first = first.of_rank(rank)
        raise first
    return result  # type: ignore[no-any-return]
