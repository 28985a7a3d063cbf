"""Lengths that nothing but reading shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.plugins import Registry
from hvdtrain.data.dataset import Scanning
from hvdtrain.data.indexed import UNREADABLE
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence

ROWS_AT_ONCE = 64
"""How many rows are read between two notes of progress, or by a process per answer."""

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


@dataclass(frozen=True)
class LengthFinder:
    """What a plug-in does to find lengths faster, and to keep them.

    Attributes:
        folder: where they are kept, given the settings; None: nowhere.
        fingerprint: returns a text that differs if a value, such as an object with its code, does.
        find: as `find_lengths`.
    """

    folder: Callable[[Any], Path | None]
    fingerprint: Callable[[Any], str]
    find: Callable[..., FoundLengths]


FINDERS: Registry[LengthFinder] = Registry("lengths")
"""Those of plug-ins; the last one is used."""


def fingerprint_of(value: Any) -> str:
    """A text that differs if a value of a config does; empty: nothing keeps lengths by it."""
    return "" if FINDERS.last is None else FINDERS.last.fingerprint(value)


def find_lengths(
    where: str,
    fingerprint: Callable[[], str],
    keys: Iterable[str],
    size: int,
    measure: Measure,
    scanning: Scanning,
    quickly: bool = False,
) -> FoundLengths:
    """The lengths of all rows, by the plug-in that finds them, or by reading all rows in this process.

    Args:
        where: the config key of the dataset.
        fingerprint: returns a text that differs if the data does.
        quickly: whether each process reads by itself what takes few seconds.
    """
    if (finder := FINDERS.last) is not None:
        return finder.find(where, fingerprint, keys, size, measure, scanning, quickly)
    with scanning.progress(f"{where}: lengths", size) as advance:
        counted = []
        for start in range(0, size, ROWS_AT_ONCE):
            block = range(start, min(start + ROWS_AT_ONCE, size))
            counted.append(count_rows(list(keys), measure, block))
            advance(len(block))
    return FoundLengths(*join_counts(counted), None)


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


def count_rows(keys: Sequence[str], measure: Measure, block: range) -> Counted:
    """The lengths of some rows, and the largest classes."""
    lengths = {key: [UNREADABLE] * len(block) for key in keys}  # a list is filled faster than an array
    largest: dict[str, int] = {}
    for position, number in enumerate(block):
        try:
            item_lengths, classes = measure(number)
        except BrokenSequence:
            continue  # reading it again gives the message
        for key, length in item_lengths.items():
            lengths[key][position] = length
        for key, most in classes.items():
            largest[key] = max(largest.get(key, 0), most)
    return {key: numpy.array(column, numpy.int32) for key, column in lengths.items()}, largest


def join_counts(parts: Sequence[Counted]) -> Counted:
    """Those of several blocks of rows, one after the other."""
    lengths = {key: numpy.concatenate([lengths[key] for lengths, _ in parts]) for key in parts[0][0]}
    return lengths, {key: max(largest.get(key, 0) for _, largest in parts) for key in {key for _, all in parts for key in all}}
