"""Tables of Kaldi: text files with a line for each utterance or recording, which begins with its id."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy

from hvdtrain.data.files import text_lines
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError


class Table:
    """A table in memory.

    Args:
        may_be_empty: whether a line may have nothing but the id, as an empty transcript.

    Attributes:
        ids, values: the ids, and what follows them, in the order of the lines.

    Raises:
        DataError: a line is not as described, or two have the same id.
    """

    def __init__(self, path: Path, may_be_empty: bool = False) -> None:
        self.path = path
        try:
            lines = text_lines(path.read_bytes())
        except OSError as error:
            raise DataError(f"{path}: expected a text file, got: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{path}: expected text in UTF-8, got: {error}") from None
        self.ids: list[str] = []
        self.values: list[str] = []
        for number, line in enumerate(lines if lines != [""] else [], start=1):
            fields = line.split(None, 1)
            if len(fields) < (1 if may_be_empty else 2):
                raise DataError(f"{path}, line {number}: expected `id value`, got {line[:80]!r}")
            self.ids.append(fields[0])
            self.values.append(fields[1].rstrip() if len(fields) > 1 else "")
        self._numbers = dict(zip(self.ids, range(len(self.ids)), strict=True))
        if len(self._numbers) < len(self.ids):
            second = next(number for number, name in enumerate(self.ids) if self._numbers[name] != number)
            other = self._numbers[self.ids[second]]
            raise DataError(f"{path}, line {other + 1}: expected every id once, got {self.ids[second]!r} as in line {second + 1}")

    def find(self, name: str) -> int | None:
        """The number of the line of an id, counted from 0; None: it has none."""
        return self._numbers.get(name)

    def positions(self, ids: Sequence[str]) -> Array:
        """The numbers of the lines of these ids; -1: there is none. int64."""
        if ids is self.ids or ids == self.ids:
            return numpy.arange(len(ids))
        return numpy.fromiter((self._numbers.get(name, -1) for name in ids), numpy.int64, len(ids))

    def where(self, position: int) -> str:
        """The file, the line and the id, for messages."""
        return f"{self.path}, line {position + 1}, {self.ids[position]!r}"

    def numbers(self, position: int, count: int, kind: type[int] | type[float]) -> list[float]:
        """The first `count` numbers of a line. Raises: DataError."""
        fields = self.values[position].replace(",", " ").split()
        try:
            found = [kind(field) for field in fields[:count]]
        except ValueError:
            found = []
        if len(found) < count or min(found) < 0:
            what = "a whole number" if kind is int else "a number"
            raise DataError(f"{self.where(position)}: expected {what} of 0 or more, got {self.values[position][:80]!r}")
        return found
