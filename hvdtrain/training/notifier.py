"""Calling the user's code between steps, which may take any time on any rank."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import ConfigError
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.training.callbacks import EVENTS, Callbacks, Training
from hvdtrain.training.phase import EvaluatedModel

REPORTS = "reports to services"
"""An additional event, which may also take any time."""

LONG = 60.0
"""Seconds of the user's code, and of training, before which it is worthwhile to save."""


class Notifier:
    """Calls the callbacks of all ranks. If any rank has one for an event, the ranks wait for each other after it.

    Args:
        callbacks: the callbacks of this rank.
        training: their argument.
        evaluated: what they may put into the model while they run.
        has_services: whether this rank reports to services.
    """

    def __init__(
        self,
        comm: Communicator,
        watchdog: Watchdog,
        callbacks: Callbacks,
        training: Training,
        evaluated: EvaluatedModel,
        has_services: bool,
    ) -> None:
        self._comm = comm
        self._watchdog = watchdog
        self._callbacks = callbacks
        self._training = training
        self._evaluated = evaluated
        self._own_events = {event for event in EVENTS if callbacks.has(event)} | ({REPORTS} if has_services else set())
        self._has_step_end = callbacks.has("on_step_end")
        self._longest: dict[str, float] = {}  # seconds of any rank for each event of any rank

    def subscribe(self) -> None:
        """Collective. Find out which events any rank has callbacks for."""
        events = set().union(*self._comm.gather(self._own_events, name="callback_events"))
        self._longest = dict.fromkeys(events, LONG)

    @property
    def may_finish(self) -> bool:
        """Whether any rank has callbacks, or reports to services, which may end the training after an epoch."""
        return bool(self._longest)

    def may_take_long(self, event: str) -> bool:
        """Whether there are callbacks for an event that took long before, or were not called yet."""
        return self._longest.get(event, 0.0) >= LONG

    def notify(self, event: str) -> None:
        """Collective. Call the callbacks for an event."""
        if event in self._longest:
            with self._without_timeout(event, f"{event} of another rank's callback"):
                self._call(event, lambda name: self._watchdog.beat(f"{event} of {name}", "unhurried"))

    def notify_of_evaluation(self) -> None:
        """Collective. Call the callbacks for the begin of an evaluation, which may put other weights into the model."""
        with self._evaluated.noting_changes() if "on_evaluation_begin" in self._longest else nullcontext():
            self.notify("on_evaluation_begin")

    def notify_of_scores(self, event: str) -> dict[str, float]:
        """Collective. Call the callbacks for an event in which they may add scores; return those added on rank 0, by name."""
        if event not in self._longest:
            return {}
        self._training.takes_scores = True
        self.notify(event)
        self._training.takes_scores = False
        added, self._training.added_scores = self._training.added_scores, {}
        return self._comm.gather(added, name="added_scores")[0]

    def notify_step_end(self) -> None:
        """Call the callbacks of this rank after a step; the ranks do not wait for each other."""
        if self._has_step_end:
            self._call("on_step_end")

    def notify_idle_step(self) -> None:
        """Call the callbacks of this rank, which has no batch in this step, for what the others exchange in `train_step`."""
        if self._callbacks.has("on_idle_step"):
            self._call("on_idle_step")

    def _call(self, event: str, note: Callable[[str], object] | None = None) -> None:
        depth = self._evaluated.depth
        self._callbacks.call(event, self._training, note)
        if self._evaluated.depth != depth:
            raise ConfigError.of(
                "wrong-call",
                f"{event}: expected to leave training.evaluated_weights(), got a `with` block of it that is still open: the "
                "training would go on with these weights",
            )

    @contextmanager
    def reporting(self, epoch: int) -> Iterator[None]:
        """Collective. A context for reporting an epoch to services."""
        if REPORTS not in self._longest:
            yield
            return
        with self._without_timeout(REPORTS, f"{REPORTS} of epoch {epoch}"):
            yield

    @contextmanager
    def _without_timeout(self, event: str, activity: str) -> Iterator[None]:
        """Collective. A context for the user's code: the watchdog allows it much time, and ranks without such code wait."""
        self._watchdog.beat(activity, "unhurried")
        began = time.monotonic()
        yield
        self._longest[event] = max(self._comm.gather(time.monotonic() - began, name="unhurried"))
        self._watchdog.beat(f"after {activity}", "between")
