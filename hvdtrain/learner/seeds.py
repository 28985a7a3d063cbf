"""Seeds of random numbers, each a function of the config's seed, the rank and the number of a step."""

from __future__ import annotations

import numpy

from hvdtrain.data.types import Array


def mixed_seed(*parts: int) -> int:
    """A seed of 32 bits mixed from the parts, such as (seed, rank, step)."""
    return int(numpy.random.SeedSequence(parts).generate_state(1)[0])


def mixed_seeds(count: int, *parts: int) -> Array:
    """N different seeds mixed from the parts; uint32 of shape (count,)."""
    return numpy.random.SeedSequence(parts).generate_state(count)


STREAM = 0x6E6F697365
"""Separates the noise from dropout, whose seeds come from the same seed, rank and step."""


def noise_seeds(seed: int, rank: int | None, step: int) -> Array:
    """The seeds of one update's noise; uint32 of shape (2,). A training that continues from a checkpoint gets the same ones.

    Args:
        rank: None: the noise is the same on all ranks, as the gradients are.
        step: steps done in the whole training before the last step of this update.
    """
    return mixed_seeds(2, seed, 0 if rank is None else 1 + rank, step, STREAM)
