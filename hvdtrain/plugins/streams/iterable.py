"""Iterables: generators, torch's IterableDataset, streams of Hugging Face, and anything else that yields items one by one.

The plan of an epoch needs all lengths, which an iterable only yields with its items. So it is read like the datasets of RETURNN
(streamed.py): once for its lengths, which are saved, then for training. Within windows of neighbours, sequences come in the
order that the config asks for.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

from hvdtrain.config.references import is_reference, resolve
from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource, ended_iterator_error
from hvdtrain.data.foreign import is_iterable, refuse_batches, takes_epoch
from hvdtrain.data.formats.found import fingerprint_of
from hvdtrain.data.formats.item_form import ItemForm
from hvdtrain.data.held_generators import Generators
from hvdtrain.data.randomness import ITEM, mix_seed
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, ConfigError, DataError
from hvdtrain.plugins.streams.reading import END, StreamReading
from hvdtrain.plugins.streams.streamed import open_streamed

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
        self.iterable = iterable
        self.window = window
        self.epoch_size = epoch_size
        self.dims = dict(getattr(iterable, "dims", {})) | dict(dims or {})
        self.labels = {key: list(names) for key, names in dict(getattr(iterable, "labels", {})).items()}
        self._epoch = 1

    @property
    def name(self) -> str:
        named = self.iterable.func if isinstance(self.iterable, partial) else self.iterable
        return str(getattr(named, "__name__", type(named).__name__))

    def begin_epoch(self, epoch: int) -> int | None:
        self._epoch = epoch
        return None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        stream = IterableReading("the iterable", self, Scanning().seed)
        for number, (tag, arrays) in enumerate(islice(stream.items(self._epoch), stop)):
            if number >= start:
                yield tag, arrays

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        refuse_batches(where, self.iterable)
        described = [self.iterable, self.epoch_size, self.dims, self.labels]
        fingerprint = fingerprint_of(described) if scanning.folder is not None else ""
        return open_streamed(IterableReading(where, self, scanning.seed), f"iterable {fingerprint}", scanning)

    def iterator(self, epoch: int) -> Iterator[Any]:
        """Start anew. `epoch` is the epoch, or counts the starts if an epoch is not all of the iterable."""
        if hasattr(self.iterable, "set_epoch"):
            self.iterable.set_epoch(epoch)
        if not callable(self.iterable) or is_iterable(self.iterable):
            return iter(self.iterable)
        return iter(self.iterable(epoch=epoch) if takes_epoch(self.iterable) else self.iterable())


class IterableReading(StreamReading):
    """The reading process of an iterable.

    Args:
        seed: of random numbers that the iterable draws from the process-wide generators; with the epoch and the item.
    """

    advice = "seed its random numbers, with the epoch if it gets that"

    def __init__(self, where: str, source: IterableDataset, seed: int) -> None:
        super().__init__()
        self.where = where
        self.name = source.name
        self.window = source.window
        self.constant = source.epoch_size is None and not takes_epoch(source.iterable)
        self._source = source
        self._epoch_size = source.epoch_size
        self._seed = seed
        self._form = ItemForm(lambda number: f"{where}, item {number}")
        self._largest: dict[str, int] = {}
        self._iterator: Iterator[Any] | None = None
        self._latest: Iterator[Any] | None = None
        self._now = 0  # the epoch
        self._starts = 0  # how often the iterable has been started
        self._position = 0  # of the next item since its first start

    def items(self, epoch: int) -> Iterator[Item]:
        """The sequences of an epoch, one after the other. Raises: DataError."""
        self._begin(epoch)
        while (item := self._advance()) is not END:
            yield self.sequence(self._next - 1, item)

    def begin(self, epoch: int, anew: bool) -> None:
        """By reading on if the epoch lies ahead, unless `anew`, else from the start."""
        start = 0 if self._epoch_size is None else (epoch - 1) * self._epoch_size
        if anew or self._epoch_size is None or self._iterator is None or self._position > start:
            self._iterator = None
            self._starts = 0
            self._position = 0
        self._now = epoch
        while self._position < start and self._read_on() is not END:
            pass

    def take(self, number: int) -> Any:
        return self._read_on() if self._epoch_size is None or number < self._epoch_size else END

    def sequence(self, number: int, item: Any) -> Item:
        return self._form.sequence(number, item)

    def total(self) -> int | None:
        return self._epoch_size

    def streams(self) -> Mapping[str, Stream]:
        return self._form.with_classes(
            {**{key: most + 1 for key, most in self._largest.items()}, **self._source.dims}, self._source.labels
        )

    def seen(self, arrays: Mapping[str, Array]) -> None:
        for key, values in arrays.items():
            if self._form.streams[key].sparse and len(values):
                self._largest[key] = max(self._largest.get(key, 0), int(values.max()))

    def has_more(self, epoch: int) -> bool:
        """Whether an item follows the last one that was read, if the epoch is all of the iterable."""
        if self._epoch_size is not None or epoch != self._epoch or self._iterator is None or self._read_on() is END:
            return False
        self._epoch = 0  # that item is consumed: the next question starts anew
        return True

    def _read_on(self) -> Any:
        """The next item, or `END`; unless an epoch is all of the iterable, it is restarted at its end."""
        for _ in range(2):
            epoch = 0 if self._epoch_size is not None or (self.constant and self._position == 0) else self._now
            if self._iterator is None:
                self._generators = Generators(self._source)
            self._generators.seed(mix_seed(self._seed, ITEM, epoch, self._position))
            if self._iterator is None:
                self._starts += 1
                iterator = self._source.iterator(self._now if self._epoch_size is None else self._starts)
                if iterator is self._latest:
                    raise DataError(
                        f"{self.where}: expected a new iterator whenever {self.name} begins again, got the same "
                        f"{type(iterator).__name__}"
                    )
                self._iterator = self._latest = iterator
            try:
                item = next(self._iterator)
            except StopIteration as ended:
                if not is_end(ended):
                    where = f"{self.where}: item {self._next} of epoch {self._now} of {self.name}"
                    raise ended_iterator_error(where, ended) from ended
            except BrokenSequence as error:
                raise DataError(
                    f"{self.where}: expected item {self._next} of epoch {self._now} of {self.name}, got: {error} (leave out in "
                    "the iterable what it cannot read: others do not follow an error)"
                ) from None
            except BaseException as error:
                error.add_note(f"in item {self._next} of epoch {self._now} of {self.name}, {self.where}")
                raise
            else:
                self._position += 1
                return item
            if self._epoch_size is None or self._position == 0:
                return END
            self._iterator = None
        return END


def is_end(error: StopIteration) -> bool:
    """Whether a StopIteration that `next` raised is the end of the iterator itself, not of another one used inside it.

    An iterator ends in its `__next__`, which may be decorated, or in C. A StopIteration from elsewhere, such as a function that
    `map` calls or `__getitem__` of a DataLoader's dataset, does not end it.
    """
    frames = [frame.name for frame in traceback.extract_tb(error.__traceback__)[1:]]  # without that of the caller
    is_its_own = not frames or frames[0] == "__next__" or (frames[0] == "wrapper" and "__next__" in frames)
    return is_its_own and "__getitem__" not in frames
