"""Datasets around others. What a view does not change is that of the dataset inside it, so that no view can forget a member."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.plan.mix import Mix
from hvdtrain.data.randomness import ALONE
from hvdtrain.data.types import Array, Batch, Padded, Stream

P = ParamSpec("P")
T = TypeVar("T")


class _Forwarded:
    """An attribute of the dataset inside, unless the view or its class sets another value."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, view: View, owner: type) -> Any:
        return getattr(view._dataset, self._name)


class _TrueOfAny(_Forwarded):
    """Whether it is true of any dataset inside."""

    def __get__(self, view: View, owner: type) -> Any:
        return any(getattr(dataset, self._name) for dataset in view._inside)


FORWARDED: Any = _Forwarded
OF_ANY: Any = _TrueOfAny


class View(Dataset):
    """A dataset with all members of the dataset inside it; a subclass overrides what it changes.

    A view that numbers its sequences in another way must override all members with indices: `num_sequences`, `lengths`, `tags`,
    `tag_bytes`, `file_bounds`, `selected`. A view that changes sequences derives from `ChangedSequences`.

    Args:
        dataset: the one inside.
        more_datasets: those that it reads, too.
    """

    streams: Mapping[str, Stream] = FORWARDED()
    lengths: Mapping[str, Array] = FORWARDED()
    memory_mapped: frozenset[str] = FORWARDED()
    is_stochastic: bool = OF_ANY()
    reads_for_tags: bool = FORWARDED()
    has_fixed_order: bool = FORWARDED()
    window: int | None = FORWARDED()
    reads_batches: bool = FORWARDED()
    mix: Mix | None = FORWARDED()
    collate: Callable[[list[Any]], Any] | None = FORWARDED()
    max_seqs: int | None = FORWARDED()

    def __init__(self, dataset: Dataset, more_datasets: Sequence[Dataset] = ()) -> None:
        self._dataset = dataset
        self._inside = (dataset, *more_datasets)

    @property
    def num_sequences(self) -> int:
        return self._dataset.num_sequences

    def at_epoch(self, epoch: int) -> Self:
        return self._around(dataset.at_epoch(epoch) for dataset in self._inside)

    def redrawn(self, draw: int) -> Self:
        return self._around(dataset.redrawn(draw) for dataset in self._inside)

    def _around(self, inside: Iterable[Dataset]) -> Self:
        """The same view of other datasets."""
        changed = copy(self)
        changed._inside = tuple(inside)
        changed._dataset = changed._inside[0]
        return changed

    def sequence(self, index: int) -> dict[str, Array]:
        return self._dataset.sequence(index)

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        return self._dataset.sequences(indices)

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self._dataset.padded(indices)

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        return self._dataset.packed(indices, keys)

    def collated(self, batch: Batch) -> Batch:
        return self._dataset.collated(batch)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(indices)

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._dataset.tag_bytes(start, stop)

    def file_bounds(self) -> Array:
        return self._dataset.file_bounds()

    def selected(self, full_epoch: int) -> Array | None:
        return self._dataset.selected(full_epoch)

    def how_read(self) -> str:
        return self._dataset.how_read()

    def warnings(self) -> list[str]:
        return [line for dataset in self._inside for line in dataset.warnings()]

    def close(self) -> None:
        for dataset in self._inside:
            dataset.close()

    def release(self) -> None:
        for dataset in self._inside:
            dataset.release()


class ChangedSequences(View):
    """A view whose sequences differ from those inside: every way to read them goes through `sequences`."""

    reads_batches = False

    @abstractmethod
    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]: ...

    def sequence(self, index: int) -> dict[str, Array]:
        return self.sequences([index])[0]

    def padded(self, indices: Array) -> dict[str, Padded]:
        return self._read_batch(indices, ())

    def packed(self, indices: Array, keys: Collection[str]) -> dict[str, Padded]:
        return self._read_batch(indices, keys)


class Redrawn(ChangedSequences):
    """A batch of sequences of which an epoch has some several times, each time with other random numbers.

    Args:
        draws: for every row of the batch, how often the epoch had its sequence before.
    """

    def __init__(self, dataset: Dataset, draws: Array) -> None:
        super().__init__(dataset)
        self._draws = draws

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        sequences: dict[int, dict[str, Array]] = {}
        for draw in set(self._draws.tolist()):
            rows = (self._draws == draw).nonzero()[0].tolist()
            sequences.update(zip(rows, self._dataset.redrawn(draw).sequences([indices[row] for row in rows]), strict=True))
        return [sequences[row] for row in range(len(indices))]


class PartsOfSequences(Dataset):
    """A dataset whose batches consist of parts of the sequences of another one.

    A sequence is read once for all of its parts in a batch, and in the next batch if it continues there.
    """

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._draws: Array | None = None
        self._latest: dict[tuple[int, int], dict[str, Array]] = {}

    def drawn(self, draws: Array | None) -> Self:
        """The dataset for a batch, given for every part how often the epoch had its sequence before; None: it does not matter."""
        changed = copy(self)
        changed._draws = draws
        return changed

    def whole(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """The sequence of every part of the batch. Raises: DataError."""
        draws = [0] * len(indices) if self._draws is None else self._draws.tolist()
        keys = list(zip(draws, indices, strict=True))
        new = [key for key in dict.fromkeys(keys) if key not in self._latest]
        around = Redrawn(self._dataset, numpy.array([draw for draw, _ in new])) if any(draws) else self._dataset
        read = dict(zip(new, around.sequences([index for _, index in new]) if new else [], strict=True))
        arrays = {key: read[key] if key in read else self._latest[key] for key in keys}
        self._latest.clear()
        self._latest.update(arrays)
        return [arrays[key] for key in keys]

    def close(self) -> None:
        self._dataset.close()


def _alone(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """The method, called by one thread at a time."""

    @wraps(method)
    def locked(view: OneAtATime, /, *args: P.args, **more: P.kwargs) -> T:
        view._acquire()
        try:
            return method(view, *args, **more)
        finally:
            view._lock.release()

    return locked


class OneAtATime(View):
    """A dataset that one thread at a time reads. Datasets and users' classes need not be made for more: a thread reads ahead,
    while the thread that trains asks for tags, which may have to be read, too.
    """

    def __init__(self, dataset: Dataset) -> None:
        super().__init__(dataset)
        self._lock = threading.RLock()

    def _acquire(self) -> None:
        if self._lock.acquire(blocking=False):
            return
        if threading.current_thread() is threading.main_thread():
            with ALONE.while_waiting():  # for the thread that reads, which may need the random generators for itself
                self._lock.acquire()
        else:
            self._lock.acquire()

    @_alone
    def collated(self, batch: Batch) -> Batch:
        collated = self._dataset.collated(batch)
        return (
            collated if collated.collate is None else replace(collated, collate=self.collated)
        )  # of its parts, too, if it is split

    at_epoch = _alone(View.at_epoch)
    redrawn = _alone(View.redrawn)
    sequence = _alone(View.sequence)
    sequences = _alone(View.sequences)
    padded = _alone(View.padded)
    packed = _alone(View.packed)
    tags = _alone(View.tags)
    tag_bytes = _alone(View.tag_bytes)
    selected = _alone(View.selected)
    close = _alone(View.close)
    release = _alone(View.release)
