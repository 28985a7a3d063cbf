"""Lengths that no file of a dataset has: found once by reading it, in several processes, and kept in `lengths_dir`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy

from hvdtrain.data.dataset import Scanning
from hvdtrain.data.formats.found_lengths import HEAD_START, LengthsFile, SequenceTable, SourceTraits
from hvdtrain.data.formats.items import BLOCK, Counted, in_processes
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence

UNREADABLE = -1
"""The length of a sequence that cannot be read."""

FEW = 64
"""So few sequences are read by this process alone: starting others takes longer."""


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
    where: str, identity: str, streams: Mapping[str, Stream], size: int, count: Callable[[range], Counted], scanning: Scanning
) -> tuple[dict[str, Array], str]:
    """By data key, the lengths of all sequences, int32 of shape (size,); and the file that keeps them, or ''.

    Args:
        where: the config key of the dataset.
        identity: a text that differs if the data does.
        count: the lengths of some sequences, by data key; `UNREADABLE` where that applies.
    """
    file = LengthsFile(scanning.folder, identity)
    path = str(file.path("lengths") or "")
    if (kept := file.load("lengths")) is not None:
        return dict(kept[1].lengths), path
    shared = scanning.folder is not None
    with file.turn(scanning.waiting, HEAD_START if shared and scanning.rank else 0.0):
        if (kept := file.load("lengths")) is not None:
            return dict(kept[1].lengths), path
        blocks = [range(start, min(start + BLOCK, size)) for start in range(0, size, BLOCK)]
        processes = scanning.processes_alone if shared else scanning.processes
        with scanning.progress(f"{where}: lengths", size) as advance:
            if processes > 1 and size > FEW:
                parts = in_processes(processes, count, blocks, advance)
            else:
                parts = []
                for block in blocks:
                    parts.append(count(block))
                    advance(len(block))
        lengths = {key: numpy.concatenate([part[key] for part, _ in parts]) for key in streams}
        about = SourceTraits(where, streams, by_corpus=True, skips=True, repeats=True)
        reason = file.save("lengths", about, SequenceTable(numpy.zeros(0, dtype=bytes), lengths))
        if reason is not None:
            scanning.note(f"{where}: the lengths are found in every run, as they cannot be kept: {reason} (lengths_dir)")
    return lengths, path
