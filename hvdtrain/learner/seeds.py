"""Random seeds, each a function of the config's seed, the rank and the step."""

from __future__ import annotations

import numpy

from hvdtrain.data.types import Array


def mix_seed(*parts: int) -> int:
    """Mix numbers such as (seed, rank, step) into a 32-bit seed."""
    return int(numpy.random.SeedSequence(parts).generate_state(1)[0])


def mix_seeds(count: int, *parts: int) -> Array:
    """Mix numbers into N different seeds; uint32 of shape (count,)."""
    return numpy.random.SeedSequence(parts).generate_state(count)


STREAM = 0x6E6F697365
"""Makes the noise independent of dropout, which is seeded with the same seed, rank and step."""

OF_OPTIMIZER = 0x73746570
"""The same for the random numbers that an optimizer draws."""


def noise_seeds(seed: int, rank: int | None, step: int) -> Array:
    """The seeds of one update's noise, the same after a resume; uint32 of shape (2,).

    Args:
        rank: None: the noise is the same on all ranks, like the gradients.
        step: the number of training steps done before the last step of this update.
    """
    return mix_seeds(2, seed, 0 if rank is None else 1 + rank, step, STREAM)
