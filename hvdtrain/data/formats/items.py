"""Map-style datasets: a torch Dataset, a list, a Hugging Face dataset, or anything else that has a length and returns item i."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.combine.workers import AHEAD, Workers
from hvdtrain.data.dataset import Dataset, Scanning, as_lengths, read_item
from hvdtrain.data.fingerprint import fingerprint_of
from hvdtrain.data.formats.item_form import ARE_BATCHES, ItemForm
from hvdtrain.data.index import IndexFile
from hvdtrain.data.indexed import UNREADABLE, rows_to_use
from hvdtrain.data.padding import same_values
from hvdtrain.data.randomness import ITEM, generator_states, own_numbers
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError

FIRST = 8
"""How many items are read first, to estimate how long reading takes."""

SAMPLED = 32
"""How many items are read to recognize the source of saved lengths."""

BLOCK = 256
"""How many items a process reads per answer while lengths are counted."""

SIMPLE = (str, int, float, bool, type(None))
"""Types of the attributes by which datasets of the same class are distinguished."""

Counted = tuple[dict[str, Array], dict[str, int]]
"""The lengths of some items, and the largest class; both by data key."""

OTHER_NUMBERS = (
    "differs when it is read again: runs and numbers of ranks will, too, as it is made with a generator of its own (draw from "
    "numpy.random, random or torch, which are seeded for every item)"
)

ALONE = Scanning()


SECONDS_ALONE = 2.0
"""How long counting may take on every rank. If it would take longer, one rank counts for all in several processes, and saves the
lengths in a file."""


class ItemsDataset(Dataset):
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

    Attributes:
        kind: the class of the object.
        draws: whether random numbers were drawn while the first items, or all, were read.

    Raises:
        DataError: an item is not as described here, or `lengths` are not.
    """

    def __init__(self, where: str, items: Any, scanning: Scanning = ALONE) -> None:
        self._where = where
        self._items = items
        self._size = len(items)
        self._lengths_path: Path | None = None
        self.streams: dict[str, Stream] = {}
        self.lengths: dict[str, Array] = {}
        self.kind = type(items)
        self.draws = False
        self._repeats = True
        self._used = numpy.arange(self._size)
        if not self._size:
            return
        given = getattr(items, "lengths", None)
        # Before the first item is read, as reading it may change attributes of classes and modules, such as caches.
        self._made_of = self._fingerprint() if given is None and scanning.folder is not None else ""
        self._form = ItemForm(self.place)
        tag, first = self._first(scanning.broken.limit)
        before = generator_states()
        self.reads_for_tags = tag is not None
        self.streams = self._form.streams
        dims = dict(getattr(items, "dims", {}))
        if given is not None:
            self.lengths = self._given_lengths(given() if callable(given) else given, first)
        else:
            found, largest = self._count(scanning)
            dims = {key: int(most) + 1 for key, most in largest.items()} | dims
            self._used = rows_to_use(found.values(), scanning.broken, self._messages(found))
            self.lengths = {key: column[self._used] for key, column in found.items()}
        self.draws = self.draws or generator_states() != before
        self.streams = self._form.with_classes(dims, dict(getattr(items, "labels", {})))

    @property
    def num_sequences(self) -> int:
        return len(self._used)

    def sequence(self, index: int) -> dict[str, Array]:
        number = int(self._used[index])
        _, arrays = self._arrays(number)
        for key, values in arrays.items():
            if len(values) != self.lengths[key][index]:
                advice = "an item must have the same lengths whenever it is read"
                if self._lengths_path is not None:
                    self._lengths_path.unlink(missing_ok=True)
                    advice += f"; if the data has changed, start again: {self._lengths_path}, which had its lengths, is removed"
                raise DataError(
                    f"{self._where}: expected {self.lengths[key][index]} frames of {key!r} in item {number}, as when lengths "
                    f"were counted or given, got {len(values)} ({advice})"
                )
        return arrays

    def place(self, number: int) -> str:
        """Describes an item, for messages."""
        return f"{self._where}, item {number}"

    def tags(self, indices: Sequence[int]) -> list[str]:
        numbers = self._used[list(indices)].tolist()
        return [str(self._arrays(number)[0]) if self.reads_for_tags else f"seq-{number}" for number in numbers]

    def warnings(self) -> list[str]:
        return [*([] if self._repeats else [f"item 0 {OTHER_NUMBERS}"]), *batch_warnings(self.lengths)]

    def _first(self, most: int) -> tuple[str | None, dict[str, Array]]:
        """The first item that can be read, read twice with the same random numbers. Raises: DataError.

        Args:
            most: the number of broken items that it may come after.
        """
        found, number = list[tuple[str | None, dict[str, Array]]](), 0
        while len(found) < 2:
            with own_numbers(ITEM):
                before = generator_states()
                try:
                    found.append(self._arrays(number))
                except BrokenSequence:
                    number += 1
                    if number > min(most, self._size - 1):
                        raise
                self.draws = self.draws or generator_states() != before
        (_, first), (_, again) = found
        self._repeats = all(same_values(first[key], again[key]) for key in first)
        self.is_stochastic = not self._repeats
        return found[0]

    def _arrays(self, index: int) -> tuple[str | None, dict[str, Array]]:
        """The tag, if any, and the arrays of an item. Raises: DataError."""
        return self._form.arrays(index, read_item(self._where, self._items, index))

    def _given_lengths(self, given: Any, first: Mapping[str, Array]) -> dict[str, Array]:
        """The lengths that the object provides, by data key. Raises: DataError."""
        by_key = dict(given) if isinstance(given, Mapping) else {"data" if "data" in first else next(iter(first)): given}
        for key in first.keys() - by_key.keys():
            by_key[key] = numpy.ones(self._size, numpy.int32)
        return {key: as_lengths(self._where, by_key[key], self._size, f" of {key!r}") for key in first}

    def _count(self, scanning: Scanning) -> tuple[dict[str, Array], dict[str, int]]:
        """By data key, the lengths of all items, and the largest class. Raises: DataError."""
        began = time.perf_counter()
        starts = [0, *range(min(FIRST, self._size), self._size, BLOCK)]
        blocks = [range(start, end) for start, end in pairwise([*starts, self._size]) if start < end]
        parts: list[Counted] = []
        with scanning.progress(f"{self._where}: lengths", self._size) as advance:
            while len(parts) < len(blocks):
                left = blocks[len(parts) :]
                elapsed = time.perf_counter() - began
                expected = elapsed / max(1, left[0].start) * (self._size - left[0].start)
                is_known = bool(parts) and elapsed > SECONDS_ALONE / 20  # a few fast items are no basis for an estimate
                if is_known and expected > SECONDS_ALONE:
                    return self._count_for_all(parts, left, scanning, advance)
                parts.append(self._count_block(left[0]))
                advance(len(left[0]))
        return join_counts(parts)

    def _count_for_all(
        self, parts: list[Counted], left: Sequence[range], scanning: Scanning, advance: Callable[[int], None]
    ) -> tuple[dict[str, Array], dict[str, int]]:
        """Count the rest, unless the lengths are saved already. Of several processes, one counts while the others wait."""
        file = IndexFile(scanning.folder, self._identity() if scanning.folder is not None else "")
        found = count_for_all(self._where, file, "items", parts, left, self._count_block, scanning, advance)
        self._lengths_path = file.path("items")
        return found

    def _fingerprint(self) -> str:
        """What the object is made of."""
        simple = {key: value for key, value in getattr(self._items, "__dict__", {}).items() if isinstance(value, SIMPLE)}
        return fingerprint_of([type(self._items), getattr(type(self._items), "__getitem__", None), simple])

    def _identity(self) -> str:
        """A text that differs if the items do: it covers their code, simple attributes of the object, and some items."""
        checksum = 0
        for index in sorted({place * (self._size - 1) // (SAMPLED - 1) for place in range(SAMPLED)}):
            try:
                tag, arrays = self._arrays(index)
            except BrokenSequence:
                continue
            lengths = {key: len(values) for key, values in sorted(arrays.items())}
            checksum = zlib.crc32(repr((index, tag, lengths)).encode("utf-8"), checksum)
            for key in sorted(key for key, stream in self.streams.items() if stream.sparse):
                checksum = zlib.crc32(numpy.ascontiguousarray(arrays[key]).data, checksum)
        return f"items {self._made_of} {self._size} {self.streams} {checksum}"

    def _count_block(self, block: range) -> Counted:
        lengths = {key: numpy.full(len(block), UNREADABLE, numpy.int32) for key in self.streams}
        largest = dict.fromkeys(self.streams, 0)
        for place, index in enumerate(block):
            try:
                arrays = self._arrays(index)[1]
            except BrokenSequence:
                continue  # reading it again gives the message
            for key, values in arrays.items():
                lengths[key][place] = len(values)
                if self.streams[key].sparse and len(values):
                    largest[key] = max(largest[key], int(values.max()))
        return lengths, largest

    def _messages(self, lengths: Mapping[str, Array]) -> Iterator[str]:
        """A message for each item that could not be read."""
        for number in numpy.flatnonzero(next(iter(lengths.values())) < 0).tolist():
            try:
                self._arrays(number)
                message = "expected an item that can be read, got none when lengths were counted"
                if self._lengths_path is not None:  # the item has been mended since
                    self._lengths_path.unlink(missing_ok=True)
                    message += f" (start again: {self._lengths_path}, which says so, is removed)"
                yield f"{self._where}, item {number}: {message}"
            except BrokenSequence as error:
                yield str(error)


def batch_warnings(lengths: Mapping[str, Array]) -> list[str]:
    """A warning if items look like batches: equally long in all data keys, with only the last one shorter.

    >>> batch_warnings({"data": numpy.array([32, 32, 17]), "classes": numpy.array([32, 32, 17])})[0][:57]
    'all items have 32 frames in every data key, the last 17: '
    >>> batch_warnings({"data": numpy.array([32, 32, 17]), "classes": numpy.array([1, 1, 1])})
    []
    """
    first, *others = lengths.values()
    if len(first) < 3 or any(not numpy.array_equal(first, other) for other in others):
        return []
    if not 1 < first[0] > first[-1] or (first[:-1] != first[0]).any():
        return []
    return [f"all items have {first[0]} frames in every data key, the last {first[-1]}: {ARE_BATCHES}"]


def count_for_all(
    where: str,
    file: IndexFile,
    part: str,
    counted: list[Counted],
    left: Sequence[range],
    count: Callable[[range], Counted],
    scanning: Scanning,
    advance: Callable[[int], None],
) -> Counted:
    """The lengths of all items, unless they are kept already. Of several processes, one counts while the others wait.

    Args:
        where: the config key, for messages.
        counted, left: what this process has counted, and what is left to count.
    """

    def make() -> tuple[dict[str, Any], dict[str, Array]]:
        processes = scanning.processes_alone if scanning.folder is not None else scanning.processes
        if processes > 1 and len(left) > 1:
            parts = [*counted, *in_processes(processes, count, left, advance)]
        else:
            parts = list(counted)
            for block in left:
                parts.append(count(block))
                advance(len(block))
        lengths, largest = join_counts(parts)
        return largest, lengths

    largest, lengths = file.get(part, scanning, make, f"{where}: the lengths are counted")
    return lengths, largest


def join_counts(parts: Sequence[Counted]) -> Counted:
    lengths = {key: numpy.concatenate([lengths[key] for lengths, _ in parts]) for key in parts[0][0]}
    return lengths, {key: max(largest[key] for _, largest in parts) for key in parts[0][1]}


def in_processes(
    count: int, work: Callable[[range], Counted], blocks: Sequence[range], advance: Callable[[int], None]
) -> list[Counted]:
    """The counts of the blocks, made by several processes."""
    workers = Workers(count, work)
    workers.start()
    counted: list[Counted] = []
    with closing(workers):
        while len(counted) < len(blocks):
            some = blocks[len(counted) : len(counted) + AHEAD * count]
            counted += workers.results(some)
            advance(sum(map(len, some)))
    return counted
