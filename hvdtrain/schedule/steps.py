"""How the learning rate goes on from step to step: named schedules, each a factor on the epoch's rate.

    learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 4000, "num_steps": 100_000, "final": 0.01}

A factor is a pure function of the position in the training, so nothing of a schedule is in a checkpoint: a training that is
continued, with more epochs or on another number of ranks, has the rates that the config gives it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import key, not_negative, positive, share


@dataclass(frozen=True, kw_only=True)
class StepScheduleKeys:
    """Beside `class` in `learning_rate_schedule`. Lengths are all in steps (batches of every rank) or all in epochs."""

    num_warmup_steps: float | None = key(None, "the factor rises to 1 within N steps", not_negative)
    num_steps: float | None = key(None, "the schedule ends after N steps, the warm-up among them", positive)
    num_warmup_epochs: float | None = key(None, "the factor rises to 1 within N epochs, such as 0.5", not_negative)
    num_epochs: float | None = key(
        None,
        "the schedule ends after N epochs, the warm-up among them; None, without num_steps: the config's num_epochs",
        positive,
    )
    initial: float | None = key(None, "the factor that the warm-up begins with; None: 0, or 0.04 for one_cycle", share)
    final: float = key(0.0, "the factor at the end and after it", share)

    @property
    def by_steps(self) -> bool:
        """Whether the lengths are in steps."""
        return self.num_warmup_steps is not None or self.num_steps is not None

    def problems(self) -> list[str]:
        """What is wrong between the keys."""
        if self.by_steps and (self.num_warmup_epochs is not None or self.num_epochs is not None):
            return ["num_steps: expected lengths either in steps or in epochs, got both"]
        warmup, end = (self.num_warmup_steps, self.num_steps) if self.by_steps else (self.num_warmup_epochs, self.num_epochs)
        if warmup is not None and end is not None and warmup >= end:
            unit = "steps" if self.by_steps else "epochs"
            return [f"num_warmup_{unit}: expected less than num_{unit}, {end:g}, got {warmup:g}"]
        return []


Shape = Callable[[float, float], float]
"""The factor after the warm-up, of (share of the way from there to the end, position / warm-up's length), where final is 0."""


def _linear(way: float, times: float) -> float:
    return 1.0 - way


def _cosine(way: float, times: float) -> float:
    """After Loshchilov and Hutter, 2017."""
    return 0.5 * (1.0 + math.cos(math.pi * way))


def _inverse_square_root(way: float, times: float) -> float:
    """After Vaswani et al., 2017."""
    return 1.0 / math.sqrt(max(times, 1.0))


SHAPES: dict[str, Shape] = {
    "constant": lambda way, times: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_square_root": _inverse_square_root,
    "one_cycle": _cosine,  # Smith and Topin, 2018: up along a cosine, too
}
"""The schedules by name."""

ENDLESS = ("constant", "inverse_square_root")
"""Schedules that do not end."""


@dataclass(frozen=True)
class StepSchedule:
    """A schedule's factor as a function of the position.

    Args:
        name: one of SHAPES.
        by_steps: whether positions and lengths are in steps; else in epochs.
        warmup, end: lengths from the beginning of the training; an endless schedule has no use for `end`.
        initial, final: factors at the beginning and at the end.
    """

    name: str
    by_steps: bool
    warmup: float
    end: float
    initial: float
    final: float

    def factor(self, step: int, epoch_continuous: float) -> float:
        """The factor on the epoch's learning rate.

        Args:
            step: steps done in the whole training before the last step of this update.
            epoch_continuous: epochs done so far, with the share of the current one.
        """
        # A warm-up by steps counts the present step, too: with a factor of 0 the first update would change nothing.
        position, warm = (float(step), step + 1.0) if self.by_steps else (epoch_continuous, epoch_continuous)
        if position < self.warmup:
            way = min(warm / self.warmup, 1.0)
            risen = 1.0 - _cosine(way, 0.0) if self.name == "one_cycle" else way
            return self.initial + (1.0 - self.initial) * risen
        way = min((position - self.warmup) / (self.end - self.warmup), 1.0)
        times = warm / self.warmup if self.warmup else 1.0
        low = 0.0 if self.name in ENDLESS else self.final
        return low + (1.0 - low) * SHAPES[self.name](way, times)


def make_schedule(value: dict[str, Any] | str | None, num_epochs: int) -> tuple[StepSchedule | None, list[str]]:
    """The schedule that the key learning_rate_schedule asks for, and the problems with it.

    Args:
        num_epochs: where a schedule ends that says nothing about it.
    """
    if value is None:
        return None, []
    options = {"class": value} if isinstance(value, str) else dict(value)
    name = options.pop("class", None)
    where = "learning_rate_schedule."
    problems = [] if name in SHAPES else [f"{where}class: expected one of {', '.join(SHAPES)}, got {name!r}"]
    keys, more = build(StepScheduleKeys, options, where, {})
    problems += more + unknown_options(where, options, StepScheduleKeys, "a learning rate schedule")
    if problems or keys is None:
        return None, problems
    problems = [where + problem for problem in keys.problems()]
    end = keys.num_steps if keys.by_steps else keys.num_epochs or num_epochs
    warmup = keys.num_warmup_steps if keys.by_steps else keys.num_warmup_epochs
    if name == "one_cycle" and warmup is None and end is not None:
        warmup = 0.3 * end
    if end is None:
        if name not in ENDLESS:
            problems.append(f"{where}num_steps: expected where {name} ends, as its warm-up is in steps, got nothing")
        end = math.inf
    if name == "inverse_square_root" and not warmup:
        problems.append(f"{where}num_warmup_steps: expected a warm-up, from whose end inverse_square_root falls, got none")
    if not problems and not (warmup or 0.0) < end:
        problems.append(f"{where}num_warmup_epochs: expected less than num_epochs, {end:g}, got {warmup:g}")
    if problems:
        return None, problems
    initial = keys.initial if keys.initial is not None else 0.04 if name == "one_cycle" else 0.0
    return StepSchedule(str(name), keys.by_steps, warmup or 0.0, end, initial, keys.final), []
