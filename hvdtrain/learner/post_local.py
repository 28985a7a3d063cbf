"""A start with averaged gradients, before ranks train alone (post-local SGD: Lin et al., 2020).

Weights change most in the beginning, so models that are trained alone drift apart most there. Optimizers' states are the same on
all ranks when they part.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from hvdtrain.comm.base import Tensor
from hvdtrain.learner.base import ModelState, StatePart
from hvdtrain.learner.param_average import ParamAverage
from hvdtrain.learner.reducer import EpochStart, FinishedUpdate, Numbers, Reducer
from hvdtrain.learner.wire import Sent

T = TypeVar("T")


class PostLocal:
    """One reducer for the first steps of a training, another one afterwards.

    Args:
        first: reduces gradients, and averages them.
        then: lets ranks update alone.
        steps: those of the whole training with `first`. An update belongs to the reducer that its first step has.
    """

    meets_every_update = False

    def __init__(self, first: Reducer, then: ParamAverage, steps: int) -> None:
        self._first = first
        self._then = then
        self._steps = steps
        self._now: Reducer = first

    def describe(self) -> str:
        return f"{self._first.describe()} of the first {self._steps} steps; then {self._then.describe()}"

    @property
    def updates_without_batch(self) -> bool:
        return self._now.updates_without_batch

    def start_gradients(self, gradients: list[Tensor], *, name: str, owners: Sequence[int] | None = None) -> Any:
        return self._now.start_gradients(gradients, name=name, owners=owners)

    def finish_gradients(self, handle: Any) -> list[Tensor]:
        return self._now.finish_gradients(handle)

    def reduce_rows(self, values: Tensor, indices: Tensor, *, name: str) -> tuple[Tensor, Tensor]:
        return self._now.reduce_rows(values, indices, name=name)

    def waited(self, seconds: float, sent: Sent) -> None:
        self._now.waited(seconds, sent)

    def agree(self, value: T | None) -> T:
        return self._now.agree(value)

    def begin_epoch(self, state: ModelState, start: EpochStart) -> None:
        self._now = self._first if start.step < self._steps else self._then
        self._now.begin_epoch(state, start)
        self._then.warn(start)

    def after_update(self, state: ModelState, update: FinishedUpdate) -> None:
        self._now.after_update(state, update)
        if self._now is self._first and update.step >= self._steps:
            self._first.end_of_epoch(state)  # buffers become the same, too
            self._then.take_anchor(state)
            self._now = self._then

    def end_of_epoch(self, state: ModelState) -> None:
        self._now.end_of_epoch(state)

    def differing(self) -> tuple[StatePart, ...]:
        return self._now.differing()

    def averaged(self, state: ModelState) -> AbstractContextManager[None]:
        return self._now.averaged(state)

    def settle(self, state: ModelState) -> None:
        self._now.settle(state)

    def state(self) -> Numbers:
        return {**self._now.state(), "gradients": self._now is self._first}

    def restore(self, state: Numbers, same_ranks: bool = True) -> None:
        (self._first if state.get("gradients") else self._then).restore(state, same_ranks)

    def take_traffic(self) -> tuple[int, int]:
        one, other = self._first.take_traffic(), self._then.take_traffic()
        return one[0] + other[0], one[1] + other[1]
