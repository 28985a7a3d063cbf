"""Which random numbers are added to gradients (`gradient_noise`)."""

from __future__ import annotations

from hvdtrain.data.types import Array
from hvdtrain.learner.numbers import mixed_seeds

STREAM = 0x6E6F697365
"""Keeps these numbers apart from those of dropout, which come from the same seed, rank and step."""


def noise_seeds(seed: int, rank: int | None, step: int) -> Array:
    """Seeds of one update's noise; uint32 of shape (2,). They follow from the step, so a continued training has the same ones.

    Args:
        rank: None: the noise is to be the same on all ranks, as the gradients are.
        step: steps done in the whole training.
    """
    return mixed_seeds(2, seed, 0 if rank is None else 1 + rank, step, STREAM)
