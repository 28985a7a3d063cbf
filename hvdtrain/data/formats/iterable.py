"""Iterables: generators, torch's IterableDataset, streams of Hugging Face, and anything else that yields items one by one.

The plan of an epoch needs all lengths, which an iterable only yields with its items. So it is read like the datasets of RETURNN
(streamed.py): once for its lengths, which are saved, then for training. Within windows of neighbours, sequences come in the
order that the config asks for.
"""

from __future__ import annotations

import inspect
import time
import traceback
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy

from hvdtrain.config.references import is_reference, resolve
from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource, ended_iterator_error
from hvdtrain.data.fingerprint import fingerprint_of
from hvdtrain.data.formats.item_form import ItemForm
from hvdtrain.data.formats.sequence_table import Question, ScannedSequences, Streamed
from hvdtrain.data.formats.streamed import AGAIN, SCAN_SECONDS, open_streamed
from hvdtrain.data.randomness import ITEM, mix_seed, seed_generators
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import ConfigError, DataError

WINDOW = 1000
"""The default number of neighbouring items that are ordered together."""


class IterableDataset(SequenceSource):
    """An iterable of items (like those of `ItemsDataset`), each a sequence, that can be iterated over again and again.

    Args:
        iterable: an object that can be iterated over more than once; or a function that returns an iterator, or the name of one.
            A function with an argument `epoch`, or an object with a method `set_epoch`, gets the number of the epoch (from 1).
        window: the number of neighbouring items within which `seq_ordering` puts them in order. A rank holds up to two windows.
        epoch_size: the number of items of an epoch; an epoch continues where the last one ended, and the iterable is restarted at
            its end. None: an epoch is all of the iterable.
        dims: by data key, the number of classes; default: the largest class of the first epoch plus 1.

    Raises:
        ConfigError: an argument is not as described here.
    """

    def __init__(
        self, iterable: Any, window: int = WINDOW, epoch_size: int | None = None, dims: Mapping[str, int] | None = None
    ) -> None:
        for name, value in {"window": window, "epoch_size": epoch_size}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError.of("out-of-range", f"{name}: expected a positive integer, got {value!r} in the IterableDataset")
        if isinstance(iterable, str) and is_reference(iterable):
            iterable = resolve(iterable)
        if not (callable(iterable) or is_iterable(iterable)) or isinstance(iterable, Iterator):
            raise ConfigError.of(
                "wrong-type",
                "iterable: expected something that can be iterated over more than once, or a function that returns an "
                f"iterator, got {type(iterable).__name__} in the IterableDataset",
            )
        self._iterable = iterable
        self._window = window
        self._epoch_size = epoch_size
        self.dims = dict(getattr(iterable, "dims", {})) | dict(dims or {})
        self.labels = {key: list(names) for key, names in dict(getattr(iterable, "labels", {})).items()}
        self._epoch = 1

    @property
    def name(self) -> str:
        named = self._iterable.func if isinstance(self._iterable, partial) else self._iterable
        return str(getattr(named, "__name__", type(named).__name__))

    def begin_epoch(self, epoch: int) -> int | None:
        self._epoch = epoch
        return None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        reading = self._reading("the iterable", Scanning().seed)
        for number, (tag, arrays) in enumerate(islice(reading.items(self._epoch), stop)):
            if number >= start:
                yield tag, arrays

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        refuse_batches(where, self._iterable)
        varies = self._epoch_size is not None or takes_epoch(self._iterable)
        made_of = [self._iterable, self._epoch_size, self.dims, self.labels]
        identity = fingerprint_of(made_of) if scanning.folder is not None else ""
        source = Streamed(
            partial(self._reading, where, scanning.seed),
            f"iterable {identity}",
            can_skip=False,
            constant=not varies,
            window=self._window,
            advice="seed its random numbers, with the epoch if it gets that",
        )
        return open_streamed(where, source, scanning)

    def _reading(self, where: str, seed: int) -> IterableReading:
        same = self._epoch_size is None and not takes_epoch(self._iterable)
        parts = self._iterator, self._window, self._epoch_size, self.dims, self.labels
        return IterableReading(where, self.name, *parts, seed, same_order=same)

    def _iterator(self, epoch: int) -> Iterator[Any]:
        """Start anew. `epoch` is the epoch, or counts the starts if an epoch is not all of the iterable."""
        if hasattr(self._iterable, "set_epoch"):
            self._iterable.set_epoch(epoch)
        if not callable(self._iterable) or is_iterable(self._iterable):
            return iter(self._iterable)
        return iter(self._iterable(epoch=epoch) if takes_epoch(self._iterable) else self._iterable())


class IterableReading:
    """The reading process of an iterable: a method for every question.

    Args:
        where: the config key, for messages.
        iterator: starts anew, given the number of the epoch, or of the start.
        window, epoch_size, dims, labels: as in `IterableDataset`.
        seed: of random numbers that the iterable draws from the process-wide generators; with the epoch and the item.
        same_order: whether all epochs have the same items in the same order: what the iterable draws before its first item, such
            as an order, is then the same in all of them.
    """

    def __init__(
        self,
        where: str,
        name: str,
        iterator: Callable[[int], Iterator[Any]],
        window: int,
        epoch_size: int | None,
        dims: Mapping[str, int],
        labels: Mapping[str, Sequence[str]],
        seed: int = 0,
        same_order: bool = False,
    ) -> None:
        self._where = where
        self._seed = seed
        self._same_order = same_order
        self._name = name
        self._iterator_of = iterator
        self._window = window
        self._epoch_size = epoch_size
        self._dims = dims
        self._labels = labels
        self._form = ItemForm(lambda number: f"{where}, item {number}")
        self._largest: dict[str, int] = {}
        self._iterator: Iterator[Any] | None = None
        self._latest: Iterator[Any] | None = None
        self._starts = 0  # how often the iterable has been started
        self._position = 0  # of the next item since its first start
        self._epoch = self._next = 0  # `_next`: the number of the next item of the epoch
        self._held: dict[int, Any] = {}

    def __call__(self, question: Question) -> Any:
        return getattr(self, question[0])(*question[1:])

    def items(self, epoch: int) -> Iterator[Item]:
        """The sequences of an epoch, one after the other. Raises: DataError."""
        self._begin(epoch)
        for number, item in enumerate(self._rest()):
            yield self._form.sequence(number, item)

    def about(self, epoch: int) -> tuple[str, int, Mapping[str, Stream]]:
        """As in `Reading`."""
        self._begin(epoch)
        first = next(self._rest(), END)
        if first is END:
            raise DataError(f"{self._where}: expected at least one item in epoch {epoch} of {self._name}, got none")
        self._form.sequence(0, first)
        return self._name, 1, self.streams()

    def streams(self) -> Mapping[str, Stream]:
        """The streams, with the largest classes seen so far."""
        return self._form.with_classes({**{key: most + 1 for key, most in self._largest.items()}, **self._dims}, self._labels)

    def scan(self, epoch: int, start: int, count: int) -> ScannedSequences:
        """As in `Reading`. The checksum is 0 for all items but the first ones, which are read again."""
        part = ScannedSequences([], {}, [], self._epoch_size, False)
        until = time.monotonic() + SCAN_SECONDS
        self._go_to(epoch, start)
        rest = self._rest()
        while len(part.tags) < count and (not part.tags or time.monotonic() < until):
            number = self._next
            for item in islice(rest, 1):
                tag, arrays = self._form.sequence(number, item)
                part.tags.append(tag)
                part.checksums.append(_checksum(tag, arrays) if number < AGAIN else 0)
                for key, values in arrays.items():
                    part.lengths.setdefault(key, []).append(len(values))
                    if self._form.streams[key].sparse and len(values):
                        self._largest[key] = max(self._largest.get(key, 0), int(values.max()))
            if self._next == number:
                return ScannedSequences(part.tags, part.lengths, part.checksums, part.total, True)
        return part

    def order(self, epoch: int) -> None:
        """Unknown for an iterable."""

    def all_tags(self) -> None:
        """Unknown for an iterable."""

    def matches(self, epoch: int, checksums: Mapping[int, int], skip: bool) -> bool:
        """Whether the first items of an epoch have these checksums when it begins again."""
        if skip:
            return False
        self._begin(epoch, anew=True)
        try:
            again = [self._form.sequence(number, item) for number, item in enumerate(islice(self._rest(), len(checksums)))]
        except DataError:
            return False
        return [_checksum(*item) for item in again] == [checksums[number] for number in sorted(checksums)]

    def read(self, epoch: int, numbers: Sequence[int], skip: bool) -> list[Item]:
        """Items of an epoch. The rest of their window is held for later questions. Raises: DataError."""
        first = min(numbers) // self._window * self._window
        if epoch != self._epoch or any(number < self._next and number not in self._held for number in numbers):
            self._go_to(epoch, first)
        self._held = {number: item for number, item in self._held.items() if number >= first}
        wanted = max(numbers) + 1 - self._next
        for item in islice(self._rest(), max(0, wanted)):
            if self._next > first:
                self._held[self._next - 1] = item
        for number in numbers:
            if number not in self._held:
                raise DataError(f"{self._where}: expected item {number} of epoch {epoch} of {self._name}, got only {self._next}")
        return [self._form.sequence(number, self._held[number]) for number in numbers]

    def has_more(self, epoch: int) -> bool:
        """Whether an item follows the last one that was read, if the epoch is all of the iterable."""
        if self._epoch_size is not None or epoch != self._epoch or self._iterator is None:
            return False
        if self._advance() is END:
            return False
        self._epoch = 0  # that item is consumed: the next question starts anew
        return True

    def skip(self, epoch: int, number: int) -> int:
        """As in `Reading`, up to the window of an item."""
        first = number // self._window * self._window
        if epoch != self._epoch or self._next > first:
            self._begin(epoch)
        until = time.monotonic() + SCAN_SECONDS
        rest = self._rest()
        while self._next < first and time.monotonic() < until:
            if not list(islice(rest, 1)):
                break
        return self._next

    def _begin(self, epoch: int, anew: bool = False) -> None:
        """Begin an epoch: by reading on if it lies ahead, unless `anew`, else from the start."""
        import multiprocessing  # here, so that `--help` does not import it

        # The iterable may start processes, as a DataLoader does, which Python denies to daemons of multiprocessing.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        start = 0 if self._epoch_size is None else (epoch - 1) * self._epoch_size
        if anew or self._epoch_size is None or self._iterator is None or self._position > start:
            self._iterator, self._starts, self._position = None, 0, 0
        self._epoch, self._next, self._held = epoch, 0, {}
        while self._position < start:
            if self._advance() is END:
                break

    def _go_to(self, epoch: int, number: int) -> None:
        """Read on, or start anew, until item `number` of an epoch is the next one."""
        if epoch != self._epoch or number < self._next:
            self._begin(epoch)
        for _ in islice(self._rest(), number - self._next):
            pass

    def _rest(self) -> Iterator[Any]:
        """The epoch's items from the next one on."""
        while self._epoch_size is None or self._next < self._epoch_size:
            item = self._advance()
            if item is END:
                return
            self._next += 1
            yield item

    def _advance(self) -> Any:
        """The next item, or `END`; unless an epoch is all of the iterable, it is restarted at its end."""
        for _ in range(2):
            epoch = 0 if self._epoch_size is not None or (self._same_order and self._position == 0) else self._epoch
            seed_generators(mix_seed(self._seed, ITEM, epoch, self._position))
            if self._iterator is None:
                self._starts += 1
                iterator = self._iterator_of(self._epoch if self._epoch_size is None else self._starts)
                if iterator is self._latest:
                    raise DataError(
                        f"{self._where}: expected a new iterator whenever {self._name} begins again, got the same "
                        f"{type(iterator).__name__}"
                    )
                self._iterator = self._latest = iterator
            try:
                item = next(self._iterator)
            except StopIteration as ended:
                if not is_end(ended):
                    where = f"{self._where}: item {self._next} of epoch {self._epoch} of {self._name}"
                    raise ended_iterator_error(where, ended) from ended
            except BaseException as error:
                error.add_note(f"in item {self._next} of epoch {self._epoch} of {self._name}, {self._where}")
                raise
            else:
                self._position += 1
                return item
            if self._epoch_size is None or self._position == 0:
                return END
            self._iterator = None
        return END


END: Any = object()
"""Stands for the item after the last one."""


def is_end(error: StopIteration) -> bool:
    """Whether a StopIteration that `next` raised is the end of the iterator itself, not of another one used inside it.

    An iterator ends in its `__next__`, which may be decorated, or in C. A StopIteration from elsewhere, such as a function that
    `map` calls or `__getitem__` of a DataLoader's dataset, does not end it.
    """
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:]]  # without that of the caller
    is_own = not frames or frames[0] == "__next__" or (frames[0] == "wrapper" and "__next__" in frames)
    return is_own and "__getitem__" not in frames


def is_iterable(value: Any) -> bool:
    """Whether a value of a config is an iterable to read, not a string, dict, list or class."""
    return hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes, Mapping, list, tuple, set, frozenset, type))


def refuse_batches(where: str, iterable: Any) -> None:
    """Raises: DataError, if an iterable is a DataLoader that makes batches."""
    if hasattr(iterable, "collate_fn") and getattr(iterable, "batch_size", None) is not None:
        raise DataError(
            f"{where}: expected items, got a {type(iterable).__name__} of batches (hvdtrain makes the batches: in place of it, "
            "give its dataset, with its collate_fn as the entry collate)"
        )


def needs_epoch(function: partial[Any]) -> bool:
    """Whether a config's function requires the number of the epoch, so that it must be called for each."""
    if not inspect.isroutine(function.func) or "epoch" in function.keywords:
        return False
    try:
        epoch = inspect.signature(function.func).parameters.get("epoch")
    except (TypeError, ValueError):  # a function in C
        return False
    return epoch is not None and epoch.default is inspect.Parameter.empty


def takes_epoch(source: Any) -> bool:
    """Whether an iterable, or a function that returns one, gets the epoch, so that its items may differ between epochs."""
    if is_iterable(source):
        return hasattr(source, "set_epoch")
    given = source.keywords if isinstance(source, partial) else {}
    try:
        return "epoch" in inspect.signature(source).parameters and "epoch" not in given
    except (TypeError, ValueError):  # a function in C
        return False


def _checksum(tag: str, arrays: Mapping[str, Array]) -> int:
    checksum = zlib.crc32(tag.encode("utf-8"))
    for key, values in sorted(arrays.items()):
        checksum = zlib.crc32(numpy.ascontiguousarray(values).tobytes(), zlib.crc32(key.encode("utf-8"), checksum))
    return checksum
