"""Long work on every rank, during which the ranks show each other that they make progress."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

from hvdtrain.comm.base import Communicator, together

T = TypeVar("T")

MAX_PAUSE = 1.0
"""Maximum interval in seconds between two exchanges of `run_with_heartbeat`."""


def run_with_heartbeat(
    comm: Communicator, work: Callable[[Callable[[int], None]], T], heartbeat: Callable[[list[int]], None], *, name: str
) -> T:
    """Collective. Run `work` in a thread on every rank and wait until it is done on all ranks.

    Errors are raised as by `together`.

    Args:
        work: called with a function `report(number)`, which it calls with a changing number as long as it makes progress.
        heartbeat: called while any rank makes progress, with the numbers of all ranks, for example to reset the watchdog.

    Returns:
        The result of `work` on this rank.
    """
    progress: list[int] = [0]
    results: list[T] = []
    errors: list[Exception] = []

    def report(number: int) -> None:
        progress[0] = number

    def run() -> None:
        try:
            results.append(work(report))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name=name, daemon=True)  # a daemon does not keep an interrupted program alive
    thread.start()
    last_states: list[Any] = []
    pause = 0.01
    while True:
        thread.join(pause)
        states = comm.gather((thread.is_alive(), progress[0]), name=name)
        if states != last_states:
            heartbeat([number for _, number in states])
            last_states = states
        if not any(is_running for is_running, _ in states):
            break
        pause = min(MAX_PAUSE, 2 * pause)

    def result_or_error() -> T:
        if errors:
            raise errors[0]
        return results[0]

    return together(comm, result_or_error, name=f"{name}.end")
