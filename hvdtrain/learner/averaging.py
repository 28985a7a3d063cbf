"""How fast an average of the weights follows them (`ema_decay`)."""

from __future__ import annotations

from math import prod


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
