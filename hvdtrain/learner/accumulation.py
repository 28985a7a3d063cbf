"""How many batches an update adds up, and how an average of the weights follows the updates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from numbers import Integral

from hvdtrain.config.keys import Section, key, positive
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import as_function

RoundsPerUpdate = Callable[[int, float, int], int]
"""(epoch, epoch_continuous, global_train_step) -> rounds whose gradients are added up for the update that comes next."""


@dataclass(frozen=True, kw_only=True)
class AccumulationKeys(Section):
    """Several batches to an update."""

    accum_grad_multiple_step: int | Callable[..., int] | str | None = key(
        1,
        "so many batches of a rank are added up for an update: a number, or a function (*, epoch, epoch_continuous, "
        "global_train_step, **_) that is asked before the first of them; ranks communicate once an update",
        positive,
    )


def rounds_per_update(keys: AccumulationKeys) -> RoundsPerUpdate:
    """The key as a function. Raises: ConfigError, then or when it is called, where no positive integer comes out."""
    rule = keys.accum_grad_multiple_step
    if rule is None or isinstance(rule, int):
        return lambda *_: rule or 1
    function = as_function(rule, "accum_grad_multiple_step")

    def asked(epoch: int, epoch_continuous: float, step: int) -> int:
        number = function(epoch=epoch, epoch_continuous=epoch_continuous, global_train_step=step)
        if isinstance(number, bool) or not isinstance(number, Integral) or number < 1:
            error = ConfigError(
                [f"accum_grad_multiple_step: expected a function that returns a positive integer, got {number!r}"]
            )
            error.on_every_rank = True  # all ask the same
            raise error
        return int(number)

    return asked


def groups(rounds: int, next_size: Callable[[], int]) -> Iterator[range]:
    """The rounds of an epoch, in groups that end with an update. What is left at the end is a group, too.

    Args:
        next_size: asked when a group begins.

    >>> list(groups(5, lambda: 2))
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    done = 0
    while done < rounds:
        group = range(done, min(rounds, done + next_size()))
        yield group
        done = group.stop


def kept(decay: float, done: int, updates: int) -> float:
    """How much of the average is kept when it follows after some more updates; the rest is of the new weights.

    After update n (from 0) it is min(decay, (1 + n) / (10 + n)), so that the first weights, which are bad, are soon forgotten:
    the rule of tf.train.ExponentialMovingAverage with num_updates. Of several updates at once it is the product, as the average
    would have followed weights that changed with the last of them: how many updates it looks back over does not depend on how
    often ranks average their parameters.

    Args:
        done: updates that the average has followed.
        updates: those since then.

    >>> kept(0.5, 0, 1), kept(0.5, 100, 1), kept(0.5, 100, 3)
    (0.1, 0.5, 0.125)
    """
    return prod(min(decay, (1 + number) / (10 + number)) for number in range(done, done + updates))
