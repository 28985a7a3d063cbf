"""Iterables: generators, torch's IterableDataset, streams of Hugging Face, and whatever else yields items one after the other.

The plan of an epoch needs all lengths, and an iterable tells them only when it is read. So it is read as the datasets of RETURNN
are (streamed.py): once for its lengths, which are kept, then for training. Within windows of neighbours, sequences come in
the order that the config asks for.
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

from hvdtrain.config.source import is_reference, resolve
from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource, iterator_ended
from hvdtrain.data.formats.found_lengths import identity_of
from hvdtrain.data.formats.items import ItemForm
from hvdtrain.data.formats.returnn_reading import SCAN_SECONDS, Question, ScannedSequences
from hvdtrain.data.formats.streamed import AGAIN, Streamed, open_streamed
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import ConfigError, DataError

WINDOW = 1000
"""The default number of neighbouring items that are put in order together."""


class IterableDataset(SequenceSource):
    """What yields items (as those of `ItemsDataset`), each a sequence, whenever it is iterated over anew.

    Args:
        iterable: an object that can be iterated over more than once; or a function that returns an iterator, or the name of one.
            A function with an argument `epoch`, or an object with a method `set_epoch`, gets the number of the epoch (from 1).
        window: the number of neighbouring items within which `seq_ordering` puts them in order. A rank holds up to two windows.
        epoch_size: the number of items of an epoch; an epoch goes on where the last one ended, and the iterable begins again
            when it has ended. None: an epoch is all of the iterable.
        dims: by data key, the number of classes; else it is the largest class of the first epoch plus 1.

    Raises:
        ConfigError: an argument is not as described here.
    """

    def __init__(
        self, iterable: Any, window: int = WINDOW, epoch_size: int | None = None, dims: Mapping[str, int] | None = None
    ) -> None:
        for name, value in {"window": window, "epoch_size": epoch_size}.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError.of("out-of-range", f"{name}: expected a positive integer, got {value!r} in the IterableDataset")
        made = resolve(iterable) if isinstance(iterable, str) and is_reference(iterable) else iterable
        if not (callable(made) or is_iterable(made)) or isinstance(made, Iterator):
            raise ConfigError.of(
                "wrong-type",
                "iterable: expected something that can be iterated over more than once, or a function that returns an "
                f"iterator, got {type(made).__name__} in the IterableDataset",
            )
        self._made = made
        self._window = window
        self._epoch_size = epoch_size
        self.dims = dict(getattr(made, "dims", {})) | dict(dims or {})
        self.labels = {key: list(names) for key, names in dict(getattr(made, "labels", {})).items()}
        self._epoch = 1

    @property
    def name(self) -> str:
        made = self._made.func if isinstance(self._made, partial) else self._made
        return str(getattr(made, "__name__", type(made).__name__))

    def begin_epoch(self, epoch: int) -> int | None:
        self._epoch = epoch
        return None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        reading = self._reading("the iterable")
        for number, (tag, arrays) in enumerate(islice(reading.items(self._epoch), stop)):
            if number >= start:
                yield tag, arrays

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        refuse_batches(where, self._made)
        varies = self._epoch_size is not None or takes_epoch(self._made)
        code = getattr(type(self._made), "__iter__", None)
        identity = identity_of([self._made, code, self._epoch_size, self.dims, self.labels])
        source = Streamed(
            partial(self._reading, where),
            f"iterable {identity}",
            can_skip=False,
            constant=not varies,
            window=self._window,
            advice="seed its random numbers, by the epoch if it is told that",
        )
        return open_streamed(where, source, scanning)

    def _reading(self, where: str) -> IterableReading:
        return IterableReading(where, self.name, self._iterator, self._window, self._epoch_size, self.dims, self.labels)

    def _iterator(self, epoch: int) -> Iterator[Any]:
        """Begin anew; `epoch` is the number of the times, if an epoch is not all of it."""
        if hasattr(self._made, "set_epoch"):
            self._made.set_epoch(epoch)
        if not callable(self._made) or is_iterable(self._made):
            return iter(self._made)
        return iter(self._made(epoch=epoch) if takes_epoch(self._made) else self._made())


class IterableReading:
    """The reading process of an iterable: what it answers.

    Args:
        where: the config key, for messages.
        iterator: begins anew, given the number of the epoch, or of the times.
        window, epoch_size, dims, labels: as of `IterableDataset`.
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
    ) -> None:
        self._where = where
        self._name = name
        self._iterator_of = iterator
        self._window = window
        self._epoch_size = epoch_size
        self._dims = dims
        self._labels = labels
        self._form = ItemForm(where)
        self._largest: dict[str, int] = {}
        self._iterator: Iterator[Any] | None = None
        self._latest: Iterator[Any] | None = None
        self._times = 0  # how often it has begun
        self._position = 0  # of the next item since it first began
        self._epoch = self._next = 0  # the number of the next item of the epoch
        self._held: dict[int, Any] = {}

    def __call__(self, question: Question) -> Any:
        return getattr(self, question[0])(*question[1:])

    def items(self, epoch: int) -> Iterator[Item]:
        """The sequences of an epoch, one after the other. Raises: DataError."""
        self._begin(epoch)
        for number, item in enumerate(self._rest()):
            yield self._form.sequence(number, item)

    def about(self, epoch: int) -> tuple[str, int, Mapping[str, Stream]]:
        """As of `Reading`."""
        self._begin(epoch)
        first = next(self._rest(), END)
        if first is END:
            raise DataError(f"{self._where}: expected at least one item in epoch {epoch} of {self._name}, got none")
        self._form.sequence(0, first)
        return self._name, 1, self.streams()

    def streams(self) -> Mapping[str, Stream]:
        """What the arrays hold, with the largest classes that were seen."""
        return self._form.with_classes({**{key: most + 1 for key, most in self._largest.items()}, **self._dims}, self._labels)

    def scan(self, epoch: int, start: int, count: int) -> ScannedSequences:
        """As of `Reading`. Of later items than those that are read again, the checksum is 0."""
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
        """An iterable does not tell it."""

    def all_tags(self) -> None:
        """An iterable does not tell them."""

    def matches(self, epoch: int, checksums: Mapping[int, int], skip: bool) -> bool:
        """Whether the first items of an epoch that begins again have these checksums."""
        if skip:
            return False
        self._begin(epoch, anew=True)
        try:
            again = [self._form.sequence(number, item) for number, item in enumerate(islice(self._rest(), len(checksums)))]
        except DataError:
            return False
        return [_checksum(*item) for item in again] == [checksums[number] for number in sorted(checksums)]

    def read(self, epoch: int, numbers: Sequence[int], skip: bool) -> list[Item]:
        """Items of an epoch; those of their window that others want later are held. Raises: DataError."""
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

    def goes_on(self, epoch: int) -> bool:
        """Whether there is an item after the last one that was read, if the epoch is all of the iterable."""
        if self._epoch_size is not None or epoch != self._epoch or self._iterator is None:
            return False
        if self._advance() is END:
            return False
        self._epoch = 0  # that item is gone: the next question begins anew
        return True

    def skip(self, epoch: int, number: int) -> int:
        """As of `Reading`: to the window of an item."""
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
        """Begin an epoch: by going on, if it is ahead. `anew`: by beginning anew in any case."""
        import multiprocessing  # here, so that `--help` does not import it

        # The iterable may start processes, as a DataLoader does, which Python denies to daemons of multiprocessing.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        start = 0 if self._epoch_size is None else (epoch - 1) * self._epoch_size
        if anew or self._epoch_size is None or self._iterator is None or self._position > start:
            self._iterator, self._times, self._position = None, 0, 0
        self._epoch, self._next, self._held = epoch, 0, {}
        while self._position < start:
            if self._advance() is END:
                break

    def _go_to(self, epoch: int, number: int) -> None:
        """Have item `number` of an epoch be the next one."""
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
        """The next item, or `END`; where an epoch is not all of the iterable, it begins again at its end."""
        for _ in range(2):
            if self._iterator is None:
                self._times += 1
                made = self._iterator_of(self._epoch if self._epoch_size is None else self._times)
                if made is self._latest:
                    raise DataError(
                        f"{self._where}: expected a new iterator whenever {self._name} begins again, got the same "
                        f"{type(made).__name__}"
                    )
                self._iterator = self._latest = made
            try:
                item = next(self._iterator)
            except StopIteration as ended:
                if not is_end(ended):
                    where = f"{self._where}: item {self._next} of epoch {self._epoch} of {self._name}"
                    raise iterator_ended(where, ended) from ended
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


class End:
    """The type of `END`."""


END = End()
"""In place of an item after the last one."""


def is_end(error: StopIteration) -> bool:
    """Whether a StopIteration that `next` raised is the end of the iterator, and not that of another one which code inside asked.

    An iterator ends in its own `__next__`, which may be decorated, or in C. A function that map, say, calls, or `__getitem__` of
    a DataLoader's dataset, has no say in that.
    """
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:]]  # without that of the caller
    is_own = not frames or frames[0] == "__next__" or (frames[0] == "wrapper" and "__next__" in frames)
    return is_own and "__getitem__" not in frames


def is_iterable(value: Any) -> bool:
    """Whether a value of a config is an iterable to read, and no text, dict, list or class."""
    return hasattr(type(value), "__iter__") and not isinstance(value, (str, bytes, Mapping, list, tuple, set, frozenset, type))


def refuse_batches(where: str, made: Any) -> None:
    """Raises: DataError, if an iterable is a DataLoader that makes batches."""
    if hasattr(made, "collate_fn") and getattr(made, "batch_size", None) is not None:
        raise DataError(
            f"{where}: expected items, got a {type(made).__name__} of batches (hvdtrain makes the batches: in place of the "
            "DataLoader, give its dataset, or set its batch_size to None)"
        )


def needs_epoch(made: partial[Any]) -> bool:
    """Whether a config's function cannot be called without the number of the epoch: it has to be called for each."""
    if not inspect.isroutine(made.func) or "epoch" in made.keywords:
        return False
    try:
        epoch = inspect.signature(made.func).parameters.get("epoch")
    except (TypeError, ValueError):  # a function in C
        return False
    return epoch is not None and epoch.default is inspect.Parameter.empty


def takes_epoch(made: Any) -> bool:
    """Whether an epoch may have other items than the one before."""
    if is_iterable(made):
        return hasattr(made, "set_epoch")
    given = made.keywords if isinstance(made, partial) else {}
    try:
        return "epoch" in inspect.signature(made).parameters and "epoch" not in given
    except (TypeError, ValueError):  # a function in C
        return False


def _checksum(tag: str, arrays: Mapping[str, Array]) -> int:
    checksum = zlib.crc32(tag.encode("utf-8"))
    for key, values in sorted(arrays.items()):
        checksum = zlib.crc32(numpy.ascontiguousarray(values).tobytes(), zlib.crc32(key.encode("utf-8"), checksum))
    return checksum
