"""Tables of Kaldi: text files with a line for each utterance or recording, which begins with its id."""

from __future__ import annotations

import codecs
import io
from array import array
from pathlib import Path

import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import DataError


class Table:
    """A table in memory, as its file has it: objects for every line would take several times as much.

    Args:
        may_be_empty: whether a line may have nothing but the id, as an empty transcript.

    Attributes:
        ids: in the order of the lines, as UTF-8: numpy bytes.

    Raises:
        DataError: a line is not as described, or two have the same id.
    """

    def __init__(self, path: Path, may_be_empty: bool = False) -> None:
        self.path = path
        try:
            self._content = path.read_bytes().removeprefix(codecs.BOM_UTF8)
        except OSError as error:
            raise DataError(f"{path}: expected a text file, got: {error.strerror}") from None
        ids = []
        starts = array("q", [0])
        for number, stored in enumerate(io.BytesIO(self._content if self._content != b"\n" else b""), start=1):
            try:
                line = stored.decode("utf-8")
            except UnicodeDecodeError as error:
                raise DataError(f"{path}: expected text in UTF-8, got: {error}") from None
            fields = line.split(None, 1)
            if len(fields) < (1 if may_be_empty else 2):
                raise DataError(f"{path}, line {number}: expected `id value`, got {line.rstrip()[:80]!r}")
            ids.append(fields[0].encode())
            starts.append(starts[-1] + len(stored))
        self.ids: Array = numpy.array(ids, dtype=bytes)
        self._starts = starts
        is_sorted = bool((self.ids[:-1] < self.ids[1:]).all())
        self._order = None if is_sorted else numpy.argsort(self.ids, kind="stable")
        if self._order is not None:
            ordered = self.ids[self._order]
            if len(twice := numpy.flatnonzero(ordered[:-1] == ordered[1:])):
                first = int(self._order[twice].min())
                repeated = int(numpy.flatnonzero(self.ids == self.ids[first])[-1])
                name = self.ids[first].decode()
                raise DataError(f"{path}, line {repeated + 1}: expected every id once, got {name!r} as in line {first + 1}")

    def value(self, position: int) -> str:
        """What follows the id in a line, counted from 0."""
        fields = self._content[self._starts[position] : self._starts[position + 1]].decode("utf-8").split(None, 1)
        return fields[1].rstrip() if len(fields) > 1 else ""

    def positions(self, ids: Array) -> Array:
        """The numbers of the lines of these ids, as UTF-8; -1: there is none. int64."""
        if ids is self.ids or numpy.array_equal(ids, self.ids):
            self.ids = ids  # in memory once
            return numpy.arange(len(ids))
        if not len(self.ids):
            return numpy.full(len(ids), -1)
        places = numpy.minimum(numpy.searchsorted(self.ids, ids, sorter=self._order), len(self.ids) - 1)
        rows = places if self._order is None else self._order[places]
        return numpy.where(self.ids[rows] == ids, rows, -1)

    def where(self, position: int) -> str:
        """The file, the line and the id, for messages."""
        return f"{self.path}, line {position + 1}, {self.ids[position].decode()!r}"

    def numbers(self, position: int, count: int, kind: type[int] | type[float]) -> list[float]:
        """The first `count` numbers of a line. Raises: DataError."""
        fields = self.value(position).replace(",", " ").split()
        try:
            numbers = [kind(field) for field in fields[:count]]
        except ValueError:
            numbers = []
        if len(numbers) < count or min(numbers) < 0:
            expected = "a whole number" if kind is int else "a number"
            raise DataError(f"{self.where(position)}: expected {expected} of 0 or more, got {self.value(position)[:80]!r}")
        return numbers
