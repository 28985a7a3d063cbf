"""The process that reads a source from beginning to end, and answers questions about it."""

from __future__ import annotations

import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hvdtrain.data.dataset import Item
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError

Question = tuple[Any, ...]
"""The name of a method of the reading process, and its arguments."""

AGAIN = 4
"""The number of sequences that are read again, to see whether they are the same."""

SCAN_SECONDS = 0.5
"""How long the reading process reads between two reports of progress."""

END: Any = object()
"""Stands for the item after the last one."""


@dataclass(frozen=True)
class ScannedSequences:
    """Consecutive sequences of an epoch, without their data.

    Attributes:
        lengths: by data key.
        checksums: of tag and data; 0 of those that are not read again.
        total: the number of sequences of the epoch, if known.
        ended: whether the epoch has no more sequences.
    """

    tags: list[str]
    lengths: dict[str, list[int]]
    checksums: list[int]
    total: int | None = None
    ended: bool = False


class StreamReading(ABC):
    """A source that is read from beginning to end: in its reading process, a method for every question. A subclass begins epochs,
    and returns what they have, one item after the other.

    Attributes:
        where: the config key, for messages.
        name: of the source.
        num_sub_epochs: after how many epochs it is back at its first sequences.
        window: the number of neighbouring items that are ordered together, and held for later questions; None: they stay in the
            order of the source.
        can_skip: whether it may be possible to read an item without those before it.
        constant: whether all epochs have the same sequences, so that the lengths of the first one apply to all.
        advice: what to do if the source does not repeat itself.
    """

    where: str
    name: str
    num_sub_epochs = 1
    window: int | None = None
    can_skip = False
    constant = False
    advice = "seed the random numbers of its functions by their rng"

    def __init__(self) -> None:
        self._epoch = self._next = 0  # `_next`: the number of the next item of the epoch
        self._has_ended = False
        self._held: dict[int, Any] = {}

    def __call__(self, question: Question) -> Any:
        return getattr(self, question[0])(*question[1:])

    @abstractmethod
    def begin(self, epoch: int, anew: bool) -> None:
        """Begin an epoch, possibly again; `anew`: as it would be in another process. Raises: DataError."""

    @abstractmethod
    def take(self, number: int) -> Any:
        """The item with this number, the next one if it cannot skip; `END` after the last one. Raises: DataError."""

    @abstractmethod
    def sequence(self, number: int, item: Any) -> Item:
        """An item as a sequence. Raises: DataError."""

    def total(self) -> int | None:
        """The number of sequences of the epoch, if known."""
        return None

    @abstractmethod
    def streams(self) -> Mapping[str, Stream]:
        """The streams, as far as the items that were read show them."""

    def seen(self, arrays: Mapping[str, Array]) -> None:  # noqa: B027
        """Note something about a sequence while its length is found."""

    def forget(self) -> None:  # noqa: B027
        """Open the source again for the next question."""

    def order(self, epoch: int) -> tuple[Array, int] | None:
        """The epoch's sequences as indices in the whole corpus, if they are known before they are read, with a checksum of the
        tags of the corpus, which may differ from epoch to epoch."""
        return None

    def all_tags(self) -> Array | None:
        """The tags of the whole corpus as UTF-8, if they are known."""
        return None

    def scan(self, epoch: int, start: int, count: int) -> ScannedSequences:
        """Read up to `count` sequences from `start` on, for not much longer than `SCAN_SECONDS`."""
        scanned = ScannedSequences([], {}, [])
        until = time.monotonic() + SCAN_SECONDS
        self._go_to(epoch, start)
        while len(scanned.tags) < count and (not scanned.tags or time.monotonic() < until):
            number = self._next
            if (item := self._advance()) is END:
                return replace(scanned, ended=True)
            tag, arrays = self.sequence(number, item)
            scanned.tags.append(tag)
            scanned.checksums.append(_checksum(tag, arrays) if number < AGAIN or self.can_skip else 0)
            for key, values in arrays.items():
                scanned.lengths.setdefault(key, []).append(len(values))
            self.seen(arrays)
        return replace(scanned, total=self.total())

    def matches(self, epoch: int, checksums: Mapping[int, int], skip: bool) -> bool:
        """Whether sequences of an epoch have these checksums when it begins again.

        Args:
            skip: whether to read them without those before them.
        """
        self._begin(epoch, anew=True)
        try:
            for number, expected in sorted(checksums.items()):
                self._go_to(epoch, number, skip)
                item = self._advance()
                if item is END or _checksum(*self.sequence(number, item)) != expected:
                    return False
            return True
        except DataError:
            if not self.can_skip:
                raise
            self.forget()  # skipping may have left it in any state
            return False
        finally:
            self._epoch = 0

    def read(self, epoch: int, numbers: Sequence[int], skip: bool) -> list[Item]:
        """Items of an epoch. Unless `skip`, reads all items before them and in between, too. Raises: DataError."""
        first = self._window_of(min(numbers))
        if epoch != self._epoch or any(number < self._next and number not in self._held for number in numbers):
            self._go_to(epoch, first, skip)
        self._held = {number: item for number, item in self._held.items() if number >= first}
        for number in sorted(set(numbers) - self._held.keys()):
            while self._next <= number:
                self._next = number if skip else self._next
                if (item := self._advance()) is END:
                    raise DataError(
                        f"{self.where}: expected item {number} of epoch {epoch} of {self.name}, got only {self._next}"
                    )
                if self._next > first:
                    self._held[self._next - 1] = item
        return [self.sequence(number, self._held[number]) for number in numbers]

    def skip(self, epoch: int, number: int) -> int:
        """Read on towards the window of an item, for not much longer than `SCAN_SECONDS`. Returns the number of the next one."""
        first = self._window_of(number)
        if epoch != self._epoch or self._next > first:
            self._begin(epoch)
        until = time.monotonic() + SCAN_SECONDS
        while self._next < first and time.monotonic() < until and self._advance() is not END:
            pass
        return self._next

    def _window_of(self, number: int) -> int:
        """The number of the first item in the window of another one."""
        return number - number % (self.window or 1)

    def _begin(self, epoch: int, anew: bool = False) -> None:
        import multiprocessing  # here, so that `--help` does not import it

        # The source may start processes, as a DataLoader does, which Python denies to daemons of multiprocessing.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        self._epoch = 0
        self._next = 0
        self._has_ended = False
        self._held = {}
        self.begin(epoch, anew)
        self._epoch = epoch

    def _go_to(self, epoch: int, number: int, skip: bool = False) -> None:
        """Read on, or begin again, until item `number` of an epoch is the next one."""
        if epoch != self._epoch or number < self._next:
            self._begin(epoch)
        self._next = number if skip else self._next
        while self._next < number and self._advance() is not END:
            pass

    def _advance(self) -> Any:
        item = END if self._has_ended else self.take(self._next)
        self._has_ended = item is END
        self._next += item is not END
        return item


def _checksum(tag: str, arrays: Mapping[str, Array]) -> int:
    checksum = zlib.crc32(tag.encode("utf-8"))
    for key, values in sorted(arrays.items()):
        data = repr(values.tolist()).encode() if values.dtype == object else numpy.ascontiguousarray(values).tobytes()
        checksum = zlib.crc32(data, zlib.crc32(key.encode("utf-8"), checksum))
    return checksum
