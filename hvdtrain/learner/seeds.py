"""Random numbers that follow from seed, rank and step."""

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


STREAM = 0x6E6F697365
"""Keeps these numbers apart from those of dropout, which come from the same seed, rank and step."""


def noise_seeds(seed: int, rank: int | None, step: int) -> Array:
    """Seeds of one update's noise; uint32 of shape (2,). They follow from the step, so a continued training has the same ones.

    Args:
        rank: None: the noise is to be the same on all ranks, as the gradients are.
        step: steps done in the whole training.
    """
    return mixed_seeds(2, seed, 0 if rank is None else 1 + rank, step, STREAM)
