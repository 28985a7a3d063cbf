"""Outer optimizers: steps that follow from the average of the ranks' parameters.

    horovod_param_outer = {"class": "bmuf", "momentum": 0.5}

- "bmuf": blockwise model-update filtering with Nesterov's block momentum (Chen and Huo, 2016).
- "nesterov": the same step with the values of DiLoCo (Douillard et al., 2023).
- "sgd": classical momentum (BMUF's classical block momentum; SlowMo: Wang et al., 2020).
- "adam": FedAdam (Reddi et al., 2021).

An optimizer sees one tensor at a time, and uses only Python's arithmetic operators, which the tensors of all frameworks support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from hvdtrain.comm.base import Tensor
from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import Rule, key, positive
from hvdtrain.errors import Problem, problem

below_one = Rule("a number from 0 to below 1", lambda value: 0 <= value < 1)


class OuterOptimizer(Protocol):
    """An optimizer of one step per sync.

    Attributes:
        moments: the names of its state for each parameter, such as the velocity.
        momentum: the share of earlier steps that a step keeps.
    """

    moments: tuple[str, ...]
    momentum: float

    def describe(self) -> str:
        """Its hyperparameters, for the log."""
        ...

    def step(self, anchor: Tensor, average: Tensor, moments: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
        """The new value of a parameter, and its new moments.

        Args:
            anchor: its value after the last sync.
            average: the average of the ranks' values.
            moments: zeros before the first step.
            count: the number of this step, from 1.
        """
        ...


class MomentumStep:
    """Gradient descent with momentum, classical or Nesterov's."""

    def __init__(self, learning_rate: float, momentum: float, nesterov: bool) -> None:
        self._learning_rate = learning_rate
        self._nesterov = nesterov
        self.momentum = momentum
        self.moments: tuple[str, ...] = ("velocity",) if momentum else ()

    def describe(self) -> str:
        kind = "Nesterov momentum" if self._nesterov else "momentum"
        return f"learning rate {self._learning_rate:g}, {kind} {self.momentum:g}"

    def step(self, anchor: Tensor, average: Tensor, moments: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
        gradient = anchor - average
        if not moments:
            return _take_step(average, gradient, self._learning_rate * gradient), []
        velocity = self.momentum * moments[0] + gradient
        direction = gradient + self.momentum * velocity if self._nesterov else velocity
        return _take_step(average, gradient, self._learning_rate * direction), [velocity]


class AdamStep:
    """Adam (Kingma and Ba, 2015) with the large epsilon of FedAdam (Reddi et al., 2021)."""

    def __init__(self, learning_rate: float, momentum: float, second_momentum: float, epsilon: float) -> None:
        self.moments: tuple[str, ...] = ("first_moment", "second_moment")
        self._learning_rate = learning_rate
        self._second_momentum = second_momentum
        self._epsilon = epsilon
        self.momentum = momentum

    def describe(self) -> str:
        return f"learning rate {self._learning_rate:g}, momentums {self.momentum:g} and {self._second_momentum:g}"

    def step(self, anchor: Tensor, average: Tensor, moments: Sequence[Tensor], count: int) -> tuple[Tensor, list[Tensor]]:
        gradient = anchor - average
        first = self.momentum * moments[0] + (1 - self.momentum) * gradient
        second = self._second_momentum * moments[1] + (1 - self._second_momentum) * gradient * gradient
        deviation = (second / (1 - self._second_momentum**count)) ** 0.5
        step = self._learning_rate / (1 - self.momentum**count) * first / (deviation + self._epsilon)
        return _take_step(average, gradient, step), [first, second]


def _take_step(average: Tensor, gradient: Tensor, step: Tensor) -> Tensor:
    """The anchor minus the step. Computed from the average, so that the result is bit for bit the average if step == gradient."""
    return average - (step - gradient)


@dataclass(frozen=True, kw_only=True)
class OuterKeys:
    """Besides `class` in `horovod_param_outer`: "bmuf", "nesterov", "sgd" or "adam" """

    learning_rate: float | None = key(
        None, "the factor on a step; None: 1 for bmuf and sgd, 0.7 for nesterov; required for adam", positive
    )
    momentum: float | None = key(
        None,
        "the share of earlier steps that is kept; None: 1 - 1 / ranks for bmuf, 0.9 for nesterov and adam, 0 for sgd",
        below_one,
    )
    second_momentum: float = key(0.99, "adam: the same for the mean of squares", below_one)
    epsilon: float = key(1e-3, "adam: what is added to the root of the mean of squares", positive)

    def optimizer(self, name: str, size: int) -> OuterOptimizer:
        """The optimizer, with the defaults of its class for values that are not given.

        Args:
            size: the number of ranks.
        """
        rate, momentum = DEFAULTS[name]
        rate = rate if self.learning_rate is None else self.learning_rate
        if self.momentum is not None:
            momentum = self.momentum
        elif name == "bmuf":
            momentum = 1 - 1 / size
        if name == "adam":
            return AdamStep(rate, momentum, self.second_momentum, self.epsilon)
        return MomentumStep(rate, momentum, nesterov=name != "sgd")


DEFAULTS: dict[str, tuple[float, float]] = {"bmuf": (1.0, 0.0), "nesterov": (0.7, 0.9), "sgd": (1.0, 0.0), "adam": (0.0, 0.9)}
"""By class, the learning rate and the momentum; bmuf's momentum depends on the number of ranks, adam's rate is required."""

ADAM_ONLY = ("second_momentum", "epsilon")


def make_outer(
    value: dict[str, Any] | str | None, size: int, where: str = "horovod_param_outer"
) -> tuple[OuterOptimizer | None, list[Problem]]:
    """Make the optimizer of the key horovod_param_outer. Returns it, or None, and the problems with the key.

    Args:
        size: the number of ranks.
        where: the key, for messages.

    >>> make_outer({"class": "bmuf"}, 4)[0].describe()
    'learning rate 1, Nesterov momentum 0.75'
    >>> str(make_outer("adam", 4)[1][0])
    'horovod_param_outer.learning_rate: expected a positive number for the class adam, got nothing'
    """
    if value is None:
        return None, []
    options = {"class": value} if isinstance(value, str) else dict(value)
    name = options.pop("class", None)
    where = f"{where}."
    problems = (
        [] if name in DEFAULTS else problem("unknown-value", f"{where}class: expected one of {', '.join(DEFAULTS)}, got {name!r}")
    )
    keys, more = build(OuterKeys, options, where, {})
    problems += more + unknown_options(where, options, OuterKeys, "an outer optimizer")
    if name == "adam" and options.get("learning_rate") is None:
        problems += problem("missing", f"{where}learning_rate: expected a positive number for the class adam, got nothing")
    if name in DEFAULTS and name != "adam":
        problems += [
            Problem.of("conflict", f"{where}{option}: expected only with the class adam, got it with {name}")
            for option in ADAM_ONLY
            if option in options
        ]
    return (None, problems) if problems or keys is None else (keys.optimizer(str(name), size), [])
