"""What an item is: its tag, and its values by data key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import numpy

from hvdtrain.data.dataset import Item
from hvdtrain.data.padding import holds
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError

TAG = "seq_tag"
"""The entry of an item that holds its name, not data."""

POSITIONS = ("data", "classes")
"""The data keys of an item that is a tuple."""

ARE_BATCHES = (
    "if an item is a batch, as a DataLoader makes them: hvdtrain makes the batches, give it the DataLoader's dataset, whose "
    "items are single sequences"
)
"""Advice if items do not look like sequences."""


class ItemForm:
    """The form of all items of a source: that of the first one.

    Args:
        where: describes an item by its number, for messages.
        can_be_broken: whether a later item that is not like the first one is a broken sequence, which others can do without.

    Attributes:
        streams: by data key, what an item's array holds. Empty before the first item.
    """

    def __init__(self, where: Callable[[int], str], can_be_broken: bool = False) -> None:
        self._where = where
        self._can_be_broken = can_be_broken
        self._has_tags = False
        self.streams: dict[str, Stream] = {}

    def arrays(self, index: int, item: Any) -> tuple[str | None, dict[str, Array]]:
        """The tag, if any, and the arrays of an item. Raises: DataError."""
        if self._is_usual(item):
            return None, dict(item)
        try:
            return self._converted(index, item)
        except DataError as error:
            if self._can_be_broken and self.streams:
                raise BrokenSequence(str(error)) from None
            raise

    def _converted(self, index: int, item: Any) -> tuple[str | None, dict[str, Array]]:
        """The same, of an item of any form."""
        tag, values = tag_and_values(self._where(index), item)
        if self.streams and (tag is None) == self._has_tags:
            got = "as item 0 has one, got none" if tag is None else f"as item 0 has none, got {tag!r}"
            raise DataError(f"{self._where(index)}: expected {'a' if tag is None else 'no'} name in {TAG!r}, {got}")
        if self.streams and values.keys() != self.streams.keys():
            raise DataError(f"{self._where(index)}: expected {keys_text(self.streams)}, got {keys_text(values)}")
        arrays = {key: self._array(index, key, value) for key, value in values.items()}
        if not self.streams:
            self._has_tags = tag is not None
            self.streams = {key: stream_of(array) for key, array in arrays.items()}
        return tag, arrays

    def sequence(self, index: int, item: Any) -> Item:
        """An item as a sequence; an item without a name is named after its number. Raises: DataError."""
        tag, arrays = self.arrays(index, item)
        return f"seq-{index}" if tag is None else tag, arrays

    def with_classes(self, dims: Mapping[str, int], labels: Mapping[str, Sequence[str]]) -> dict[str, Stream]:
        """The streams, with the numbers of classes and their names if known."""
        streams = dict(self.streams)
        for key, stream in self.streams.items():
            if stream.sparse:
                names = tuple(labels.get(key, ()))
                streams[key] = Stream(stream.dtype, (), max(dims.get(key, 1), len(names), 1), sparse=True, labels=names)
        return streams

    def _is_usual(self, item: Any) -> bool:
        """Whether an item is a dict of arrays that are as those of the first one, which had no name: nothing is to be done."""
        if type(item) is not dict or self._has_tags or not self.streams or item.keys() != self.streams.keys():
            return False
        for key, stream in self.streams.items():
            value = item[key]
            is_array = type(value) is numpy.ndarray and value.ndim > 0
            if not is_array or value.dtype != stream.dtype or value.shape[1:] != stream.shape:
                return False
        return True

    def _array(self, index: int, key: str, value: Any) -> Array:
        stream = self.streams.get(key)
        where = f"{self._where(index)}, {key!r}"
        try:
            array = numpy.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:  # a tensor on a GPU or with a gradient, rows of different lengths
            batches = f" ({ARE_BATCHES})" if isinstance(value, (list, tuple)) else ""
            raise DataError(f"{where}: expected an array, got {type(value).__name__}: {error}{batches}") from None
        if array.dtype.kind not in "biuf":
            raise DataError(
                f"{where}: expected numbers, got {type(value).__name__} {str(value)[:40]!r} (for text, give class indices, or "
                f"leave it out; the name of a sequence belongs in the entry {TAG!r}"
                f"{f'; {ARE_BATCHES}' if isinstance(value, (list, tuple)) else ''})"
            )
        if key not in self.streams and isinstance(value, (list, tuple)) and not array.size:
            raise DataError(
                f"{where}: expected a value that has a type, as the first item determines that of all, got the empty {value!r} "
                "(numpy.zeros(0, 'int32') has one)"
            )
        if numpy.ma.is_masked(value):
            raise DataError(f"{where}: expected a value for every number, got an array with masked ones")
        if isinstance(value, (list, tuple, float)) and array.dtype == numpy.float64:
            if numpy.abs(array).max(initial=0) >= 2**63 and all(
                isinstance(number, int) for number in numpy.array(value, object).flat
            ):
                raise DataError(f"{where}: expected integers that a type of numpy holds, got up to {numpy.max(value)}")
            array = array.astype(numpy.float32)
        array = array.astype(array.dtype.newbyteorder("="), copy=False)  # frameworks only have tensors in this byte order
        array = array.reshape(1) if array.ndim == 0 else array
        if stream is None or (array.dtype == stream.dtype and array.shape[1:] == stream.shape):
            return array
        if len(array) == 0:
            return numpy.zeros((0, *stream.shape), stream.dtype)
        if array.shape[1:] != stream.shape or not numpy.can_cast(array.dtype, stream.dtype, "same_kind"):
            raise DataError(
                f"{where}: expected {stream.dtype} frames of shape {stream.shape} as in item 0, got {array.dtype} of shape "
                f"{array.shape[1:]}{f' ({ARE_BATCHES})' if stream.shape and array.ndim > 1 else ''}"
            )
        if not holds(stream.dtype, array):
            raise DataError(
                f"{where}: expected numbers that {stream.dtype} holds, as in item 0, got {array.dtype} from {array.min()} "
                f"to {array.max()}"
            )
        return array.astype(stream.dtype)


def tag_and_values(where: str, item: Any) -> tuple[str | None, dict[str, Any]]:
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
    tag_value = values.pop(TAG, tag)
    if not values:
        raise DataError(f"{where}: expected arrays by data key, got none")
    return _tag_text(where, tag_value), values


def _tag_text(where: str, tag: Any) -> str | None:
    """The name of an item as text, if it has one. Raises: DataError, if it is none, such as a missing value of pandas."""
    tag = tag.item() if hasattr(tag, "item") and getattr(tag, "ndim", 0) == 0 else tag
    if isinstance(tag, bytes):
        tag = tag.decode("utf-8", "surrogateescape")
    if tag is not None and (not isinstance(tag, (str, int, float)) or tag != tag):
        raise DataError(f"{where}: expected the name of the item in {TAG!r}, got {type(tag).__name__} {str(tag)[:40]!r}")
    return None if tag is None else str(tag)


def stream_of(values: Array) -> Stream:
    """The stream of a data key, inferred from one of its arrays."""
    sparse = values.ndim == 1 and values.dtype.kind in "iu"
    return Stream(values.dtype, values.shape[1:], 1 if values.ndim == 1 else values.shape[-1], sparse)


def keys_text(keys: Iterable[str]) -> str:
    """The data keys, for messages."""
    return f"the data keys {', '.join(keys)}"
