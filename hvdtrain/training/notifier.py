"""Calling code of the user's between steps, which may take as long as it needs on any rank."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.comm.base import Communicator
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.callbacks import EVENTS, Callbacks, Training

REPORTS = "reports to services"
"""What takes as long as it needs besides the callbacks."""


class Notifier:
    """Calls the callbacks of all ranks. The ranks wait for each other where any of them has one.

    Args:
        callbacks: those of this rank.
        training: what they see.
        has_services: whether this rank reports to services.
    """

    def __init__(
        self, comm: Communicator, watchdog: Watchdog, callbacks: Callbacks, training: Training, has_services: bool
    ) -> None:
        self._comm = comm
        self._watchdog = watchdog
        self._callbacks = callbacks
        self._training = training
        self._own_events = {event for event in EVENTS if callbacks.have(event)} | ({REPORTS} if has_services else set())
        self._subscribed_events: set[str] = set()  # the events that any rank has

    def subscribe(self) -> None:
        """Collective. Find out which events any rank has callbacks for."""
        self._subscribed_events = set().union(*self._comm.gather(self._own_events, name="callback_events"))

    def notify(self, event: str) -> None:
        """Collective. Call the callbacks."""
        if event in self._subscribed_events:
            with self._without_timeout(f"{event} of a callback"):
                self._callbacks.tell(event, self._training)

    def notify_step_end(self) -> None:
        """Call the callbacks of this rank after a step; the ranks do not wait for each other."""
        self._callbacks.tell("on_step_end", self._training)

    @contextmanager
    def reporting(self, epoch: int) -> Iterator[None]:
        """Collective. Around the reports of an epoch to services."""
        if REPORTS not in self._subscribed_events:
            yield
            return
        with self._without_timeout(f"{REPORTS} of epoch {epoch}"):
            yield

    @contextmanager
    def _without_timeout(self, what: str) -> Iterator[None]:
        """Collective. Around code of the user's: the others wait here."""
        self._watchdog.beat(what, "unhurried")
        yield
        self._comm.gather(None, name="unhurried")
        self._watchdog.beat(f"after {what}", "between")
