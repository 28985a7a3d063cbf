"""Map-style datasets: a torch Dataset, a list, a Hugging Face dataset, or anything else that has a length and gives item i."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import fields, is_dataclass
from typing import Any

import numpy

from hvdtrain.data.combine.workers import AHEAD, Workers
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError

TAG = "seq_tag"
"""The entry of an item that is its name, not data."""

POSITIONS = ("data", "classes")
"""The data keys of an item that is a tuple."""

BLOCK = 256
"""How many items a process reads for one answer, when lengths are counted."""

Counted = tuple[dict[str, Array], dict[str, int]]
"""By data key, the lengths of some items, and the largest class."""

ALONE = Scanning()

SECONDS_ALONE = 2.0
"""How long counting may take in one process; other processes are started if it would take longer."""


class ItemsDataset(Dataset):
    """The items of a map-style dataset, each a sequence.

    An item is a dict, a NamedTuple or a dataclass of arrays by data key, a tuple (data, classes), a tuple (tag, dict), or a
    single array, which is `data`. Its arrays are whatever numpy makes arrays of: numpy arrays, CPU tensors, lists of numbers.
    Their first axis is time. A single number is a sequence of one frame. Whole numbers on one axis are class indices. The entry
    `seq_tag` is the name of the sequence. Data keys and types are those of the first item; floats in Python lists are float32.

    The plan of an epoch needs all lengths. Where the object has no `lengths` (an attribute, or a method without arguments), all
    items are read once to count them. `lengths` are a sequence of numbers by data key, or one sequence, of the lengths of `data`.
    Data keys that it leaves out are single numbers. The object may also have `dims`, the numbers of classes by data key, and
    `labels`, the names of the classes by data key; else the number of classes is the largest one counted plus 1, or unknown (1).

    Args:
        where: the config key, for messages.
        items: has `__len__` and `__getitem__`.
        scanning: how many processes may count, and what shows their progress.

    Raises:
        DataError: an item is not as described here, or `lengths` are not.
    """

    def __init__(self, where: str, items: Any, scanning: Scanning = ALONE) -> None:
        self._where = where
        self._items = items
        self._size = len(items)
        self.streams: dict[str, Stream] = {}
        self.lengths: dict[str, Array] = {}
        if not self._size:
            return
        tag, first = self._arrays(0)
        self.reads_for_tags = tag is not None
        self.streams = {key: stream_of(values) for key, values in first.items()}
        given = getattr(items, "lengths", None)
        dims = dict(getattr(items, "dims", {}))
        if given is not None:
            self.lengths = self._given_lengths(given() if callable(given) else given, first)
        else:
            self.lengths, largest = self._count(scanning)
            dims = {key: int(most) + 1 for key, most in largest.items()} | dims
        labels = dict(getattr(items, "labels", {}))
        for key, stream in self.streams.items():
            if stream.sparse:
                names = tuple(labels.get(key, ()))
                self.streams[key] = Stream(stream.dtype, (), max(dims.get(key, 1), len(names), 1), sparse=True, labels=names)

    @property
    def num_sequences(self) -> int:
        return self._size

    def sequence(self, index: int) -> dict[str, Array]:
        _, arrays = self._arrays(index)
        for key, values in arrays.items():
            if len(values) != self.lengths[key][index]:
                raise DataError(
                    f"{self._where}: expected {self.lengths[key][index]} frames of {key!r} in item {index}, as when lengths were "
                    f"counted or given, got {len(values)} (an item has to have the same lengths whenever it is read)"
                )
        return arrays

    def tags(self, indices: Sequence[int]) -> list[str]:
        if not self.reads_for_tags:
            return [f"seq-{index}" for index in indices]
        return [str(self._arrays(index)[0]) for index in indices]

    def _arrays(self, index: int) -> tuple[str | None, dict[str, Array]]:
        """The tag, if there is one, and the arrays of an item. Raises: DataError."""
        try:
            item = self._items[index]
        except Exception as error:
            error.add_note(f"(in item {index} of {self._where})")
            raise
        tag, values = named(f"{self._where}, item {index}", item)
        if self.streams and values.keys() != self.streams.keys():
            raise DataError(f"{self._where}, item {index}: expected {keys_text(self.streams)}, got {keys_text(values)}")
        return tag, {key: self._array(index, key, value) for key, value in values.items()}

    def _array(self, index: int, key: str, value: Any) -> Array:
        where = f"{self._where}, item {index}, {key!r}"
        try:
            array = numpy.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU or with a gradient, rows of different lengths
            raise DataError(f"{where}: expected an array, got {type(value).__name__}: {error}") from None
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{where}: expected numbers, got {type(value).__name__} {str(value)[:40]!r} (of a text, give class indices; the "
                f"name of a sequence belongs into the entry {TAG!r})"
            )
        if isinstance(value, (list, tuple, float)) and array.dtype == numpy.float64:
            array = array.astype(numpy.float32)
        array = array.reshape(1) if array.ndim == 0 else array
        stream = self.streams.get(key)
        if stream is None or (array.dtype == stream.dtype and array.shape[1:] == stream.shape):
            return array
        if len(array) == 0:
            return numpy.zeros((0, *stream.shape), stream.dtype)
        if array.shape[1:] != stream.shape or not numpy.can_cast(array.dtype, stream.dtype, "same_kind"):
            raise DataError(
                f"{where}: expected {stream.dtype} frames of shape {stream.shape} as in item 0, got {array.dtype} of shape "
                f"{array.shape[1:]}"
            )
        cast = array.astype(stream.dtype)
        if array.dtype.kind in "iu" and not numpy.array_equal(cast, array):
            raise DataError(
                f"{where}: expected numbers that {stream.dtype} holds, as in item 0, got {array.dtype} from {array.min()} "
                f"to {array.max()}"
            )
        return cast

    def _given_lengths(self, given: Any, first: Mapping[str, Array]) -> dict[str, Array]:
        """The lengths that the object has."""
        by_key = dict(given) if isinstance(given, Mapping) else {"data" if "data" in first else next(iter(first)): given}
        for key in first.keys() - by_key.keys():
            by_key[key] = numpy.ones(self._size, numpy.int32)
        lengths = {}
        for key in first:
            try:
                lengths[key] = numpy.asarray(by_key[key]).astype(numpy.int32, casting="same_kind")
            except (TypeError, ValueError) as error:
                raise DataError(f"{self._where}: expected whole numbers in lengths of {key!r}, got: {error}") from None
            if lengths[key].shape != (self._size,) or lengths[key].min() < 0:
                raise DataError(
                    f"{self._where}: expected {self._size} lengths of {key!r}, none below 0, got an array of shape "
                    f"{lengths[key].shape}, from {lengths[key].min(initial=0)} on"
                )
        return lengths

    def _count(self, scanning: Scanning) -> tuple[dict[str, Array], dict[str, int]]:
        """By data key, the lengths of all items, and the largest class. Raises: DataError."""
        began = time.perf_counter()
        blocks = [range(start, min(start + BLOCK, self._size)) for start in range(0, self._size, BLOCK)]
        parts: list[Counted] = []
        with scanning.progress(f"{self._where}: lengths", self._size) as advance:
            while len(parts) < len(blocks):
                left = blocks[len(parts) :]
                expected = (time.perf_counter() - began) / max(1, len(parts)) * len(left)
                if parts and len(left) > scanning.processes > 1 and expected > SECONDS_ALONE:
                    parts += in_processes(scanning.processes, self._count_block, left, advance)
                else:
                    parts.append(self._count_block(left[0]))
                    advance(len(left[0]))
        lengths = {key: numpy.concatenate([part[key] for part, _ in parts]) for key in self.streams}
        return lengths, {key: max(most[key] for _, most in parts) for key in self.streams}

    def _count_block(self, block: range) -> Counted:
        lengths = {key: numpy.zeros(len(block), numpy.int32) for key in self.streams}
        largest = dict.fromkeys(self.streams, 0)
        for place, index in enumerate(block):
            for key, values in self._arrays(index)[1].items():
                lengths[key][place] = len(values)
                if self.streams[key].sparse and len(values):
                    largest[key] = max(largest[key], int(values.max()))
        return lengths, largest


def in_processes(
    count: int, work: Callable[[range], Counted], blocks: Sequence[range], advance: Callable[[int], None]
) -> list[Counted]:
    """What is counted in the blocks, by several processes."""
    workers = Workers(count, work)
    workers.start()
    counted: list[Counted] = []
    with closing(workers):
        while len(counted) < len(blocks):
            some = blocks[len(counted) : len(counted) + AHEAD * count]
            counted += workers.results(some)
            advance(sum(map(len, some)))
    return counted


def named(where: str, item: Any) -> tuple[str | None, dict[str, Any]]:
    """The tag of an item, if it has one, and its values by data key. Raises: DataError."""
    tag = None
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], Mapping):
        tag, item = item
    if is_dataclass(item):
        item = {field.name: getattr(item, field.name) for field in fields(item)}
    elif isinstance(item, tuple) and (names := getattr(item, "_fields", None)):
        item = dict(zip(names, item, strict=True))
    elif isinstance(item, tuple):
        if len(item) > len(POSITIONS):
            raise DataError(
                f"{where}: expected a dict, a NamedTuple, a dataclass or a tuple (data, classes), got a tuple of {len(item)}"
            )
        item = dict(zip(POSITIONS, item, strict=False))
    elif not isinstance(item, Mapping):
        item = {"data": item}
    values = {str(key): value for key, value in item.items()}
    found = values.pop(TAG, tag)
    if not values:
        raise DataError(f"{where}: expected arrays by data key, got none")
    return None if found is None else str(found), values


def stream_of(values: Array) -> Stream:
    """What the arrays of a data key hold, if this is one of them."""
    sparse = values.ndim == 1 and values.dtype.kind in "iu"
    return Stream(values.dtype, values.shape[1:], 1 if values.ndim == 1 else values.shape[-1], sparse)


def keys_text(keys: Iterable[str]) -> str:
    """The data keys, for messages."""
    return f"the data keys {', '.join(keys)}"
