"""Datasets that run the user's code for each sequence: who reads them, so that their random numbers are the same in every run."""

from __future__ import annotations

import time
import zlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from types import FunctionType
from typing import Any, Self, TypeVar

from hvdtrain.data.combine.workers import Workers
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.foreign import ForeignDataset
from hvdtrain.data.formats.items import ItemsDataset
from hvdtrain.data.formats.objects import ObjectsDataset, collate_items
from hvdtrain.data.held_generators import Generators
from hvdtrain.data.process_generators import Look
from hvdtrain.data.randomness import ALONE, COLLATE, EPOCH, ITEM, mix_seed, own_numbers
from hvdtrain.data.types import Array, Batch, Padded
from hvdtrain.data.views import ChangedSequences

T = TypeVar("T")

RUN_SECONDS = 0.001
"""How long sequences are read between two looks at the generators, which take some microseconds."""

TRIES = 13
"""How often sequences are read because somebody drew meanwhile, most likely a step. After each time, twice as long is waited for
the thread that trains to need data: half a millisecond, then up to two seconds."""

Question = tuple[str, int, int, int, Any]
"""The method to call, the epoch, how often it had the sequence before, the index of the sequence, and its arrays before a
function is applied; None: not read yet."""


class Mapped(ChangedSequences):
    """A dataset that applies the user's function to the sequences of another one."""

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        return [self.map(index, arrays) for index, arrays in zip(indices, self.sequences_inside(indices), strict=True)]

    def sequences_inside(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Sequences of the dataset inside. Raises: DataError."""
        return self._dataset.sequences(indices)

    @abstractmethod
    def map(self, index: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """A sequence, made of the arrays of the dataset inside. Raises: DataError."""


class UserDataset(ChangedSequences):
    """A dataset that runs the user's code. Random numbers that the code draws for a sequence, from the process-wide generators of
    Python, numpy or PyTorch or those that it holds itself (`Generators`), depend on the seed, the epoch and the index of the
    sequence alone.

    Each step of a training seeds and uses the same generators, in another thread. So code that draws is run by a process of its
    own, which seeds them for every sequence. Code that draws nothing is run where it is called, with a look at the generators:
    what was read while somebody drew is read again. If only the code can have drawn, it draws.

    Args:
        where: the config key of the dataset, for messages. The numbers differ between datasets inside the same one.
        num_workers: the number of processes that read from the beginning; 0: none, unless the code draws.
        seed: a seed besides the one of the job.
    """

    def __init__(self, where: str, dataset: Dataset, scanning: Scanning, num_workers: int = 0, seed: int = 0) -> None:
        super().__init__(dataset)
        self._where = where
        self._generators = Generators(dataset)
        self._parts = scanning.seed, ITEM, zlib.crc32(where.partition(".")[2].encode()), seed
        self._epoch = 1
        self._draw = 0
        latest = lru_cache(maxsize=1)(self.at_epoch)  # in each process, once per epoch instead of for every sequence
        redrawn = lru_cache(maxsize=8)(lambda epoch, draw: latest(epoch).redrawn(draw))
        self._shared = _Processes(lambda asked: redrawn(asked[1], asked[2])._answer(asked[0], *asked[3:]), num_workers)
        self._note = scanning.note
        self.reads_batches = _reads_batches(dataset)
        if num_workers:
            self._shared.start()
        elif isinstance(dataset, ItemsDataset) and dataset.draws:
            self._shared.draws = True

    @property
    def is_stochastic(self) -> bool:  # type: ignore[override]  # known for sure only when all sequences have been read
        return self._shared.draws or super().is_stochastic

    def at_epoch(self, epoch: int) -> Self:
        with own_numbers(*self._parts, EPOCH, epoch):
            changed = super().at_epoch(epoch)
        changed._epoch = epoch
        changed._generators = Generators(changed._dataset)
        return changed

    def redrawn(self, draw: int) -> Self:
        changed = super().redrawn(draw)
        changed._draw = draw
        return changed

    def selected(self, full_epoch: int) -> Array | None:
        with own_numbers(*self._parts, EPOCH, full_epoch):
            return super().selected(full_epoch)

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        if ALONE.has_them:
            return [self._answer("sequence", index, None) for index in indices]
        if self._shared.draws:
            return self._ask("sequence", indices)
        inside: Sequence[Any] = [None] * len(indices)
        if isinstance(self._dataset, Mapped):
            inside = self._dataset.sequences_inside(indices)  # another dataset's code, which may draw itself
        arrays: list[dict[str, Array]] = []
        while len(arrays) < len(indices):
            some = self._undrawn(partial(self._run, indices[len(arrays) :], inside[len(arrays) :]))
            if some is None:
                self._shared.draws = True
                return self._ask("sequence", indices)
            arrays += some
        return arrays

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self._batch(partial(self._dataset.padded, indices)) or super().padded(indices)

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        return self._batch(partial(self._dataset.packed, indices, keys)) or super().packed(indices, keys)

    def tags(self, indices: Sequence[int]) -> list[str]:
        if not self.reads_for_tags or ALONE.has_them:
            return self._dataset.tags(indices)
        tags = None if self._shared.draws else self._undrawn(partial(self._dataset.tags, indices))
        if tags is None:
            self._shared.draws = True
            return self._ask("tag", indices)
        return tags

    def collated(self, batch: Batch) -> Batch:
        if self.collate is None or ALONE.has_them:
            return self._dataset.collated(batch)
        if not self._shared.collate_draws:
            collated = self._undrawn(partial(self._dataset.collated, batch))
            if collated is not None:
                return collated
            self._shared.collate_draws = True
        items = batch.data[next(iter(batch.data))].values
        [tree] = self._shared.ask([("collate", self._epoch, self._draw, int(batch.indices[0]), items)])
        return replace(batch, tree=tree, collate=self.collated)

    def tag_bytes(self, start: int, stop: int) -> Array:
        return Dataset.tag_bytes(self, start, stop) if self.reads_for_tags else super().tag_bytes(start, stop)

    def close(self) -> None:
        self._shared.close()
        super().close()

    def how_read(self) -> str:
        how = self._dataset.how_read()
        count = self._shared.num_workers
        by = f"in {count} worker processes" if count else "in a process of its own, as its items are random"
        return " ".join([how, by] if how else ["read", by]) if self._shared.draws else how

    def _run(self, indices: Sequence[int], inside: Sequence[Any]) -> list[dict[str, Array]]:
        """The first of some sequences, for a short time."""
        until = time.perf_counter() + RUN_SECONDS
        sequences = []
        for index, arrays in zip(indices, inside, strict=True):
            sequences.append(self._read(index, arrays))
            if time.perf_counter() > until:
                break
        return sequences

    def _batch(self, read: Callable[[], T]) -> T | None:
        """What the user's own method for batches returns; None: sequences must be read one by one."""
        if not self.reads_batches or self._shared.draws or ALONE.has_them:
            return None
        result = self._undrawn(read)
        self._shared.draws = result is None
        return result

    def _undrawn(self, read: Callable[[], T]) -> T | None:
        """What is read, with no random number drawn in the same time; None: the code that reads draws."""
        for tries in range(TRIES):
            turn = ALONE.turn()
            with Look() as look:
                before = self._generators.held_states()
                result = read()
                if not look.has_drawn() and self._generators.held_states() == before:
                    return result
            if turn is not None and turn == ALONE.turn():
                break
            ALONE.wait(0.0005 * 2**tries)
        late = " (steps that ran meanwhile and draw from the same generator may differ in another run)" if tries else ""
        self._note(
            f"{self._where}: reading draws random numbers: from now on a process of its own reads, seeded for each sequence{late}"
        )
        return None

    def _ask(self, question: str, indices: Sequence[int]) -> list[Any]:
        """The answers of the processes to a question about each sequence."""
        inside: Sequence[Any] = [None] * len(indices)
        if question == "sequence" and self.has_fixed_order and isinstance(self._dataset, Mapped):
            inside = self._dataset.sequences_inside(indices)  # by the process that reads it from beginning to end
        return self._shared.ask(
            [(question, self._epoch, self._draw, index, arrays) for index, arrays in zip(indices, inside, strict=True)]
        )

    def _answer(self, question: str, index: int, inside: Any) -> Any:
        """In such a process: the sequence, or its tag, read with its own random numbers."""
        more = [COLLATE] if question == "collate" else []
        seed = mix_seed(*self._parts, self._epoch, index, *([self._draw] if self._draw else []), *more)
        self._generators.seed(seed)
        if question == "tag":
            return self._dataset.tags([index])[0]
        if question == "collate":
            return None if self.collate is None else collate_items(self._where, self.collate, inside)
        return self._read(index, inside)

    def _read(self, index: int, inside: Any) -> dict[str, Array]:
        if inside is None or not isinstance(self._dataset, Mapped):
            return self._dataset.sequence(index)
        return self._dataset.map(index, inside)


class _Processes:
    """The processes that read a dataset in all its epochs.

    Those of `num_workers` are started when the dataset is opened. One that is needed as the code draws is started in each epoch
    anew, so that it has what callbacks have changed in the user's objects.
    """

    def __init__(self, work: Callable[[Question], Any], num_workers: int) -> None:
        self.num_workers = num_workers
        self.draws = num_workers > 0
        self.collate_draws = False
        self._epoch: int | None = None
        self._workers: Workers[Question] = Workers(max(1, num_workers), work)

    def start(self) -> None:
        self._workers.start()

    def ask(self, questions: list[Question]) -> list[Any]:
        if questions and not self.num_workers and self._epoch != questions[0][1]:
            self._workers.close()
            self._workers.start()
            self._epoch = questions[0][1]
        if questions and questions[0][-1] is not None:  # large ones, which a process must have taken before it answers
            return [self._workers.results([question])[0] for question in questions]
        return self._workers.results(questions)

    def close(self) -> None:
        self._workers.close()
        self._epoch = None


def _reads_batches(dataset: Dataset) -> bool:
    """Whether the user's class defines how several sequences are read at once."""
    if isinstance(dataset, ForeignDataset):
        return dataset.reads_batches

    def place(name: str) -> int:
        return next(number for number, kind in enumerate(type(dataset).__mro__) if name in vars(kind))

    # A class that only overrides `sequence` of one with batches is read by that.
    return not _is_ours(type(dataset)) and any(place(name) <= place("sequence") for name in ("sequences", "padded", "packed"))


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith("hvdtrain.")


def with_own_numbers(where: str, dataset: Dataset, scanning: Scanning) -> Dataset:
    """The dataset, in a `UserDataset` if it runs the user's code for each sequence."""
    if isinstance(dataset, ItemsDataset):
        runs_code = isinstance(getattr(dataset.kind, "__getitem__", None), FunctionType)
    else:
        runs_code = isinstance(dataset, ForeignDataset) or not _is_ours(type(dataset))
    if isinstance(dataset, ObjectsDataset):
        return UserDataset(where, dataset, scanning, dataset.num_workers)
    return UserDataset(where, dataset, scanning) if runs_code else dataset
