"""The contracts of data: a dataset, a source that is converted to one, and the keys of a kind of dataset.

Classes of the package derive from `Dataset`, `SequenceSource` and `DatasetKeys`, whose members all have typed defaults. A user's
class that does not is adapted once, when it is opened (`as_dataset`, `as_source`); no other code checks for members.
"""

from __future__ import annotations

import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.types import Array, Batch, Items, Padded, Stream
from hvdtrain.errors import DataError

if TYPE_CHECKING:
    from hvdtrain.data.plan.mix import Mix

T = TypeVar("T")

EARLIER_NAMES = {"mapped": "memory_mapped", "varies": "is_stochastic", "own_order": "has_fixed_order", "drawn": "selected"}
"""Names in hvdtrain 1.0.0 of members that a user's class may define, and their names today."""


class Dataset(ABC):
    """A number of sequences, each a dict of arrays by data key. It is independent of order, batches and ranks.

    A subclass sets `streams` and `lengths` and implements `num_sequences`, `sequence` and `tags`. It overrides other
    members if it can do better than the default.

    Attributes:
        streams: by data key, what a sequence's array holds.
        lengths: by data key, the number of frames of every sequence; int32 of shape (num_sequences,).
        memory_mapped: the data keys that are memory-mapped, so that caching them gains nothing.
        is_stochastic: whether `at_epoch` or `selected` depend on the epoch, so that sequences cannot be cached.
        has_fixed_order: whether the sequences of `at_epoch` already are those of an epoch, in the order to read them.
        window: the number of neighbouring sequences that may be reordered, if they are read from beginning to end; None: see
            `has_fixed_order`.
        reads_batches: whether `padded` and `packed` are the user's own, to be called wherever a batch is read.
        mix: the parts that an epoch mixes; None: it consists of all sequences, or of those that are selected.
        collate: makes what `train_step` gets of a list of items; None: arrays are padded.
        max_seqs: the number of sequences in a batch where no key limits it; None: a key must.
    """

    streams: Mapping[str, Stream]
    lengths: Mapping[str, Array]
    memory_mapped: frozenset[str] = frozenset()
    is_stochastic: bool = False
    reads_for_tags: bool = False
    has_fixed_order: bool = False
    window: int | None = None
    reads_batches: bool = False
    mix: Mix | None = None
    collate: Callable[[list[Any]], Any] | None = None
    max_seqs: int | None = None

    def __init_subclass__(cls) -> None:
        # Classes written for 1.0.0 keep their meaning; else a sequence that changes with the epoch would be cached unnoticed.
        for earlier, name in EARLIER_NAMES.items():
            if earlier in cls.__dict__:
                setattr(cls, name, cls.__dict__[earlier])
        changes = {"at_epoch", "selected"} & vars(cls).keys()
        if changes and "is_stochastic" not in vars(cls) and not cls.__module__.startswith("hvdtrain."):
            cls.is_stochastic = True

    @property
    @abstractmethod
    def num_sequences(self) -> int:
        """The number of sequences."""

    @abstractmethod
    def sequence(self, index: int) -> dict[str, Array]:
        """The arrays of one sequence by data key, possibly read-only views of a file. Raises: DataError."""

    @abstractmethod
    def tags(self, indices: Sequence[int]) -> list[str]:
        """The names of some sequences. Raises: DataError."""

    def close(self) -> None:  # noqa: B027
        """Close files and end processes. The default does nothing."""

    def release(self) -> None:  # noqa: B027
        """Close files that are reopened when needed. The default does nothing."""

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Several sequences. Override it where that is faster than one by one. Raises: DataError."""
        return [self.sequence(index) for index in indices]

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Several sequences, padded to the longest. Override it where that is faster than one by one. Raises: DataError."""
        return self._read_batch(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        """Several sequences, one after the other in these data keys, and padded in the others. Raises: DataError."""
        return self._read_batch(indices, keys)

    def _read_batch(self, indices: Array, packed: Collection[str]) -> dict[str, Padded]:
        sequences = self.sequences(indices.tolist())

        def describe(name: str, row: int) -> str:
            return f"sequence {self.tags([int(indices[row])])[0]!r}, data key {name!r}"

        from hvdtrain.data.padding import pack, pad  # here, as numpy below: `--help` imports the kinds of datasets without numpy

        made = {
            name: (pack if name in packed else pad)([sequence[name] for sequence in sequences], partial(describe, name))
            for name in self.streams
        }
        for name in [name for name, stream in self.streams.items() if stream.holds_items]:
            made[name] = Items(made[name].values, self.lengths[name][indices])
        return made

    def batch(self, indices: Array, packed: Collection[str] = ()) -> Batch:
        """A batch of the sequences with these indices, int64 of shape (batch,). Raises: DataError.

        Args:
            packed: the data keys without padding.
        """
        data = self.packed(indices, packed) if packed else self.padded(indices)
        return Batch(data, indices, partial(self.tags, indices.tolist()))

    def collated(self, batch: Batch) -> Batch:
        """The batch with what `collate` makes of its items; as it is if there is no such function."""
        return batch

    def tag_bytes(self, start: int, stop: int) -> Array:
        """The tags of the sequences from `start` up to `stop` (exclusive) as UTF-8: numpy bytes of shape (stop - start,)."""
        import numpy

        return numpy.array([tag.encode("utf-8") for tag in self.tags(range(start, stop))], dtype=bytes)

    def file_bounds(self) -> Array:
        """The index of the first sequence of every file, then `num_sequences`: int64 of shape (files + 1,)."""
        import numpy

        return numpy.array([0, self.num_sequences], dtype=numpy.int64)

    def at_epoch(self, epoch: int) -> Dataset:
        """The dataset with the random numbers of an epoch (counted from 1).

        It shares files and processes with this dataset; close only this one.
        """
        return self

    def redrawn(self, draw: int) -> Dataset:
        """This dataset of an epoch with other random numbers, for sequences that the epoch had `draw` times before."""
        return self

    def selected(self, full_epoch: int) -> Array | None:
        """The indices of the sequences of a full epoch (counted from 1); None: all."""
        return None

    def how_read(self) -> str:
        """How the data is read, for the log; '' if there is nothing to say."""
        return ""

    def warnings(self) -> list[str]:
        """Messages about the data for the log, before the training starts."""
        return []


def _no_progress(what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
    return nullcontext(lambda number: None)


@dataclass(frozen=True)
class Scanning:
    """What the job provides to find the lengths of sequences by reading them.

    Attributes:
        folder: where the lengths are kept; None: nowhere.
        rank, size: of this process, and the number of ranks.
        progress: called with the name of the data and the number of sequences, if known; a context manager that returns a
            function to call with the number of sequences after every read.
        waiting: called now and then while another process reads.
        note: called with a line for the log.
        processes: how many processes this rank may start to read while the other ranks do the same.
        processes_alone: how many it may start while the other ranks wait for it.
        broken: counts the sequences that are found broken when the dataset is opened.
        seed: the job's `random_seed`, for random numbers of the user's code.
    """

    folder: Path | None = None
    rank: int = 0
    size: int = 1
    progress: Callable[[str, int | None], AbstractContextManager[Callable[[int], None]]] = _no_progress
    waiting: Callable[[], None] = lambda: None
    note: Callable[[str], None] = lambda line: None
    processes: int = 1
    processes_alone: int = 1
    broken: BrokenSequences = field(default_factory=lambda: BrokenSequences("data", 0))
    seed: int = 42


class SequenceSource(ABC):
    """Sequences in a given order, whose lengths are only known once they are read: to be converted to an HDF file.

    Attributes:
        labels: by data key, the names of the classes. Known once an epoch has begun, like `dims`.
        dims: by data key of sparse data, the number of classes.
    """

    labels: Mapping[str, Sequence[str]] = {}
    dims: Mapping[str, int] = {}

    @property
    def name(self) -> str:
        """The name of the class, for messages."""
        return type(self).__name__

    @abstractmethod
    def begin_epoch(self, epoch: int) -> int | None:
        """Begin an epoch (counted from 1). Returns the number of its sequences, or None if unknown. Raises: DataError."""

    @abstractmethod
    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        """The epoch's sequences from `start` up to `stop` (exclusive; None: to the last). Raises: DataError."""

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset | None:
        """The source as a dataset with known lengths; None if it cannot be one.

        Args:
            where: the config key, for messages.

        Raises:
            DataError: it cannot be read.
        """
        return None


Item = tuple[str, Mapping[str, Any]]
"""A sequence of a source: its tag, and its arrays by data key."""


def read_item(where: str, items: Any, index: int) -> Any:
    """Item `index` of the user's object; its exceptions say which item that is. Raises: DataError, for a StopIteration."""
    try:
        return items[index]
    except StopIteration as error:
        raise ended_iterator_error(f"{where}, item {index}", error) from error
    except BaseException as error:  # including SystemExit, which has no message
        error.add_note(f"(in item {index} of {where})")
        raise


def as_lengths(where: str, given: Any, size: int, of: str = "") -> Array:
    """The lengths of `size` items that the user gives, int32. Raises: DataError, if they are none.

    Args:
        of: what they are of, for messages.
    """
    import numpy

    try:
        lengths = numpy.asarray(given).astype(numpy.int32, casting="same_kind")
    except (TypeError, ValueError) as error:
        raise DataError(f"{where}: expected whole numbers in lengths{of}, got: {error}") from None
    if lengths.shape != (size,) or lengths.min(initial=0) < 0:
        raise DataError(
            f"{where}: expected {size} lengths{of}, none below 0, got an array of shape {lengths.shape}, from "
            f"{lengths.min(initial=0)} on"
        )
    return lengths


def ended_iterator_error(where: str, error: StopIteration) -> DataError:
    """The error for a StopIteration that escapes from the user's code: Python would take it for the end of the data.

    Args:
        where: the call, and its sequences.
    """
    frames = traceback.extract_tb(error.__traceback__)
    place = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return DataError(
        f"{where}: expected data, got a StopIteration{place}: an iterator on which it calls next() has ended (create it anew "
        "there, or use itertools.cycle)"
    )


def as_dataset(opened: Any) -> Dataset | None:
    """What a config's class or function returned, as a dataset; None if it does not provide the lengths of its sequences."""
    if isinstance(opened, Dataset):
        return opened
    required = ("streams", "lengths", "num_sequences", "sequence", "tags")
    return ForeignDataset(opened) if all(hasattr(opened, name) for name in required) else None


def is_map_style(value: Any) -> bool:
    """Whether a value is a map-style dataset: it has a length and returns item i. Dicts and strings are not."""
    streaming = sys.modules.get("torch.utils.data")
    if isinstance(value, (str, bytes, Mapping, type)) or (streaming and isinstance(value, streaming.IterableDataset)):
        return False
    return not _missing_methods(value)


def describe(value: Any) -> str:
    """A value that is not a dataset, for messages.

    >>> describe(5), describe({1, 2})
    ('int', 'set without __getitem__')
    """
    missing = _missing_methods(value)
    return f"{type(value).__name__} without {missing[0]}" if len(missing) == 1 else type(value).__name__


def _missing_methods(value: Any) -> list[str]:
    """The methods of a map-style dataset that a value does not have."""
    return [name for name in ("__len__", "__getitem__") if not hasattr(type(value), name)]


def as_source(where: str, opened: Any, convert: Callable[[int, Any], Item]) -> SequenceSource:
    """What a config's class or function returned, as a source to convert. Raises: DataError, if it cannot be iterated over.

    Args:
        where: the config key, for messages.
        convert: makes a sequence of an item that is not (tag, {data key: array}), given its number. Raises: DataError.
    """
    if isinstance(opened, SequenceSource):
        return opened
    if not hasattr(opened, "__iter__"):
        raise DataError(f"{where}: expected something that yields (tag, {{key: array}}), got {type(opened).__name__}")
    return ForeignSource(opened, convert)


class ForeignDataset(Dataset):
    """An object with the members of a `Dataset` whose class does not derive from it.

    It needs `streams`, `lengths`, `num_sequences`, `sequence` and `tags`. All other members are optional, methods or attributes.
    They may have their names of earlier releases: those of `EARLIER_NAMES`, `all_tags(start, stop)` for `tag_bytes`, and
    `group_bounds` for `file_bounds`.
    """

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.streams = inner.streams
        self.lengths = inner.lengths
        self.memory_mapped = frozenset(self._member("memory_mapped", "mapped") or ())
        self.is_stochastic = any(hasattr(inner, name) for name in ("at_epoch", "selected", "drawn"))
        self.is_stochastic |= bool(self._member("is_stochastic", "varies"))
        self.has_fixed_order = bool(self._member("has_fixed_order", "own_order"))
        self.reads_for_tags = bool(self._member("reads_for_tags"))
        self.window = self._member("window")
        self.reads_batches = any(hasattr(inner, name) for name in ("sequences", "padded", "packed"))

    @property
    def num_sequences(self) -> int:
        return int(self._inner.num_sequences)

    def sequence(self, index: int) -> dict[str, Array]:
        return self._inner.sequence(index)  # type: ignore[no-any-return]  # here and below: as the contract says

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._inner.tags(indices)  # type: ignore[no-any-return]

    def close(self) -> None:
        self._call(super().close, "close")

    def release(self) -> None:
        self._call(super().release, "release")

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        return self._call(super().sequences, "sequences", arguments=(indices,))

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self._call(super().padded, "padded", arguments=(indices,))

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        return self._call(super().packed, "packed", arguments=(indices, keys))

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._call(super().tag_bytes, "tag_bytes", "all_tags", arguments=(start, stop))

    def file_bounds(self) -> Array:
        return self._call(super().file_bounds, "file_bounds", "group_bounds")

    def at_epoch(self, epoch: int) -> Dataset:
        changed: Any = self._call(super().at_epoch, "at_epoch", arguments=(epoch,))
        return changed if isinstance(changed, Dataset) else ForeignDataset(changed)

    def selected(self, full_epoch: int) -> Array | None:
        return self._call(super().selected, "selected", "drawn", arguments=(full_epoch,))

    def how_read(self) -> str:
        return str(self._call(super().how_read, "how_read"))

    def warnings(self) -> list[str]:
        return self._call(super().warnings, "warnings")

    def _member(self, *names: str) -> Any:
        """What the object has under the first of these names that it has; None: it has none of them."""
        return next((getattr(self._inner, name) for name in names if hasattr(self._inner, name)), None)

    def _call(self, default: Callable[..., T], *names: str, arguments: tuple[Any, ...] = ()) -> T:
        """The result of the object's method or attribute; of the default if it has neither."""
        found = self._member(*names)
        found = default if found is None else found
        return found(*arguments) if callable(found) else found


class ForeignSource(SequenceSource):
    """Any iterable of (tag, {data key: array}), where arrays may be text, or of other items that can be converted; it may have
    `labels`, `dims` and `__len__`.
    """

    def __init__(self, inner: Iterable[Any], convert: Callable[[int, Any], Item]) -> None:
        self._inner = inner
        self._convert = convert
        self.labels = {name: list(labels) for name, labels in dict(getattr(inner, "labels", {})).items()}
        self.dims = dict(getattr(inner, "dims", {}))

    @property
    def name(self) -> str:
        return type(self._inner).__name__

    def begin_epoch(self, epoch: int) -> int | None:
        if epoch != 1:
            raise DataError(f"--epoch: expected 1 for {self.name}, which has no epochs, got {epoch}")
        return len(self._inner) if isinstance(self._inner, Sized) else None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        inner = self._inner
        if isinstance(inner, Sequence):  # looked up by number
            numbers = range(start, len(inner) if stop is None else min(stop, len(inner)))
            items: Iterator[Any] = (inner[number] for number in numbers)
        else:
            items = islice(inner, start, stop)
        for number, item in enumerate(items, start=start):
            is_sequence = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)
            yield item if is_sequence else self._convert(number, item)
