"""Finds lengths in several processes, and keeps them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from hvdtrain.data.combine.workers import AHEAD, Workers
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.formats.found import ROWS_AT_ONCE, Counted, FoundLengths, LengthFinder, Measure, count_rows, join_counts
from hvdtrain.plugins.lengths import LengthKeys
from hvdtrain.plugins.lengths.fingerprint import fingerprint_of
from hvdtrain.plugins.lengths.index import IndexFile, Stored

if TYPE_CHECKING:
    from hvdtrain.settings import Settings

FIRST = 8
"""How many rows are read first, to estimate how long reading takes."""

SECONDS_ALONE = 2.0
"""How long reading may take on every rank, if it is not to be avoided. If it would take longer, one rank reads for all in several
processes, and keeps the lengths in a file."""


def find_lengths(
    where: str,
    fingerprint: Callable[[], str],
    keys: Iterable[str],
    size: int,
    measure: Measure,
    scanning: Scanning,
    quickly: bool = False,
) -> FoundLengths:
    """As `find_lengths` in data/formats/found.py, unless they are kept already. Of several processes, one reads while the others
    wait."""
    starts = [0, *range(min(FIRST, size), size, ROWS_AT_ONCE)]
    blocks = [range(start, end) for start, end in pairwise([*starts, size]) if start < end]
    count = partial(count_rows, list(keys), measure)
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
                return FoundLengths(*join_counts(counted), None)

        def make() -> Stored:
            remaining = blocks[len(counted) :]
            processes = scanning.processes_alone if scanning.folder is not None else scanning.processes
            lengths, largest = join_counts([*counted, *_in_processes(processes, count, remaining, advance)])
            return largest, lengths

        file = IndexFile(scanning.folder, fingerprint() if scanning.folder is not None else "")
        largest, lengths = file.get("lengths", scanning, make, f"{where}: the lengths are counted")
    return FoundLengths(lengths, largest, file.path("lengths"))


def _in_processes(
    number: int, count: Callable[[range], Counted], blocks: Sequence[range], advance: Callable[[int], None]
) -> list[Counted]:
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


def folder_of(settings: Settings) -> Path | None:
    """Where what is found is kept; None: nowhere."""
    folder = settings.of(LengthKeys).lengths_dir
    return None if folder is None else Path(folder).expanduser()


FINDER = LengthFinder(folder_of, fingerprint_of, find_lengths)
