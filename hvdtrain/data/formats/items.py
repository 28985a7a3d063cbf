"""Map-style datasets: a torch Dataset, a list, a Hugging Face dataset, or anything else that has a length and returns item i."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, Scanning, as_lengths, read_item
from hvdtrain.data.formats.found import find_lengths, fingerprint_of, measure_broken
from hvdtrain.data.formats.item_form import ARE_BATCHES, ItemForm
from hvdtrain.data.held_generators import Generators
from hvdtrain.data.indexed import IndexedDataset, rows_to_use
from hvdtrain.data.padding import same_values
from hvdtrain.data.randomness import ITEM, own_numbers
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence, DataError

SAMPLED = 32
"""How many items are read to recognize the source of saved lengths."""

SIMPLE = (str, int, float, bool, type(None))
"""Types of the attributes by which datasets of the same class are distinguished."""

OTHER_NUMBERS = (
    "differs when it is read again: runs and numbers of ranks will, too, as it is made with a generator of its own (draw from "
    "numpy.random, random or torch, which are seeded for every item)"
)

ROWS_OF_TABLES = "to_dict('records') of pandas, to_dicts() of polars, to_pylist() of pyarrow, or a ParquetDataset"


def is_table(items: Any) -> bool:
    """Whether numbers stand for columns, or several columns for one array: a table of pandas, polars or pyarrow."""
    names = {(each.__module__.partition(".")[0], each.__name__) for each in type(items).__mro__}
    return not names.isdisjoint(
        {("pandas", "DataFrame"), ("polars", "DataFrame"), ("pyarrow", "Table"), ("pyarrow", "RecordBatch")}
    )


class ItemsDataset(IndexedDataset):
    """The items of a map-style dataset, each a sequence.

    An item is a dict, a NamedTuple or a dataclass of arrays by data key, a tuple (data, classes), a tuple (tag, dict), or a
    single array, which is `data`. Its arrays are whatever numpy makes arrays of: numpy arrays, CPU tensors, lists of numbers.
    Their first axis is time. A single number is a sequence of one frame. Whole numbers on one axis are class indices. The entry
    `seq_tag` is the name of the sequence. Data keys and types are those of the first item; floats in Python lists are float32.

    The plan of an epoch needs all lengths. Where the object has no `lengths` (an attribute, or a method without arguments), all
    items are read once to count them; if that takes long, by one rank for all, which saves them in a file. `lengths` are
    a sequence of numbers by data key, or one sequence, of the lengths of `data`. Data keys that it leaves out are single numbers.
    The object may also have `dims`, the numbers of classes by data key, and `labels`, the names of the classes by data key; else
    the number of classes is the largest one counted plus 1, or unknown (1).

    Args:
        where: the config key, for messages.
        items: has `__len__` and `__getitem__`.
        scanning: how many processes may count, how to show their progress, and where to keep the lengths.
        tags: of all items, as UTF-8, if they are known without reading them.

    Attributes:
        kind: the class of the object.
        draws: whether random numbers were drawn while the first items, or all, were read.

    Raises:
        DataError: an item is not as described here, or `lengths` are not.
    """

    def __init__(self, where: str, items: Any, scanning: Scanning | None = None, tags: Array | None = None) -> None:
        if is_table(items):
            raise DataError(
                f"{where}: expected items, got a {type(items).__name__} with columns (give its rows: {ROWS_OF_TABLES})"
            )
        scanning = scanning or Scanning()
        self._where = where
        self._items = items
        self._lengths_path: Path | None = None
        self.kind = type(items)
        self.draws = False
        self._repeats = True
        if not (size := len(items)):
            super().__init__({}, None, {}, numpy.arange(0))
            return
        given_lengths = getattr(items, "lengths", None)
        # Before the first item is read, as reading it may change attributes of classes and modules, such as caches.
        made_of = self._fingerprint() if given_lengths is None and scanning.folder is not None else ""
        self._form = ItemForm(self.where, can_be_broken=True)
        tag, first = self._first(min(scanning.broken.limit, size - 1))
        self._sparse = [key for key, stream in self._form.streams.items() if stream.sparse]
        generators = Generators(items)
        before = generators.states()
        self.reads_for_tags = tag is not None and tags is None
        dims = dict(getattr(items, "dims", {}))
        labels = dict(getattr(items, "labels", {}))
        used = None
        if given_lengths is not None:
            lengths = self._given_lengths(given_lengths() if callable(given_lengths) else given_lengths, first)
        else:
            measured = find_lengths(where, partial(self._identity, made_of), first, size, self._measure, scanning, quickly=True)
            lengths = measured.lengths
            self._lengths_path = measured.path
            used = rows_to_use(lengths.values(), scanning.broken, measure_broken(lengths, self._measure))
            for key, names in labels.items():
                if names and key not in dims and (most := measured.largest.get(key, 0)) >= len(names):
                    rows = (row for row in numpy.flatnonzero(lengths[key] > 0).tolist() if most in self._arrays(row)[1][key])
                    raise DataError(
                        f"{self.where(next(rows, 0))}, {key!r}: expected classes of its {len(names)} labels, got {most}"
                    )
            dims = {key: most + 1 for key, most in measured.largest.items()} | dims
        self.draws = self.draws or generators.states() != before
        super().__init__(self._form.with_classes(dims, labels), tags, lengths, used)

    def row(self, number: int) -> dict[str, Array]:
        return self._arrays(number)[1]

    def where(self, number: int) -> str:
        return f"{self._where}, item {number}"

    def wrong_length(self, number: int, name: str, expected: int, got: int) -> DataError:
        advice = "an item must have the same lengths whenever it is read"
        if self._lengths_path is not None:
            self._lengths_path.unlink(missing_ok=True)
            advice += f"; if the data has changed, start again: {self._lengths_path}, which had its lengths, is removed"
        return DataError(f"{super().wrong_length(number, name, expected, got)} ({advice})")

    def tags(self, indices: Sequence[int]) -> list[str]:
        if not self.reads_for_tags:
            return super().tags(indices)
        return [str(self._arrays(number)[0]) for number in self._used[list(indices)].tolist()]

    def tag_bytes(self, start: int, stop: int) -> Array:
        return Dataset.tag_bytes(self, start, stop) if self.reads_for_tags else super().tag_bytes(start, stop)

    def warnings(self) -> list[str]:
        return [*([] if self._repeats else [f"item 0 {OTHER_NUMBERS}"]), *batch_warnings(self.lengths)]

    def _first(self, most: int) -> tuple[str | None, dict[str, Array]]:
        """The first item that can be read, read twice with the same random numbers. Raises: DataError.

        Args:
            most: the number of broken items that it may come after.
        """
        read = list[tuple[str | None, dict[str, Array]]]()
        number = 0
        generators = Generators(self._items)
        while len(read) < 2:
            with own_numbers(ITEM), generators.restored():
                before = generators.states()
                try:
                    read.append(self._arrays(number))
                except BrokenSequence as error:
                    number += 1
                    if number > most:
                        raise BrokenSequence(f"{self._where}: expected an item that can be read, got: {error}") from None
                self.draws = self.draws or generators.states() != before
        (_, first), (_, again) = read
        self._repeats = all(same_values(first[key], again[key]) for key in first)
        self.is_stochastic = not self._repeats
        return read[0]

    def _arrays(self, index: int) -> tuple[str | None, dict[str, Array]]:
        """The tag, if any, and the arrays of an item. Raises: DataError."""
        return self._form.arrays(index, read_item(self._where, self._items, index))

    def _given_lengths(self, lengths: Any, first: Mapping[str, Array]) -> dict[str, Array]:
        """The lengths that the object provides, by data key. Raises: DataError."""
        by_key = dict(lengths) if isinstance(lengths, Mapping) else {"data" if "data" in first else next(iter(first)): lengths}
        for key in first.keys() - by_key.keys():
            by_key[key] = numpy.ones(len(self._items), numpy.int32)
        return {key: as_lengths(self._where, by_key[key], len(self._items), f" of {key!r}") for key in first}

    def _measure(self, number: int) -> tuple[dict[str, int], dict[str, int]]:
        arrays = self._arrays(number)[1]
        classes = {key: int(arrays[key].max()) for key in self._sparse if len(arrays[key])}
        return {key: len(values) for key, values in arrays.items()}, classes

    def _fingerprint(self) -> str:
        """What the object is made of."""
        simple = {key: value for key, value in getattr(self._items, "__dict__", {}).items() if isinstance(value, SIMPLE)}
        return fingerprint_of([type(self._items), getattr(type(self._items), "__getitem__", None), simple])

    def _identity(self, made_of: str) -> str:
        """A text that differs if the items do: it covers their code, simple attributes of the object, and some items."""
        checksum = 0
        size = len(self._items)
        for index in sorted({sample * (size - 1) // (SAMPLED - 1) for sample in range(SAMPLED)}):
            try:
                tag, arrays = self._arrays(index)
            except BrokenSequence:
                continue
            lengths = {key: len(values) for key, values in sorted(arrays.items())}
            checksum = zlib.crc32(repr((index, tag, lengths)).encode("utf-8"), checksum)
            for key in sorted(self._sparse):
                checksum = zlib.crc32(numpy.ascontiguousarray(arrays[key]).data, checksum)
        return f"items {made_of} {size} {self._form.streams} {checksum}"


def batch_warnings(lengths: Mapping[str, Array]) -> list[str]:
    """A warning if items look like batches: equally long in all data keys, with only the last one shorter.

    >>> batch_warnings({"data": numpy.array([32, 32, 17]), "classes": numpy.array([32, 32, 17])})[0][:57]
    'all items have 32 frames in every data key, the last 17: '
    >>> batch_warnings({"data": numpy.array([32, 32, 17]), "classes": numpy.array([1, 1, 1])})
    []
    """
    first, *other_columns = lengths.values()
    if len(first) < 3 or any(not numpy.array_equal(first, column) for column in other_columns):
        return []
    if not 1 < first[0] > first[-1] or (first[:-1] != first[0]).any():
        return []
    return [f"all items have {first[0]} frames in every data key, the last {first[-1]}: {ARE_BATCHES}"]
