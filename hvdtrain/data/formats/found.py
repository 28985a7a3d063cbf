"""Lengths that nothing but reading shows: found once, in several processes, and kept in `lengths_dir`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy

from hvdtrain.data.combine.workers import AHEAD, Workers
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.index import IndexFile, Kept
from hvdtrain.data.indexed import UNREADABLE
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence

FIRST = 8
"""How many rows are read first, to estimate how long reading takes."""

ITEMS_AT_ONCE = 64
"""How many rows a process reads per answer."""

SECONDS_ALONE = 2.0
"""How long reading may take on every rank, if it is not to be avoided. If it would take longer, one rank reads for all in several
processes, and keeps the lengths in a file."""

Measure = Callable[[int], tuple[Mapping[str, int], Mapping[str, int]]]
"""The lengths of a row, and its largest classes if they are wanted; both by data key. Raises: BrokenSequence."""

Counted = tuple[dict[str, Array], dict[str, int]]
"""The lengths of some rows, and the largest classes; both by data key."""


@dataclass(frozen=True)
class FoundLengths:
    """Attributes:
    lengths: by data key, of all rows, int32; `UNREADABLE` of broken ones.
    largest: by data key, the largest class.
    path: the file that keeps them; None: none does.
    """

    lengths: dict[str, Array]
    largest: dict[str, int]
    path: Path | None


def find_lengths(
    where: str,
    fingerprint: Callable[[], str],
    keys: Iterable[str],
    size: int,
    measure: Measure,
    scanning: Scanning,
    quickly: bool = False,
) -> FoundLengths:
    """The lengths of all rows, unless they are kept already. Of several processes, one reads while the others wait.

    Args:
        where: the config key of the dataset.
        fingerprint: returns a text that differs if the data does.
        quickly: whether each process reads by itself what takes few seconds.
    """
    starts = [0, *range(min(FIRST, size), size, ITEMS_AT_ONCE)]
    blocks = [range(start, end) for start, end in pairwise([*starts, size]) if start < end]
    count = partial(_count, list(keys), measure)
    counted: list[Counted] = []
    began = time.perf_counter()

    with scanning.progress(f"{where}: lengths", size) as advance:
        while quickly and len(counted) < len(blocks):
            block = blocks[len(counted)]
            elapsed = time.perf_counter() - began
            if counted and elapsed > SECONDS_ALONE / 20:  # a few fast items are no basis for an estimate
                if elapsed / block.start * (size - block.start) > SECONDS_ALONE:
                    break
            counted.append(count(block))
            advance(len(block))
        else:
            if quickly:
                return FoundLengths(*_joined(counted), None)

        def make() -> Kept:
            left = blocks[len(counted) :]
            processes = scanning.processes_alone if scanning.folder is not None else scanning.processes
            lengths, largest = _joined([*counted, *_in_processes(processes, count, left, advance)])
            return largest, lengths

        file = IndexFile(scanning.folder, fingerprint() if scanning.folder is not None else "")
        largest, lengths = file.get("lengths", scanning, make, f"{where}: the lengths are counted")
    return FoundLengths(lengths, largest, file.path("lengths"))


def measure_broken(lengths: Mapping[str, Array], measure: Measure) -> list[str]:
    """A message for every row that cannot be read; those that can be read by now get their lengths."""
    messages = []
    for number in numpy.flatnonzero(numpy.any([column < 0 for column in lengths.values()], axis=0)).tolist():
        try:
            for key, length in measure(number)[0].items():
                lengths[key][number] = length
        except BrokenSequence as error:
            messages.append(str(error))
    return messages


def _count(keys: Sequence[str], measure: Measure, block: range) -> Counted:
    lengths = {key: [UNREADABLE] * len(block) for key in keys}  # a list is filled faster than an array
    largest: dict[str, int] = {}
    for place, number in enumerate(block):
        try:
            item_lengths, classes = measure(number)
        except BrokenSequence:
            continue  # reading it again gives the message
        for key, length in item_lengths.items():
            lengths[key][place] = length
        for key, most in classes.items():
            largest[key] = max(largest.get(key, 0), most)
    return {key: numpy.array(column, numpy.int32) for key, column in lengths.items()}, largest


def _joined(parts: Sequence[Counted]) -> Counted:
    lengths = {key: numpy.concatenate([lengths[key] for lengths, _ in parts]) for key in parts[0][0]}
    return lengths, {key: max(largest.get(key, 0) for _, largest in parts) for key in {key for _, all in parts for key in all}}


def _in_processes(
    number: int, count: Callable[[range], Counted], blocks: Sequence[range], advance: Callable[[int], None]
) -> list[Counted]:
    """The counts of the blocks, made by several processes if that may be faster."""
    counted: list[Counted] = []
    if number == 1 or len(blocks) < 2:
        for block in blocks:
            counted.append(count(block))
            advance(len(block))
        return counted
    workers = Workers(number, count)
    workers.start()
    with closing(workers):
        while len(counted) < len(blocks):
            some = blocks[len(counted) : len(counted) + AHEAD * number]
            counted += workers.results(some)
            advance(sum(map(len, some)))
    return counted
