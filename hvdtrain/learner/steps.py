"""Gradient accumulation: the number of steps per update, and the groups of steps that it makes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from numbers import Integral

from hvdtrain.config.keys import Section, key, positive
from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError

StepsPerUpdate = Callable[[int, float, int], int]
"""(epoch, epoch_continuous, global_train_step) -> the number of steps (rounds, in which every rank takes a batch) whose gradients
the next update accumulates."""


@dataclass(frozen=True, kw_only=True)
class AccumulationKeys(Section):
    """Accumulating gradients."""

    accum_grad_multiple_step: int | Callable[..., int] | str | None = key(
        1,
        "the number of steps (batches of each rank) whose gradients an update adds up: an integer, or a function {signature} "
        "that is called before the first of them; ranks communicate once per update",
        positive,
        signature="*, epoch, epoch_continuous, global_train_step, **_",
    )


def steps_per_update(keys: AccumulationKeys) -> StepsPerUpdate:
    """The key as a function. Raises: ConfigError, immediately or when called, if the result is not a positive integer."""
    rule = keys.accum_grad_multiple_step
    if rule is None or isinstance(rule, int):
        return lambda *_: rule or 1
    function = as_function(rule, "accum_grad_multiple_step")

    def call(epoch: int, epoch_continuous: float, step: int) -> int:
        number = function(epoch=epoch, epoch_continuous=epoch_continuous, global_train_step=step)
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            text = f"accum_grad_multiple_step: expected a function that returns a positive integer, got {number!r}"
            raise ConfigError.of("wrong-result", text).on_all_ranks()  # all ranks call it with the same arguments
        return int(number)

    return call


def groups(rounds: int, next_size: Callable[[], int]) -> Iterator[range]:
    """The rounds (steps) of an epoch in groups, each of which ends with an update. The last group may be smaller.

    Args:
        next_size: returns the size of a group, when the group begins.

    >>> list(groups(5, lambda: 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    done = 0
    while done < rounds:
        group = range(done, min(rounds, done + next_size()))
        yield group
        done = group.stop
