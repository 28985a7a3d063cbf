"""When to sync ranks that train alone: the number of updates from one sync of the parameters to the next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import floor
from typing import Any

from hvdtrain.comm.base import Communicator
from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.errors import Problem, problem

NEVER = 1 << 60
"""More updates than any epoch has, so that its end comes first."""


class EveryUpdates:
    """The number of updates from one sync to the next, the same on all ranks. Here it is constant."""

    def __init__(self, every: int) -> None:
        self._every = every

    def updates(self, learning_rate: float) -> int:
        """The number of updates between two syncs.

        Args:
            learning_rate: of the last update.
        """
        return self._every

    def after_sync(self, comm: Communicator, updates: int) -> None:
        """Collective. Called when all parameters have been synced, N updates after the previous sync."""

    def describe(self) -> str:
        """How often to sync, for the log."""
        return f"after every {self._every} updates"

    def state(self) -> dict[str, int]:
        """The state that does not follow from the config and the step."""
        return {"every": self._every}

    def restore(self, state: dict[str, int]) -> None:
        """Continue from what `state` returned; a constant number is the config's."""


class Quadratic(EveryUpdates):
    """The number grows as the learning rate falls: max(every, floor((alpha / learning rate)^2)) (Gu et al., 2024).

    It depends only on the last update's rate, so it needs no saved state and no message. With a rate of 0, the first sync is at
    the end of the epoch.

    >>> [Quadratic(4, 0.1).updates(rate) for rate in (0.1, 0.05, 0.03, 0.01)]
    [4, 4, 11, 100]
    """

    def __init__(self, every: int, alpha: float) -> None:
        super().__init__(every)
        self._alpha = alpha

    def updates(self, learning_rate: float) -> int:
        if learning_rate <= 0 or self._alpha / learning_rate > 1e9:
            return NEVER
        exact = (self._alpha / learning_rate) ** 2
        return max(self._every, floor(exact * (1 + 1e-9)))  # 0.1 / 0.01 is not quite 10

    def describe(self) -> str:
        return f"after every {self._every} updates, or more as the learning rate falls, ({self._alpha:g} / rate)^2,"


class EverySeconds(EveryUpdates):
    """Approximately a constant time. At each sync, rank 0 converts it to a number of updates by its own speed and sends that
    number to the others: steps need no messages, and clocks are not compared."""

    def __init__(self, seconds: float) -> None:
        super().__init__(1)
        self._seconds = seconds
        self._last_sync = time.perf_counter()

    def after_sync(self, comm: Communicator, updates: int) -> None:
        now = time.perf_counter()
        wanted = max(1, round(self._seconds * updates / max(now - self._last_sync, 1e-9)))
        self._every = comm.gather(wanted, name="param_sync_step")[0]
        self._last_sync = now

    def describe(self) -> str:
        return f"about every {self._seconds:g} s"

    def restore(self, state: dict[str, int]) -> None:
        self._every = state.get("every", 1)


@dataclass(frozen=True, kw_only=True)
class SyncRuleKeys:
    """Besides `class` in `horovod_param_sync_rule`: "constant" or "quadratic" """

    alpha: float = key(
        REQUIRED, "quadratic: the learning rate at which N is 1; N = max(horovod_param_sync_step, (alpha / rate)^2)", positive
    )


RULES = ("constant", "quadratic")


def make_interval(
    rule: dict[str, Any] | str | None,
    every: int,
    seconds: float | None,
    name_of_rule: str = "horovod_param_sync_rule",
    name_of_seconds: str = "horovod_param_sync_time_diff",
) -> tuple[EveryUpdates, list[Problem]]:
    """Make the interval of the keys horovod_param_sync_*. Returns it and the problems with horovod_param_sync_rule.

    Args:
        rule: None: constant.
        every: the smallest number of updates.
        seconds: the time between two syncs, instead of a number of updates; None: use the rule.
        name_of_rule, name_of_seconds: the names of their keys, for messages.
    """
    options = {"class": rule} if isinstance(rule, str) else dict(rule or {"class": "constant"})
    name = options.pop("class", None)
    where = f"{name_of_rule}."
    problems = (
        [] if name in RULES else problem("unknown-value", f"{where}class: expected one of {', '.join(RULES)}, got {name!r}")
    )
    alpha = 0.0
    if name == "quadratic":
        keys, more = build(SyncRuleKeys, options, where, {})
        problems += more + unknown_options(where, options, SyncRuleKeys, "a rule for syncs")
        alpha = 0.0 if keys is None else keys.alpha
        if seconds is not None:
            problems += problem("conflict", f"{name_of_rule}: expected without {name_of_seconds}, got both")
    elif name == "constant" and options:
        problems += problem(
            "conflict", f"{where}{next(iter(options))}: expected only with the class quadratic, got it with constant"
        )
    if seconds is not None:
        return EverySeconds(seconds), problems
    return (Quadratic(every, alpha) if name == "quadratic" else EveryUpdates(every)), problems
