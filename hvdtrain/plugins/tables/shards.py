"""Items in several files ("shards") that can be found by number: the base of tar, parquet and Arrow files, and of folders."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import overload

import numpy

from hvdtrain.data.dataset import Item, Scanning, SequenceSource
from hvdtrain.data.formats.items import ItemsDataset
from hvdtrain.data.randomness import ITEM, own_numbers
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.lengths.fingerprint import fingerprint_of_file
from hvdtrain.plugins.speech.vocabulary import Units, read_vocabulary
from hvdtrain.plugins.tables.conversions import TextClasses


class Shards(SequenceSource, Sequence[Item]):
    """Items by number, from 0, in the order of the files.

    Attributes:
        paths: the files.
        bounds: the index of the first item of every file, then the number of items: int64 of shape (files + 1,).
        tags: of the items, as UTF-8: numpy bytes; None: they are named after their numbers.
        lengths: by data key, the lengths of all items, if they are known without reading them; else None.
        texts: by data key, how its texts become classes.
    """

    lengths: Mapping[str, Array] | None = None
    texts: Mapping[str, TextClasses] = {}

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], tags: Sequence[Array] | None) -> None:
        """Args:
        sizes: the number of items in every file.
        tags: of the items in every file, as UTF-8: numpy bytes; None: items are named after their numbers.
        """
        self.paths = list(paths)
        self.bounds = numpy.cumsum([0, *sizes], dtype=numpy.int64)
        self.tags = None if tags is None else numpy.concatenate(tags)

    @abstractmethod
    def row(self, shard: int, row: int) -> dict[str, Array]:
        """The arrays of an item, by its place in a file. Raises: DataError."""

    def __len__(self) -> int:
        return int(self.bounds[-1])

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...

    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        number = range(len(self))[index]  # also handles negative numbers, and raises IndexError
        if isinstance(number, range):
            return [self[each] for each in number]
        shard = bisect_right(self.bounds, number) - 1
        try:
            return self.tag(number), self.row(shard, number - int(self.bounds[shard]))
        except DataError as error:  # the others can be read: their places are known
            raise BrokenSequence(str(error)) from None

    def tag(self, number: int) -> str:
        """The name of an item."""
        return f"row-{number}" if self.tags is None else self.tags[number].decode("utf-8")

    def identity(self) -> str:
        """A text that differs if the files do."""
        return repr(list(map(fingerprint_of_file, self.files())))

    def files(self) -> Sequence[str]:
        """All files that the items are read from."""
        return self.paths

    def warnings(self) -> list[str]:
        """Messages for the log: which vocabularies do not fit the texts that were read."""
        misfits = {key: text.misfit() for key, text in self.texts.items()}
        return [f"{key!r}: {misfit}" for key, misfit in misfits.items() if misfit]

    def begin_epoch(self, epoch: int) -> int | None:
        if epoch != 1:
            raise DataError(f"--epoch: expected 1 for {self.name}, which has no epochs, got {epoch}")
        return len(self)

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        for index in range(start, len(self) if stop is None else min(stop, len(self))):
            with own_numbers(Scanning().seed, ITEM, 0, 0, 1, index):  # those of a training on it, in the first epoch
                item = self[index]
            yield item

    def to_train_on(self, where: str, scanning: Scanning) -> ShardedItems:
        return ShardedItems(where, self, scanning)


class ShardedItems(ItemsDataset):
    """The items of shards as a dataset: their tags and files are known without reading them."""

    unnamed = "row"

    def __init__(self, where: str, shards: Shards, scanning: Scanning) -> None:
        self._shards = shards
        super().__init__(where, shards, scanning, shards.tags)
        self.reads_for_tags = False

    def where(self, number: int) -> str:
        path = self._shards.paths[bisect_right(self._shards.bounds, number) - 1]
        return f"{super().where(number)} ({path}, {self._shards.tag(number)!r})"

    def file_bounds(self) -> Array:
        return numpy.searchsorted(self._used, self._shards.bounds)

    def how_read(self) -> str:
        return f"{len(self._shards)} items of {len(self._shards.paths)} files"

    def warnings(self) -> list[str]:
        return super().warnings() + self._shards.warnings()

    def _identity(self, made_of: str) -> str:
        return f"{self._shards.identity()} {super()._identity(made_of)}"


def text_conversions(vocabulary: Mapping[str, str], units: Units) -> dict[str, TextClasses]:
    """By data key, how its texts become classes. Raises: DataError."""
    return {key: TextClasses(read_vocabulary(Path(path)), units) for key, path in vocabulary.items()}


def check_vocabulary(where: str, vocabulary: Mapping[str, str], texts: Sequence[str], keys: Sequence[str]) -> None:
    """Raises: DataError, unless exactly the data keys with texts have a vocabulary.

    Args:
        texts: the data keys with texts.
        keys: all data keys.
    """
    for key in vocabulary:
        if key not in texts:
            got = "another type of data" if key in keys else f"none of {', '.join(keys)}"
            raise DataError(f"{where}.vocabulary: expected data keys with texts, got {key!r}, which is {got}")
    for key in texts:
        if key not in vocabulary:
            raise DataError(
                f"{where}.vocabulary: expected a vocabulary for {key!r}, which has texts, got none (or leave the data key out)"
            )
