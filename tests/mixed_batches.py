"""Batches from a mix of two datasets, in every form, for tests of the scores of each dataset."""

import numpy

from hvdtrain.data.padding import join, pack, pad
from hvdtrain.data.types import Batch, BatchParts

SEQUENCES = [numpy.array(numbers, numpy.float32)[:, None] for numbers in ([1, 2], [3], [4, 5, 6])]
NUMBERS = numpy.array([0, 1, 0])

EXPECTED = {"flat": 21 / 6, "flat.a": 18 / 5, "flat.b": 3.0}
"""The mean of all frames, and of those of each dataset."""


def mixed_batches() -> dict[str, Batch]:
    """By form, a batch of the sequences."""
    parts = BatchParts(("a", "b"), NUMBERS)
    made = {"padded": pad(SEQUENCES), "packed": pack(SEQUENCES), "joined": join(SEQUENCES)}
    lengths = numpy.array([2, 1, 3])
    return {
        form: Batch({"data": data}, numpy.arange(3), joined=lengths if form == "joined" else None, parts=parts)
        for form, data in made.items()
    }
