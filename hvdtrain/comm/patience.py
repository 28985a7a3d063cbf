"""Work that takes one rank long and the others not, without anybody taking the waiting ones for hung."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hvdtrain.comm.base import Communicator, together

T = TypeVar("T")

PAUSE = 1.0
"""Seconds between two questions to the other ranks, at most."""


def patiently(
    comm: Communicator, work: Callable[[Callable[[int], None]], T], alive: Callable[[list[int]], None], *, name: str
) -> tuple[T, list[T]]:
    """Collective. Run `work` on every rank, in a thread, until all are done; errors are raised as by `together`.

    Args:
        work: is handed a function, which it calls with a number that changes as long as it makes progress.
        alive: called while any rank makes progress, with every rank's number; for the watchdog, and for people.

    Returns:
        What the work returned here, and on all ranks in rank order.
    """
    told: list[int] = [0]
    outcome: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            outcome.append(work(lambda number: told.__setitem__(0, number)))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)  # it must not keep a program that is interrupted
    thread.start()
    seen: list[Any] = []
    pause = 0.01
    while True:
        thread.join(pause)
        states = comm.gather((thread.is_alive(), told[0]), name=name)
        if states != seen:
            alive([number for _, number in states])
            seen = states
        if not any(working for working, _ in states):
            break
        pause = min(PAUSE, 2 * pause)

    def result() -> T:
        if errors:
            raise errors[0]
        return outcome[0]

    made = together(comm, result, name=f"{name}.end")
    return made, comm.gather(made, name=f"{name}.results")
