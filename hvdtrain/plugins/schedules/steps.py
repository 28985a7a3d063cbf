"""The learning rate of a step: named schedules, each a factor on the epoch's learning rate.

    learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 4000, "final": 0.01}

A factor is a pure function of the position in the training, so a checkpoint holds no state of a schedule: a training that
continues with more epochs, or on a different number of ranks, uses the rates of its config.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hvdtrain.config.check import build, did_you_mean, unknown_options
from hvdtrain.config.keys import key, not_negative, positive, share
from hvdtrain.errors import Problem, problem

Unit = Literal["steps", "epochs"]
"""The unit of a length; a step is one batch on every rank."""


@dataclass(frozen=True)
class Length:
    """A number of steps or epochs from the beginning of the training."""

    number: float
    unit: Unit

    def __str__(self) -> str:
        return f"{self.number:g} {self.unit}"


@dataclass(frozen=True, kw_only=True)
class StepScheduleKeys:
    """Besides `class` in `learning_rate_schedule`. Warm-up and end are each in steps (batches of every rank) or in epochs."""

    num_warmup_steps: float | None = key(None, "the factor rises to 1 within N steps", not_negative)
    num_steps: float | None = key(None, "the schedule ends after N steps, including the warm-up", positive)
    num_warmup_epochs: float | None = key(None, "the factor rises to 1 within N epochs, such as 0.5", not_negative)
    num_epochs: float | None = key(
        None,
        "the schedule ends after N epochs, including the warm-up; None, without num_steps: the config's num_epochs",
        positive,
    )
    initial: float | None = key(None, "the factor that the warm-up begins with; None: 0, or 0.04 for one_cycle", share)
    final: float = key(0.0, "the factor at the end and after it", share)

    @property
    def warmup(self) -> Length | None:
        """The length of the warm-up, if one is given."""
        return _length(self.num_warmup_steps, self.num_warmup_epochs)

    @property
    def end(self) -> Length | None:
        """The end of the schedule, if it is given."""
        return _length(self.num_steps, self.num_epochs)

    def problems(self) -> list[Problem]:
        """Contradictions between the keys."""
        pairs = [("num_warmup_steps", "num_warmup_epochs"), ("num_steps", "num_epochs")]
        both = [pair for pair in pairs if all(getattr(self, name) is not None for name in pair)]
        return [Problem.of("conflict", f"{steps}: expected either it or {epochs}, got both") for steps, epochs in both]


def _length(steps: float | None, epochs: float | None) -> Length | None:
    if steps is not None:
        return Length(steps, "steps")
    return None if epochs is None else Length(epochs, "epochs")


Shape = Callable[[float, float], float]
"""The factor after the warm-up, with a final factor of 0: a function of (fraction, warmups).

`fraction` is the progress from the end of the warm-up (0) to the end (1); `warmups` is the position in warm-up lengths.
"""


def _linear(fraction: float, warmups: float) -> float:
    return 1.0 - fraction


def _cosine(fraction: float, warmups: float) -> float:
    """Loshchilov and Hutter, 2017."""
    return 0.5 * (1.0 + math.cos(math.pi * fraction))


def _inverse_square_root(fraction: float, warmups: float) -> float:
    """Vaswani et al., 2017."""
    return 1.0 / math.sqrt(max(warmups, 1.0))


SHAPES: dict[str, Shape] = {
    "constant": lambda fraction, warmups: 1.0,
    "linear": _linear,
    "cosine": _cosine,
    "inverse_square_root": _inverse_square_root,
    "one_cycle": _cosine,  # Smith and Topin, 2018; its warm-up is also a cosine
}
"""The schedules by name."""

ENDLESS = ("constant", "inverse_square_root")
"""Schedules that do not end."""


@dataclass(frozen=True)
class StepSchedule:
    """A schedule's factor as a function of the position.

    Args:
        name: one of SHAPES.
        warmup, end: counted from the beginning of the training, each in steps or epochs; an endless schedule ignores `end`.
        initial, final: the factors at the beginning and at the end.
    """

    name: str
    warmup: Length
    end: Length
    initial: float
    final: float

    def factor(self, step: int, epoch_continuous: float) -> float:
        """The factor on the epoch's learning rate.

        Args:
            step: the number of training steps done before the last step of this update.
            epoch_continuous: the number of epochs done, including the fraction of the current one.
        """
        positions: dict[Unit, float] = {"steps": float(step), "epochs": epoch_continuous}
        position = positions[self.warmup.unit]
        length = self.warmup.number
        # A warm-up in steps counts the current step: otherwise the first update would have a factor of 0 and change nothing.
        warm = step + 1.0 if self.warmup.unit == "steps" else epoch_continuous
        if position < length:
            fraction = min(warm / length, 1.0)
            rise = 1.0 - _cosine(fraction, 0.0) if self.name == "one_cycle" else fraction
            return self.initial + (1.0 - self.initial) * rise
        warmups = warm / length if length else 1.0
        final = 0.0 if self.name in ENDLESS else self.final
        return final + (1.0 - final) * SHAPES[self.name](self._fraction(positions), warmups)

    def _fraction(self, positions: Mapping[Unit, float]) -> float:
        """The progress from the end of the warm-up (0) to the end (1), once the warm-up is over.

        If their units differ, the warm-up's share of the position so far is the same in both units.
        """
        position = positions[self.end.unit]
        begin = self.warmup.number
        if self.warmup.unit != self.end.unit and begin:
            begin *= position / positions[self.warmup.unit]
        if position >= self.end.number:
            return 1.0
        return (position - begin) / (self.end.number - begin)


def make_schedule(value: dict[str, Any] | str | None, num_epochs: int) -> tuple[StepSchedule | None, list[Problem]]:
    """Make the schedule of the key learning_rate_schedule. Returns it, or None, and the problems with the key.

    Args:
        value: the value of the key.
        num_epochs: the end of a schedule, unless its options set one.
    """
    if value is None:
        return None, []
    options = {"class": value} if isinstance(value, str) else dict(value)
    name = options.pop("class", None)
    where = "learning_rate_schedule."
    hint = did_you_mean(str(name), SHAPES)
    problems = []
    if name not in list(SHAPES):
        problems += problem("unknown-value", f"{where}class: expected one of {', '.join(SHAPES)}, got {name!r}{hint}")
    keys, more = build(StepScheduleKeys, options, where, {})
    problems += more + unknown_options(where, options, StepScheduleKeys, "a learning rate schedule")
    if not problems and keys is not None:
        problems = [problem.within(where) for problem in keys.problems()]
    if problems or keys is None:
        return None, problems
    endless = name in ENDLESS and keys.end is None
    end = keys.end or Length(math.inf if endless else num_epochs, "epochs")
    warmup = keys.warmup or Length(0.3 * end.number if name == "one_cycle" else 0.0, end.unit)
    if name == "inverse_square_root" and not warmup.number:
        return None, problem(
            "missing", f"{where}num_warmup_steps: expected a warm-up, after which inverse_square_root decays, got none"
        )
    if warmup.unit == end.unit and not warmup.number < end.number:
        which = f"num_{end.unit}" if keys.end else "the config's num_epochs"
        return None, [
            Problem.of(
                "out-of-range", f"{where}num_warmup_{end.unit}: expected less than {which}, {end.number:g}, got {warmup.number:g}"
            )
        ]
    initial = keys.initial if keys.initial is not None else 0.04 if name == "one_cycle" else 0.0
    return StepSchedule(str(name), warmup, end, initial, keys.final), []
