"""Numbers and arrays on their way into a framework."""

from __future__ import annotations

import numpy

from hvdtrain.data.types import Array

WIDER = {"uint16": numpy.int32, "uint32": numpy.int64}
"""Types that frameworks hardly compute with, and what they become."""


def widened(values: Array) -> Array:
    """The same values in a type that frameworks compute with."""
    wider = WIDER.get(values.dtype.name)
    return values if wider is None else values.astype(wider)


def mixed_seed(*parts: int) -> int:
    """A seed of 32 bits mixed from the parts, such as (seed, rank, step)."""
    return int(numpy.random.SeedSequence(parts).generate_state(1)[0])


def mixed_seeds(count: int, *parts: int) -> Array:
    """So many different seeds mixed from the parts; uint32 of shape (count,)."""
    return numpy.random.SeedSequence(parts).generate_state(count)
