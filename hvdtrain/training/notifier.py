"""Calling the user's code between steps, which may take any time on any rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.comm.base import Communicator
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.callbacks import EVENTS, Callbacks, Training

REPORTS = "reports to services"
"""An additional event, which may also take any time."""


class Notifier:
    """Calls the callbacks of all ranks. If any rank has one for an event, the ranks wait for each other after it.

    Args:
        callbacks: the callbacks of this rank.
        training: their argument.
        has_services: whether this rank reports to services.
    """

    def __init__(
        self, comm: Communicator, watchdog: Watchdog, callbacks: Callbacks, training: Training, has_services: bool
    ) -> None:
        self._comm = comm
        self._watchdog = watchdog
        self._callbacks = callbacks
        self._training = training
        self._own_events = {event for event in EVENTS if callbacks.has(event)} | ({REPORTS} if has_services else set())
        self._subscribed_events: set[str] = set()  # those of all ranks together

    def subscribe(self) -> None:
        """Collective. Find out which events any rank has callbacks for."""
        self._subscribed_events = set().union(*self._comm.gather(self._own_events, name="callback_events"))

    def notify(self, event: str) -> None:
        """Collective. Call the callbacks for an event."""
        if event in self._subscribed_events:
            with self._without_timeout(f"{event} of a callback"):
                self._callbacks.call(event, self._training)

    def notify_step_end(self) -> None:
        """Call the callbacks of this rank after a step; the ranks do not wait for each other."""
        self._callbacks.call("on_step_end", self._training)

    @contextmanager
    def reporting(self, epoch: int) -> Iterator[None]:
        """Collective. A context for reporting an epoch to services."""
        if REPORTS not in self._subscribed_events:
            yield
            return
        with self._without_timeout(f"{REPORTS} of epoch {epoch}"):
            yield

    @contextmanager
    def _without_timeout(self, what: str) -> Iterator[None]:
        """Collective. A context for the user's code: the watchdog allows it any time, and ranks without such code wait."""
        self._watchdog.beat(what, "unhurried")
        yield
        self._comm.gather(None, name="unhurried")
        self._watchdog.beat(f"after {what}", "between")
