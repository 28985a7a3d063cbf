"""Texts as class indices: the class of an entry of a vocabulary is its index in the list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy

from hvdtrain.data.files import text_lines
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

Units = Literal["characters", "words"]

UNKNOWN = "<unk>"
"""The entry of a vocabulary that stands for everything that is not in it."""

LOOKED_AT = 100
"""So many texts show whether a vocabulary fits them."""


class Vocabulary:
    """The entries by class.

    Args:
        where: the file it comes from, for messages.
    """

    def __init__(self, where: str, entries: Sequence[str]) -> None:
        self._where = where
        self.entries = list(entries)
        self._classes = {entry: number for number, entry in enumerate(entries)}

    def misfit(self, texts: Iterable[Sequence[str]]) -> str:
        """What to say if most units of some texts are not in the vocabulary; '': nothing."""
        counts = Counter(unit for units in texts for unit in units)
        unknown = sum(count for unit, count in counts.items() if unit not in self._classes)
        if not self.entries or 2 * unknown <= counts.total():
            return ""
        return (
            f"{unknown} of the {counts.total()} units of its first texts are not in {self._where} and become {UNKNOWN} (does it "
            "fit the data: characters or words, upper or lower case?)"
        )

    def check(self, units: Sequence[str], source: str, tag: str) -> None:
        """Check that the vocabulary has all units of a sequence. Raises: DataError, naming `source` and `tag`."""
        for unit in units if UNKNOWN not in self._classes else ():
            if unit not in self._classes:
                raise DataError(
                    f"{source}: expected text of the entries in {self._where}, got {unit!r} in sequence {tag!r} "
                    f"(an entry {UNKNOWN} would cover it)"
                )

    def classes(self, units: Sequence[str]) -> Array:
        """The class of every unit, which `check` accepted: int32 of shape (len(units),)."""
        unknown = self._classes.get(UNKNOWN, -1)
        return numpy.array([self._classes.get(unit, unknown) for unit in units], dtype=numpy.int32)


def split(text: str, units: Units) -> list[str]:
    """The characters of a text, or its words.

    >>> split("zu viel", "characters"), split(" zu  viel", "words")
    (['z', 'u', ' ', 'v', 'i', 'e', 'l'], ['zu', 'viel'])
    """
    return text.split() if units == "words" else list(text.strip())


def read_vocabulary(path: Path) -> Vocabulary:
    """Read a text file with one entry per line; the first is class 0. Raises: DataError."""
    return Vocabulary(str(path), check_distinct(path, read_lines(path)))


def check_distinct(path: Path, entries: list[str]) -> list[str]:
    """The entries. Raises: DataError, if one is there twice."""
    if twice := [entry for entry, times in Counter(entries).items() if times > 1]:
        raise DataError(f"{path}: expected every entry once, got {twice[0]!r} again")
    return entries


def read_lines(path: Path) -> list[str]:
    """The lines of a text file. Raises: DataError."""
    try:
        return text_lines(path.read_bytes())
    except OSError as error:
        raise DataError(f"{path}: expected a text file, got: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected text in UTF-8, got: {error}") from None
