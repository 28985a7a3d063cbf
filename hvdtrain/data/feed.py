"""The batches of a dataset for one rank, epoch by epoch, read ahead in the background."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Literal, Protocol, TypeVar

import numpy

from hvdtrain.data.broken import BrokenSequences, check_finite
from hvdtrain.data.combine.cache import Budget
from hvdtrain.data.dataset import Dataset, ended_iterator_error
from hvdtrain.data.expected import BatchCheck, Expected, source_of
from hvdtrain.data.files import Unchanged
from hvdtrain.data.identity import DatasetPart
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.bounds import BLOCK
from hvdtrain.data.plan.chunks import ChunkedDataset, Chunks, epoch_subset
from hvdtrain.data.plan.epoch import Plan, RankBatches
from hvdtrain.data.plan.frames import FrameDataset
from hvdtrain.data.plan.order_keys import OrderKeys, full_epoch, part_of
from hvdtrain.data.plan.shared import PlanInputs
from hvdtrain.data.randomness import ALONE
from hvdtrain.data.types import Array, Batch, BatchParts, UnlikeError
from hvdtrain.data.views import PartsOfSequences, Redrawn
from hvdtrain.errors import BrokenSequence, DataError, HvdtrainError

T = TypeVar("T")

SEED_STEP = 16127
"""The distance between the seeds of two neighbouring ranks under 'random_seed_offset'; RETURNN's number."""


FEW = 8


class ReadAhead(Generic[T]):
    """A context manager that reads ahead from an iterator in a background thread.

    The thread reads until there are enough values, and then waits until half of them are used: for small values, switching
    between two threads takes longer than reading. An exception of the iterator is raised in place of the value. Leaving the
    context stops the thread.

    Args:
        depth: how many values like the given one to read ahead.
        begin: called with every value by the consuming thread, one value ahead: for the next value before the current one is
            returned, if it has been read by then. Returns the value to use instead. None: values are returned unchanged.
    """

    def __init__(
        self, values: Iterable[T], depth: Callable[[T], int] = lambda _: FEW, begin: Callable[[T], T] | None = None
    ) -> None:
        self._values = values
        self._begin = begin
        self._depth_of = depth
        self._depth = 0  # for the last value
        self._ready: queue.SimpleQueue[tuple[str, T | BaseException | None]] = queue.SimpleQueue()
        self._has_room = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="read-ahead", daemon=True)

    def __enter__(self) -> Iterator[T]:
        self._thread.start()
        return self._take()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._has_room.set()
        self._thread.join()

    def _fill(self) -> None:
        try:
            for value in self._values:
                self._depth = self._depth_of(value)
                self._ready.put(("value", value))
                if self._ready.qsize() >= self._depth:
                    self._wait_for_room()
                if self._stop.is_set():
                    return
            self._ready.put(("end", None))
        except BaseException as error:
            self._ready.put(("error", error))

    def _wait_for_room(self) -> None:
        self._has_room.clear()
        if not self._is_half_empty() and not self._stop.is_set():  # neither has become true just before
            self._has_room.wait()

    def _is_half_empty(self) -> bool:
        return self._ready.qsize() <= self._depth // 2

    def _take(self) -> Iterator[T]:
        ahead: tuple[str, T | BaseException | None] | None = None  # the next value, after `begin`
        while True:
            kind, value = self._begin_value(self._next()) if ahead is None else ahead
            if kind == "error":
                raise value  # type: ignore[misc]  # it is a BaseException
            if kind == "end":
                return
            ahead = None
            if self._begin is not None and not self._ready.empty():
                ahead = self._begin_value(self._next())
            yield value  # type: ignore[misc]  # it is a T

    def _next(self) -> tuple[str, T | BaseException | None]:
        """The next value; waits for it."""
        if self._ready.empty():
            with ALONE.while_waiting():
                entry = self._ready.get()
        else:
            entry = self._ready.get()
        if not self._has_room.is_set() and self._is_half_empty():
            self._has_room.set()
        return entry

    def _begin_value(self, entry: tuple[str, T | BaseException | None]) -> tuple[str, T | BaseException | None]:
        kind, value = entry
        if kind == "value" and self._begin is not None:
            return kind, self._begin(value)  # type: ignore[arg-type]  # it is a T
        return entry


MANY = 64
SMALL = 4 << 20
"""How many batches to read ahead: `MANY` if so many have less than `SMALL` bytes together, at least `FEW`. Small steps take a
fifth longer if the thread that reads is woken for every four batches instead of 32."""


def ahead_of(batch: Batch) -> int:
    """How many batches like this one to read ahead."""
    arrays = [padded.values for padded in batch.data.values()]
    if any(values.dtype.hasobject for values in arrays):  # they may be large
        return FEW
    return max(FEW, min(MANY, SMALL // (1 + sum(values.nbytes for values in arrays))))


class Staging(Protocol):
    """How a learner prepares batches on their way from the reading thread to a step."""

    def pin(self, batch: Batch) -> Batch:
        """The batch in memory that a device can copy from by itself. Called by the reading thread."""
        ...

    def send(self, batch: Batch) -> Batch:
        """Start to copy a batch to the device. Called by the thread that trains, one batch ahead."""
        ...


@dataclass(frozen=True)
class Feed:
    """What one rank needs to read its share of a dataset.

    Attributes:
        distribution: 'shard': batch i of an epoch goes to rank i % size. 'random_seed_offset': every rank goes through all
            sequences, in a different order.
        subset: the indices of the sequences to use, ascending; None: all of them.
        chunks: the chunks of all sequences, if they are cut: batches then consist of chunks.
        files: the files that the dataset reads, which must not change during training.
        budget: the memory in which the dataset caches sequences.
        only: a plan to use instead of an epoch's; None: the epoch's.
        parts: the datasets that the dataset consists of, which identify its data.
        expected: the entries of `extern_data` by data key, which every batch is compared with.
        broken: the broken sequences that are left out of batches, up to a limit.
        made_for: the number of ranks that its batches are made for; None: `size`.
    """

    name: str
    dataset: Dataset
    order_keys: OrderKeys
    batch_keys: BatchKeys
    rank: int
    size: int
    distribution: Literal["shard", "random_seed_offset"] = "shard"
    subset: Array | None = None
    chunks: Chunks | None = None
    files: Unchanged | None = None
    budget: Budget | None = None
    only: Plan | None = None
    parts: Sequence[DatasetPart] = ()
    expected: Mapping[str, Expected] = field(default_factory=dict)
    broken: BrokenSequences = field(default_factory=lambda: BrokenSequences("data", 0))
    made_for: int | None = None

    @property
    def source(self) -> str:
        """The name, with the files if there are any."""
        return source_of(self.name, list(dict.fromkeys(path for part in self.parts for path in part.files)))

    @property
    def passes(self) -> int:
        """How often the ranks together go through the data in an epoch."""
        return 1 if self.distribution == "shard" else self.size

    def check_files(self) -> None:
        """Raises: DataError, if a data file has changed since the start."""
        if self.files is not None:
            self.files.check()

    @property
    def lengths(self) -> Mapping[str, Array]:
        """By data key, the number of frames of every sequence in the first epoch; of every chunk, if sequences are cut."""
        return self.lengths_in(1)

    def lengths_in(self, epoch: int) -> Mapping[str, Array]:
        """`lengths` in an epoch; they depend on it if `map_lengths` takes the epoch. Without data keys that batches leave out."""
        return self._of_batches(self.dataset.at_epoch(epoch).lengths if self.chunks is None else self.chunks.lengths)

    def _of_batches(self, lengths: Mapping[str, Array]) -> Mapping[str, Array]:
        """Lengths without the data keys that batches leave out."""
        return {name: lengths[name] for name in self.frame_keys} if self.batch_keys.frame_batches else lengths

    @property
    def frame_keys(self) -> list[str]:
        """The data keys in batches of frames: those that `extern_data` names, or all if it names none."""
        return [name for name in self.dataset.streams if name in self.expected] or list(self.dataset.streams)

    @property
    def packed_keys(self) -> tuple[str, ...]:
        """The data keys of batches without padding."""
        given, streams = self.batch_keys.packed, self.dataset.streams
        return tuple(name for name in streams if name in given) if isinstance(given, list) else tuple(streams) if given else ()

    def padding(self, plan: Plan, epoch: int) -> dict[str, float]:
        """By data key, the share of the frames in an epoch's batches that is padding."""
        packed = self.packed_keys
        return {name: 0.0 if name in packed else share for name, share in plan.padding(self.lengths_in(epoch)).items()}

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch (counted from 1). Raises: DataError, if a file changed since the start."""
        return self.inputs(epoch).plan() if self.only is None else self.only

    def plan_inputs(self, epoch: int) -> dict[str, str]:
        """By name, as text, the inputs of the batches of an epoch. Raises: DataError, if a file changed since the start."""
        if self.only is not None:
            return {}
        return {
            "ranks": str(self.made_for or self.size),
            "horovod_dataset_distribution": self.distribution,
            **self.inputs(epoch).as_text(),
        }

    def inputs(self, epoch: int) -> PlanInputs:
        """The inputs of the plan of an epoch. Raises: DataError, if a file changed since the start."""
        self.check_files()
        keys = self.order_keys
        if self.distribution == "random_seed_offset":
            keys = replace(keys, random_seed_offset=keys.random_seed_offset + self.rank * SEED_STEP)
        now = self.dataset.at_epoch(epoch)
        lengths, mix = now.lengths, self.dataset.mix
        if mix is not None and mix.by == "frames" and lengths is not self.dataset.lengths:
            raise DataError(
                f"{mix.where}.by: expected the same lengths in every epoch, got a map_lengths in {self.name} that takes the epoch"
            )
        if self.chunks is not None and lengths is not self.dataset.lengths:
            key = "chunking" if self.chunks.steps else "context_window"
            raise DataError(
                f"{key}: expected the same lengths in every epoch, got a map_lengths in {self.name} that takes the epoch"
            )
        return PlanInputs(
            self._of_batches(lengths),
            keys,
            self.batch_keys,
            epoch,
            subset=epoch_subset(self.dataset, self.subset, full_epoch(keys, epoch)),
            file_bounds=now.file_bounds(),
            chunks=self.chunks,
            window=now.window,
            mix=mix,
            lengths_of_order=self._lengths_of_order(keys, epoch, lengths),
        )

    def _lengths_of_order(self, keys: OrderKeys, epoch: int, lengths: Mapping[str, Array]) -> Mapping[str, Array] | None:
        """The lengths that order and choose an epoch's sequences, if they are not its own: those of all epochs that share out the
        sequences must be the same.
        """
        dataset = self.dataset
        if lengths is dataset.lengths or dataset.has_fixed_order:
            return None
        if dataset.mix is not None:
            return dataset.lengths
        first = epoch - part_of(keys, epoch)
        return None if first == epoch else self._of_batches(dataset.at_epoch(first).lengths)

    def num_sequences(self, plan: Plan) -> int:
        """The number of sequences in a plan, whether they are cut into chunks or not."""
        return self.sequences_among(plan.order)

    def sequences_among(self, indices: Array) -> int:
        """The number of sequences among indices of a plan; if sequences are cut, the number of first chunks, or pieces."""
        if indices.ndim == 2:
            return int((indices[:, 1] == 0).sum())
        if self.chunks is None:
            return len(indices)
        parts = (indices[i : i + BLOCK] for i in range(0, len(indices), BLOCK))
        return sum(int((self.chunks.numbers[part] == 0).sum()) for part in parts)

    def sequences_of(self, indices: Array) -> Array:
        """The sequence of each of a plan's indices, which may be chunks or pieces of sequences."""
        if indices.ndim == 2:
            return indices[:, 0]
        return indices if self.chunks is None else self.chunks.sequences[indices]

    def rank_batches(self, plan: Plan, position: int = 0) -> Sequence[Array]:
        """This rank's batches of a plan, as indices of sequences (or of chunks), or as pieces.

        Args:
            position: the number of batches to skip at the beginning of the plan: those that all ranks together have done, or this
                rank alone under 'random_seed_offset'.
        """
        rank, size = (self.rank, self.size) if self.distribution == "shard" else (0, 1)
        return plan.rank_batches(rank, size, position)

    def read(self, batches: Sequence[Array], epoch: int, staging: Staging | None = None) -> ReadAhead[Batch]:
        """Batches of a plan with the arrays of an epoch, read in the background.

        Args:
            staging: the learner's; None: batches are not copied to a device ahead.

        A batch that does not match the plan, the dataset or the config is raised as a DataError.
        """
        dataset = self.dataset.at_epoch(epoch)
        if self.chunks is not None:
            dataset = ChunkedDataset(dataset, self.chunks)
        if self.batch_keys.frame_batches:
            dataset = FrameDataset(dataset, self.frame_keys)
        from_files = bool(self.parts) and all(part.files for part in self.parts) and not self.dataset.is_stochastic
        check = BatchCheck(self.name, dataset, self.lengths_in(epoch), self.parts, self.expected, from_files)
        mix = self.dataset.mix

        # A generator: it turns a StopIteration of the user's code into an error, where `map` would silently stop.
        def arrays() -> Iterator[Batch]:
            for number, indices in enumerate(batches):
                try:
                    draws = batches.draws(number) if isinstance(batches, RankBatches) and self.dataset.is_stochastic else None
                    batch = self._read_batch(dataset, check, indices, draws)
                    if mix is not None:
                        batch = replace(batch, parts=BatchParts(mix.names, mix.parts_of(batch.indices)))
                    if len(batch.indices):
                        batch = dataset.collated(batch)
                except StopIteration as error:
                    raise ended_iterator_error(f"{self.name}, sequences {_some(indices)}", error) from error
                except UnlikeError as error:
                    raise DataError(f"{self.name}: {error}") from None
                except HvdtrainError:
                    raise
                except BaseException as error:
                    error.add_note(f"in a batch of {self.name}, sequences {_some(indices)}")
                    raise
                yield batch if staging is None else staging.pin(batch)

        return ReadAhead(arrays(), depth=ahead_of, begin=None if staging is None else staging.send)

    def _read_batch(self, dataset: Dataset, check: BatchCheck, indices: Array, draws: Array | None) -> Batch:
        """The batch with these indices, without broken sequences if that is allowed. Raises: DataError.

        Args:
            draws: how often the epoch has each of these sequences before; None: it does not matter.
        """
        packed = self.packed_keys

        def read(rows: slice | Array) -> Batch:
            around = dataset
            if draws is not None and draws[rows].any():
                again = draws[rows]
                around = dataset.drawn(again) if isinstance(dataset, PartsOfSequences) else Redrawn(dataset, again)
            batch = around.batch(indices[rows], packed)
            if self.broken.limit:
                check_finite(batch)
            return batch

        try:
            return check(read(slice(None)), indices)
        except BrokenSequence as error:
            if not self.broken.limit:
                raise BrokenSequence(
                    f"{self.name}: {error} (skip_broken = N lets a training continue without N of them)"
                ) from None
        good, broken = numpy.ones(len(indices), bool), []
        for place, sequence in enumerate(self.sequences_of(indices).tolist()):
            try:
                read(slice(place, place + 1))
            except BrokenSequence as error:
                good[place] = False
                broken.append((sequence, str(error)))
        some, left_out = indices[good], self.sequences_among(indices[~good])
        batch = check(read(good), some) if len(some) else Batch({}, self.sequences_of(some))
        return replace(batch, broken=broken, left_out=left_out)


FEW_TAGS = 5
"""How many tags of a batch a message lists."""


def _some(indices: Array) -> str:
    few = indices[:FEW_TAGS] if indices.ndim == 1 else indices[:FEW_TAGS, 0]
    return ", ".join(map(str, few.tolist())) + (", ..." if len(indices) > FEW_TAGS else "")


def check_files(feeds: Iterable[Feed]) -> None:
    """Raises: DataError, if a data file of a feed has changed since the start."""
    for feed in feeds:
        feed.check_files()
