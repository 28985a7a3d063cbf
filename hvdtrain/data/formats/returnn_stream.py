"""RETURNN's datasets as a source of sequences, to convert with hvdtrain dump as they come, or to train on in RETURNN's own order.

The plan of an epoch needs all lengths, which RETURNN's datasets mostly know only once they have read a sequence. So to train, the
data is read once for its lengths, which are kept in a file; after that, a sequence is its place in RETURNN's order of the epoch.
RETURNN runs in a process of its own, which neither shares Python's lock with the training nor sees the modules that a config
imports.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy

from hvdtrain.data.combine.workers import Workers
from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource
from hvdtrain.data.formats.found_lengths import About, Found, LengthsFile, identity_of
from hvdtrain.data.formats.returnn_reading import INSTALL, OpenedDataset, Part, Question, Reading, is_installed
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError

AGAIN = 4
"""The number of sequences that are read a second time, to see whether they are the same."""

ALWAYS_FROM_THE_BEGINNING = "PostprocessingDataset"
"""It gives any later sequence, but reads those before it."""

VARIES = "varies"
"""The part whose file says that lengths turned out to differ between epochs."""

EVERYTHING = 1 << 62

HEAD_START = 0.5
"""Seconds by which rank 0, which shows the progress, is ahead of the others."""


class Reader:
    """Asks the reading processes, and knows the lengths.

    Args:
        where: the config key of the dataset, for messages.
        num_workers: the number of processes that read batches, where a sequence can be read without those before it.

    Raises:
        DataError: RETURNN cannot read the dataset.
    """

    def __init__(self, where: str, options: Mapping[str, Any], scanning: Scanning, num_workers: int) -> None:
        self.where = where
        self._options = options
        self._scanning = scanning
        self._lock = threading.Lock()
        self._workers = Workers[Question](1, Reading(options))
        self._workers.start()
        self._pool = self._workers
        self._epochs: dict[int, Found] = {}
        self._corpus: Found | None = None
        self._unsaved: str | None = None
        try:
            self.file = LengthsFile(scanning.folder, identity_of(options))
            self.about = self._look()
            if self.about.skips and num_workers > 1:
                self._pool = Workers[Question](num_workers, Reading(options))
                self._pool.start()
        except BaseException:
            self.close()
            raise

    def epoch(self, epoch: int) -> Found:
        """The sequences of an epoch, which is read for that if nobody knows their lengths. Raises: DataError."""
        if epoch not in self._epochs:
            found = self._of_corpus(epoch) if self.about.by_corpus else self._of_epoch(epoch)
            latest = sorted({*self._epochs, epoch} - {epoch})[-2:]
            self._epochs = {**{each: self._epochs[each] for each in latest}, epoch: found}
        return self._epochs[epoch]

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Item]:
        """Sequences of an epoch. Raises: DataError."""
        if not self._workers.usable:
            raise DataError(f"{self.where}: expected num_workers = 0 around a dataset that RETURNN reads, got worker processes")
        skip = self.about.skips
        if self._pool is self._workers:
            return self._ask("read", epoch, list(numbers), skip)  # type: ignore[no-any-return]
        with self._lock:
            answers = self._pool.results([("read", epoch, [number], skip) for number in numbers])
        return [item for items in answers for item in items]

    def close(self) -> None:
        """End the processes."""
        for workers in {id(each): each for each in (self._workers, self._pool)}.values():
            workers.close()

    def warnings(self) -> list[str]:
        """What the user has to know."""
        said = []
        if not self.about.repeats:
            said.append(
                f"{self.about.name} gives other sequences when an epoch begins again: a run that goes on within an epoch is "
                "not the one that would not have been stopped (seed the random numbers of its functions by their rng)"
            )
        if not self.about.by_corpus:
            said.append(
                f"the lengths of {self.about.name} are found by reading every epoch once before it is trained on "
                "(convert it with hvdtrain dump to read it once in all)"
            )
        if not self.about.skips and self._scanning.size > 1:
            said.append(
                f"{self.about.name} can only be read from its beginning: each of the {self._scanning.size} ranks reads all of it "
                "and trains on its share"
            )
        if self._unsaved is not None:
            said.append(f"the lengths are found again in every run, as they cannot be kept: {self._unsaved} (lengths_dir)")
        return said

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            return self._workers.results([question])[0]

    def _turn(self) -> Any:
        return self.file.turn(self._scanning.waiting, HEAD_START if self._scanning.rank else 0.0)

    def _look(self) -> About:
        """What was found before, or is found in the first epoch."""
        if (about := self._kept()) is not None:
            return about
        with self._turn():
            if (about := self._kept()) is not None:  # by now
                return about
            name, num_parts, streams = self._ask("about", 1)
            about = About(name, streams, by_corpus=False, skips=False, repeats=True)
            found, checksums = self._scan(1, name)
            about, corpus = self._examined(about, found, checksums, num_parts)
            if corpus is None:
                self._epochs[1] = found
            else:
                self._corpus = corpus
            self._keep("epoch-1" if corpus is None else "corpus", about, found if corpus is None else corpus)
            return about

    def note_that_lengths_vary(self) -> None:
        """Let the next run find the lengths of every epoch."""
        self.file.save(VARIES, replace(self.about, by_corpus=False), Found(numpy.zeros(0, dtype=bytes), {}))

    def _kept(self) -> About | None:
        for part in ("corpus", "epoch-1"):
            if (kept := self.file.load(part)) is not None:
                about, found = kept
                if about.by_corpus and self._vary():
                    continue
                if about.by_corpus:
                    self._corpus = found
                else:
                    self._epochs[1] = found
                return about
        return None

    def _vary(self) -> bool:
        path = self.file.path(VARIES)
        return path is not None and path.exists()

    def _examined(self, about: About, first: Found, checksums: list[int], num_parts: int) -> tuple[About, Found | None]:
        """How the dataset behaves, given what the first epoch was like; and the corpus, if it knows one."""
        count = len(checksums)
        repeats = self._ask("matches", 1, dict(enumerate(checksums[:AGAIN])), False)
        places = sorted({count // 3, count // 2, count - 2})
        jumps = {place: checksums[place] for place in places if place > 0}
        # Of fewer sequences than that, nothing is gained by leaving some out.
        can_skip = not _contains(self._options, ALWAYS_FROM_THE_BEGINNING)
        skips = can_skip and repeats and count > AGAIN and self._ask("matches", 1, jumps, True)
        about = replace(about, repeats=repeats, skips=skips)
        told, tags = self._ask("order", 1), self._ask("all_tags")
        if (
            self._vary()
            or told is None
            or tags is None
            or len(told[0]) != count
            or not numpy.array_equal(tags[told[0]], first.tags)
        ):
            return about, None
        corpus = Found(tags, {key: numpy.full(len(tags), -1, dtype=numpy.int32) for key in about.streams})
        for key, column in first.lengths.items():
            corpus.lengths[key][told[0]] = column
        # A later epoch may be of another corpus, and a function over the sequences may give them other lengths in each epoch.
        later = 1 + num_parts
        part: Part = self._ask("scan", later, 0, 2 * AGAIN)
        if (told := self._ask("order", later)) is None or told[1] != _checksum_of(corpus):
            return about, None
        known = corpus.at(told[0][: len(part.tags)])
        same = all(
            column[number] in (-1, part.lengths[key][number])
            for key, column in known.lengths.items()
            for number in range(len(column))
        )
        return (replace(about, by_corpus=True), corpus) if same else (about, None)

    def _of_corpus(self, epoch: int) -> Found:
        told = self._ask("order", epoch)
        if told is None or told[1] != _checksum_of(self._whole()):
            self.about = replace(self.about, by_corpus=False)
            return self._of_epoch(epoch)
        order = told[0]
        if (found := self._whole().at(order)).complete:
            return found
        with self._turn():
            if (kept := self.file.load("corpus")) is not None:
                self._corpus = kept[1]  # with what other processes have found meanwhile
            if not self._whole().at(order).complete:
                read, _ = self._scan(epoch, self.about.name)
                if len(read.tags) != len(order):
                    what = f"{self.where}: expected {len(order)} sequences in epoch {epoch} of {self.about.name}"
                    raise DataError(f"{what}, got {len(read.tags)}")
                corpus = self._whole()
                for key, column in read.lengths.items():
                    corpus.lengths[key][order] = column
                self._keep("corpus", self.about, corpus)
        return self._whole().at(order)

    def _of_epoch(self, epoch: int) -> Found:
        if (kept := self.file.load(f"epoch-{epoch}")) is not None:
            return kept[1]
        with self._turn():
            if (kept := self.file.load(f"epoch-{epoch}")) is not None:
                return kept[1]
            found, _ = self._scan(epoch, self.about.name)
            self._keep(f"epoch-{epoch}", self.about, found)
            return found

    def _whole(self) -> Found:
        if self._corpus is None:
            raise RuntimeError("no corpus")
        return self._corpus

    def _keep(self, part: str, about: About, found: Found) -> None:
        self._unsaved = self.file.save(part, about, found)

    def _scan(self, epoch: int, name: str) -> tuple[Found, list[int]]:
        """Read an epoch for its lengths; also the checksums of its sequences."""
        tags: list[str] = []
        lengths: dict[str, list[int]] = {}
        checksums: list[int] = []
        part: Part = self._ask("scan", epoch, 0, 1)
        with self._scanning.progress(f"{self.where}: lengths of {name}, epoch {epoch}", part.total) as advance:
            while True:
                tags += part.tags
                checksums += part.checksums
                for key, column in part.lengths.items():
                    lengths.setdefault(key, []).extend(column)
                advance(len(part.tags))
                if part.ended:
                    break
                part = self._ask("scan", epoch, len(tags), EVERYTHING)
        keys = lengths if tags else self.about.streams
        columns = {key: numpy.array(lengths.get(key, ()), dtype=numpy.int32) for key in keys}
        return Found(numpy.array([tag.encode("utf-8") for tag in tags], dtype=bytes), columns), checksums


class ReturnnStream(Dataset):
    """The sequences of an epoch of RETURNN's, in its order: index i is the i-th sequence that RETURNN yields."""

    varies = True
    own_order = True

    def __init__(self, reader: Reader, epoch: int) -> None:
        self._reader = reader
        self._epoch = epoch
        self._found = reader.epoch(epoch)
        self.streams = reader.about.streams
        self.lengths = self._found.lengths

    @property
    def num_sequences(self) -> int:
        return len(self._found.tags)

    def at_epoch(self, epoch: int) -> Dataset:
        return self if epoch == self._epoch else ReturnnStream(self._reader, epoch)

    def sequence(self, index: int) -> dict[str, Array]:
        return self.sequences([index])[0]

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        items = self._reader.read(self._epoch, indices)
        return [self._checked(index, *item) for index, item in zip(indices, items, strict=True)]

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [tag.decode("utf-8") for tag in self._found.tags[list(indices)].tolist()]

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._found.tags[start:stop]

    def close(self) -> None:
        self._reader.close()

    def how_read(self) -> str:
        return f"read by RETURNN ({self._reader.about.name})"

    def warnings(self) -> list[str]:
        return self._reader.warnings()

    def _checked(self, index: int, tag: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """A sequence, checked against the lengths that batches were planned with. Raises: DataError."""
        [expected] = self.tags([index])
        what = f"{self._reader.where}: expected sequence {index} of epoch {self._epoch} to be {expected!r}"
        result = {}
        for key, stream in self.streams.items():
            values = arrays.get(key)
            if tag != expected or values is None or len(values) != self.lengths[key][index]:
                got = repr(tag) if tag != expected else "none" if values is None else f"{len(values)} frames"
                raise DataError(
                    f"{what} with {self.lengths[key][index]} frames in {key!r}, got {got} ({self._advice(tag == expected)})"
                )
            if values.shape[1:] != stream.shape or not numpy.can_cast(values.dtype, stream.dtype, "same_kind"):
                raise DataError(
                    f"{what} with {stream.dtype} frames of shape {stream.shape} in {key!r}, got {values.dtype} of shape "
                    f"{values.shape[1:]}"
                )
            result[key] = values.astype(stream.dtype, copy=False)
        return result

    def _advice(self, same: bool) -> str:
        """What to do about a sequence (the same one, or another) that is not as long as it was before."""
        by_corpus = self._reader.about.by_corpus
        file = self._reader.file.path("corpus" if by_corpus else f"epoch-{self._epoch}")
        if file is None:
            return "its lengths were found by reading it once before; where they differ between epochs, set lengths_dir"
        found = f"its lengths were found before, in {file}: if the data or a function has changed since then, remove this file"
        if not by_corpus or not same:
            return found
        self._reader.note_that_lengths_vary()
        return f"{found}; if lengths differ between epochs, start again: from now on, each epoch is read for its own"


def open_stream(where: str, options: Mapping[str, Any], scanning: Scanning, num_workers: int) -> Dataset:
    """Open a dataset of RETURNN to train or evaluate on. Raises: DataError."""
    reader = Reader(where, options, scanning, num_workers)
    try:
        return ReturnnStream(reader, 1)
    except BaseException:
        reader.close()
        raise


def _checksum_of(corpus: Found) -> int:
    return zlib.crc32(corpus.tags.tobytes())


def _contains(value: Any, name: str) -> bool:
    """Whether a dataset dict, or one inside it, is of a class."""
    if isinstance(value, Mapping):
        return value.get("class") == name or any(_contains(inside, name) for inside in value.values())
    return isinstance(value, (list, tuple)) and any(_contains(inside, name) for inside in value)


class ReturnnDataset(SequenceSource):
    """A dataset that the installed RETURNN opens and reads.

    Args:
        dataset: the dict of a RETURNN config. RETURNN handles its order keys (seq_ordering, partition_epoch, ...) and its files.
        num_workers: processes that read for a training, where RETURNN's dataset can be read from anywhere.

    Raises:
        ConfigError: it is no such dict.
    """

    def __init__(self, dataset: Mapping[str, Any], num_workers: int = 1) -> None:
        if not isinstance(dataset, Mapping) or "class" not in dataset:
            raise ConfigError(
                [f"dataset: expected a dataset dict of RETURNN with 'class', got {dataset!r} in the ReturnnDataset"]
            )
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ConfigError([f"num_workers: expected a positive integer, got {num_workers!r} in the ReturnnDataset"])
        self._options = dataset
        self._num_workers = num_workers
        self._opened: OpenedDataset | None = None
        self._epoch = 1
        self.labels: dict[str, list[str]] = {}
        self.dims: dict[str, int] = {}

    def begin_epoch(self, epoch: int) -> int | None:
        """Open the dataset, if it is not open, and begin an epoch. Raises: DataError, also if RETURNN is not installed."""
        if self._opened is None:
            self._opened = OpenedDataset(self._options)
        self._epoch = epoch
        self._opened.begin(epoch)
        self.labels, self.dims = self._opened.labels_and_dims()
        return self._opened.num_sequences()

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        """RETURNN reads an epoch from its beginning: the sequences before `start` are made and dropped."""
        opened = self._opened
        if opened is None:
            raise RuntimeError("read before begin_epoch")
        opened.begin(self._epoch)
        for number in count() if stop is None else range(stop):
            item = opened.item(number)
            if item is None:
                return
            if number >= start:
                yield item

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        if not is_installed():
            raise DataError(f"{where}: expected the package returnn for {self._options['class']}, got none {INSTALL}")
        return open_stream(where, self._options, scanning, self._num_workers)
