"""Lengths that no file of a dataset has: found once by reading it, in several processes, and kept in `lengths_dir`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy

from hvdtrain.data.dataset import Scanning
from hvdtrain.data.formats.items import Counted, count_for_all
from hvdtrain.data.index import IndexFile
from hvdtrain.data.indexed import UNREADABLE
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence

FEW = 64
"""The sequences that a process reads per answer. So few are read by this process alone: starting others takes longer."""


def count_lengths(length: Callable[[int], int], numbers: Sequence[int]) -> Array:
    """The lengths of some sequences, int32; `UNREADABLE` of broken ones."""
    found = numpy.full(len(numbers), UNREADABLE, numpy.int32)
    for place, number in enumerate(numbers):
        try:
            found[place] = length(number)
        except BrokenSequence:
            pass  # reading it again gives the message
    return found


def lengths_by_reading(
    where: str, fingerprint: str, size: int, count: Callable[[range], Counted], scanning: Scanning
) -> tuple[dict[str, Array], str]:
    """By data key, the lengths of all sequences, int32 of shape (size,); and the file that keeps them, or ''.

    Args:
        where: the config key of the dataset.
        fingerprint: a text that differs if the data does.
        count: the lengths of some sequences, by data key; `UNREADABLE` where that applies.
    """
    file = IndexFile(scanning.folder, fingerprint)
    blocks = [range(start, min(start + FEW, size)) for start in range(0, size, FEW)]
    with scanning.progress(f"{where}: lengths", size) as advance:
        lengths, _ = count_for_all(where, file, "lengths", [], blocks, count, scanning, advance)
    return lengths, str(file.path("lengths") or "")
