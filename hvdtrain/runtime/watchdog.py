"""What a job tells its watchdog, which a plug-in gives it."""

from __future__ import annotations

from types import TracebackType
from typing import Literal

Pace = Literal["start-up", "unhurried", "planning", "steps", "evaluation", "saving", "finishing", "handing on", "between"]
"""How fast what a rank is doing goes on. Each has its own timeout: 'unhurried' are callbacks, trackers and the end, as the user's
code may take much time; 'finishing' waits for checkpoints that are written in background; 'between' is the rest of an epoch."""

SECONDS_TO_END = 1.0
"""How long a process may take to exit once its connections are closed. Launchers end the other ranks soon after."""


class Watchdog:
    """Watches over a job from when its ranks are connected until they are disconnected; this one does nothing."""

    def beat(self, activity: object, pace: Pace = "start-up") -> None:
        """Reset the timeout, and record what the process is about to do: an object whose text is asked for in messages."""

    def go_on(self) -> None:
        """Reset the timeout in the midst of an activity."""

    def stop_soon(self) -> None:
        """Wait less for steps from now on: a signal asks the job to stop, which a rank that hangs never does."""

    def ended_ranks(self, seconds: float) -> list[str]:
        """Wait at most this long until another rank has ended; return a line for each one that has."""
        return []

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End watching."""
