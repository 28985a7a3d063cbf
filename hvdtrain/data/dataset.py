"""The contracts of data: a dataset, a source that is converted to one, and the keys of a kind of dataset.

Classes of the package derive from `Dataset`, `SequenceSource` and `DatasetKeys`, whose members all have typed defaults. A user's
class that does not is adapted once, when it is opened (foreign.py); no other code checks for members.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
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
        streams = self.streams

        def describe(name: str, row: int) -> str:
            return f"sequence {self.tags([int(indices[row])])[0]!r}, data key {name!r}"

        import numpy

        from hvdtrain.data.padding import pack, pad  # here, as numpy: `--help` imports the kinds of datasets without numpy

        batch: dict[str, Padded] = {}
        for name, stream in streams.items():
            column = [sequence[name] for sequence in sequences]
            if stream.holds_items:
                batch[name] = Items(numpy.concatenate(column)[:, None], self.lengths[name][indices])
            else:
                batch[name] = (pack if name in packed else pad)(column, partial(describe, name))
        return batch

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


def _no_progress(name: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
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


def as_lengths(where: str, values: Any, size: int, of: str = "") -> Array:
    """The lengths of `size` items that the user gives, int32. Raises: DataError, if they are none.

    Args:
        of: what they are of, for messages.
    """
    import numpy

    try:
        lengths = numpy.asarray(values)
        if lengths.size and lengths.max() >= 2**31:
            raise ValueError(f"{lengths.max()}, which is not below 2**31")
        lengths = lengths.astype(numpy.int32, casting="same_kind")
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
    line_text = f" in {frames[-1].filename}, line {frames[-1].lineno}" if frames else ""
    return DataError(
        f"{where}: expected data, got a StopIteration{line_text}: an iterator on which it calls next() has ended (create it anew "
        "there, or use itertools.cycle)"
    )


@dataclass(frozen=True)
class DatasetPart:
    """A dataset without others inside it, and the files that it reads.

    Attributes:
        name: the key of its dict in the config.
    """

    name: str
    dataset: Dataset
    files: tuple[str, ...] = ()

    @property
    def bounds(self) -> list[int]:
        """As in `Dataset.file_bounds`."""
        return [int(bound) for bound in self.dataset.file_bounds()]

    def file_of(self, index: int) -> str | None:
        """The file that contains a sequence; None if unknown."""
        bounds = self.bounds
        return self.files[bisect_right(bounds, index) - 1] if len(bounds) == len(self.files) + 1 else None
