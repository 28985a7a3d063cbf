"""Training on data that is read from beginning to end: iterables (iterable.py), and datasets of plug-ins.

The plan of an epoch needs all lengths, which such a source mostly knows only once a sequence has been read. So the data is read
once for its lengths, which are saved in a file; after that, a sequence is identified by its place in the source's order of the
epoch. A dedicated process reads: it neither shares Python's lock with the training nor sees the modules that a config imports.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy

from hvdtrain.data.combine.workers import Workers
from hvdtrain.data.dataset import Dataset, Item, Scanning
from hvdtrain.data.formats.items import batch_warnings
from hvdtrain.data.indexed import IndexedDataset
from hvdtrain.data.padding import holds
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.lengths.index import HEAD_START, IndexFile, Stored
from hvdtrain.plugins.streams.reading import AGAIN, Question, ScannedSequences, StreamReading

EVERYTHING = 1 << 62

VARIES = "varies"
"""The name of the file which records that lengths differ between epochs."""

FAR = 1000
"""Skipping at least this many sequences, which must be read for that, is announced in the log."""


@dataclass(frozen=True)
class SourceTraits:
    """Properties of a source, known once it was read for the first time.

    Attributes:
        streams: by data key, what a sequence's array holds.
        by_corpus: whether the lengths are those of a whole corpus, whose order in each epoch is known in advance; otherwise every
            epoch is read to find its lengths.
        skips: whether a sequence can be read without those before it.
        repeats: whether an epoch yields the same sequences when it begins again.
    """

    streams: Mapping[str, Stream]
    by_corpus: bool
    skips: bool
    repeats: bool

    def as_json(self) -> dict[str, Any]:
        """The properties as JSON can hold them."""
        streams = {
            key: [stream.dtype.str, list(stream.shape), stream.dim, stream.sparse, list(stream.labels)]
            for key, stream in self.streams.items()
        }
        return {"streams": streams, "flags": [self.by_corpus, self.skips, self.repeats]}

    @classmethod
    def from_json(cls, read: Mapping[str, Any]) -> SourceTraits:
        """The properties that `as_json` returned."""
        streams = {
            key: Stream(numpy.dtype(dtype), tuple(shape), dim, sparse, tuple(labels))
            for key, (dtype, shape, dim, sparse, labels) in read["streams"].items()
        }
        return cls(streams, *read["flags"])


@dataclass(frozen=True)
class SequenceTable:
    """The sequences of an epoch or of a whole corpus.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (num_sequences,).
        lengths: by data key, the number of frames, int32 of shape (num_sequences,); -1: unknown.
    """

    tags: Array
    lengths: dict[str, Array]

    def select(self, indices: Array) -> SequenceTable:
        """Some of the sequences, in the order of the indices."""
        return SequenceTable(self.tags[indices], {key: column[indices] for key, column in self.lengths.items()})

    @property
    def is_complete(self) -> bool:
        """Whether all lengths are known."""
        return all(bool((column >= 0).all()) for column in self.lengths.values())


class Reader:
    """Asks the reading processes, and holds the lengths. One thread at a time may use it.

    Args:
        num_workers: the number of processes that read batches, if a sequence can be read without those before it.

    Raises:
        DataError: the source cannot be read.
    """

    def __init__(self, source: StreamReading, fingerprint: str, scanning: Scanning, num_workers: int) -> None:
        self.source = source
        self._scanning = scanning
        self._next = (0, 0)  # epoch and number of the sequence that the reading process has not read yet
        self._workers = self._pool = self._start(1)
        self._epochs: dict[int, SequenceTable] = {}
        self._corpus = SequenceTable(numpy.zeros(0, bytes), {})
        try:
            if source.window is not None and not source.constant:  # so that reading ahead and scanning do not restart each other
                self._pool = self._start(1)
            self.file = IndexFile(scanning.folder, fingerprint)
            self._varies = (path := self.file.path(VARIES)) is not None and path.exists()
            self.about, first = self._stored(self.file_name(1), self._inspect)
            if self.about.by_corpus:
                self._corpus = first
            else:
                self._epochs[1] = first
            if self.about.skips and num_workers > 1:
                self._pool = self._start(num_workers)
        except BaseException:
            self.close()
            raise

    def _start(self, count: int) -> Workers[Question]:
        workers = Workers[Question](count, self.source)
        workers.start()
        return workers

    def file_name(self, epoch: int) -> str:
        """The name of the file with an epoch; that of the first one has the corpus instead, if there is one."""
        return f"{'varying' if self._varies else 'epoch'}-{epoch}"

    def epoch(self, epoch: int) -> SequenceTable:
        """The sequences of an epoch, which is scanned if their lengths are unknown. Raises: DataError."""
        if epoch not in self._epochs:
            table = self._corpus_epoch(epoch) if self.about.by_corpus else self._scanned_epoch(epoch)
            latest = sorted({*self._epochs, epoch} - {epoch})[-2:]
            self._epochs = {**{number: self._epochs[number] for number in latest}, epoch: table}
        return self._epochs[epoch]

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Item]:
        """Sequences of an epoch. Raises: DataError."""
        if not self._workers.is_usable:
            source = "a dataset that RETURNN reads" if self.source.window is None else "an iterable"
            raise DataError(f"{self.source.where}: expected num_workers = 0 around {source}, got worker processes")
        skip = self.about.skips
        if not skip:
            self._skip_to(epoch, min(numbers))
            self._next = epoch, max(numbers) + 1
        apart = skip and self._pool is not self._workers
        questions = [("read", epoch, [number], skip) for number in numbers] if apart else [("read", epoch, list(numbers), skip)]
        return [item for items in self._pool.results(questions) for item in items]

    def has_more(self, epoch: int) -> bool:
        """Whether an epoch of an iterable has more items than were read, which training would miss."""
        [more] = self._pool.results([("has_more", epoch)])
        return bool(more)

    def close(self) -> None:
        for workers in {self._workers, self._pool}:  # they may be the same
            workers.close()

    def warnings(self) -> list[str]:
        """Messages for the log about how the source is read."""
        lines = []
        if not self.about.repeats:
            lines.append(
                f"{self.source.name} yields other sequences when an epoch begins again: a run that resumes within an epoch "
                f"differs from one that was never stopped ({self.source.advice})"
            )
        if not self.about.by_corpus and not self.source.constant:
            lines.append(
                f"every epoch of {self.source.name} is read once for its lengths before it is trained on "
                "(convert it with hvdtrain dump to read it once in all)"
            )
        if not self.about.skips and self._scanning.size > 1:
            lines.append(
                f"{self.source.name} can only be read from its beginning: each of the {self._scanning.size} ranks reads all of "
                "it and trains on its share"
            )
        return lines

    def _skip_to(self, epoch: int, number: int) -> None:
        """Read the sequences before one piece by piece, if a run resumes within an epoch."""
        begins = self._next[0] != epoch or number < self._next[1] - (self.source.window or 0)
        if number - (0 if begins else self._next[1]) < FAR:
            return
        self._scanning.note(f"{self.source.where}: reading and skipping the {number} sequences before the one to resume from ...")
        reached = 0
        while reached < number:
            self._scanning.waiting()
            [now] = self._pool.results([("skip", epoch, number)])
            if now == reached:  # the epoch has ended: reading raises the error
                return
            reached = now

    def _ask(self, *question: Any) -> Any:
        return self._workers.results([question])[0]

    def _stored(self, name: str, find: Callable[[], tuple[SourceTraits, SequenceTable]]) -> tuple[SourceTraits, SequenceTable]:
        """What is stored, or what a function finds, which is stored then."""

        def make() -> Stored:
            about, table = find()
            return about.as_json(), {"": table.tags, **table.lengths}

        read, arrays = self.file.get(name, self._scanning, make, f"{self.source.where}: the lengths are found")
        return SourceTraits.from_json(read), SequenceTable(arrays.pop(""), arrays)

    def _inspect(self) -> tuple[SourceTraits, SequenceTable]:
        """The properties of the source after reading the first epoch; and the corpus, if it has one, or else that epoch."""
        first, checksums = self._scan(1)
        if not (count := len(checksums)):
            raise DataError(f"{self.source.where}: expected at least one item in epoch 1 of {self.source.name}, got none")
        [repeats] = self._pool.results([("matches", 1, dict(enumerate(checksums[:AGAIN])), False)])
        places = sorted({count // 3, count // 2, count - 2})
        jumps = {place: checksums[place] for place in places}
        # Many datasets load the first sequence when an epoch begins, so skipping only shows from the third one on.
        skips = self.source.can_skip and repeats and places[0] > 1 and self._ask("matches", 1, jumps, True)
        about = SourceTraits(self._ask("streams"), by_corpus=False, skips=skips, repeats=repeats)
        order = self._ask("order", 1)
        tags = self._ask("all_tags")
        if (
            self._varies
            or order is None
            or tags is None
            or len(order[0]) != count
            or not numpy.array_equal(tags[order[0]], first.tags)
        ):
            return about, first
        corpus = SequenceTable(tags, {key: numpy.full(len(tags), -1, dtype=numpy.int32) for key in about.streams})
        for key, column in first.lengths.items():
            corpus.lengths[key][order[0]] = column
        # A later epoch may be of another corpus, and a function over the sequences may change their lengths in each epoch.
        later = 1 + self.source.num_sub_epochs
        if (order := self._ask("order", later)) is None or order[1] != _checksum_of(corpus):
            return about, first
        measured = corpus.select(order[0][:FAR])  # some of these were in the first epoch, too
        places = numpy.flatnonzero(numpy.all([column >= 0 for column in measured.lengths.values()], axis=0))[: 2 * AGAIN].tolist()
        items: list[Item] = self._ask("read", later, places, skips)
        same = all(
            len(arrays[key]) == column[place]
            for place, (_, arrays) in zip(places, items, strict=True)
            for key, column in measured.lengths.items()
        )
        return (replace(about, by_corpus=True), corpus) if same else (about, first)

    def _corpus_epoch(self, epoch: int) -> SequenceTable:
        answer = self._ask("order", epoch)
        if answer is None or answer[1] != _checksum_of(self._corpus):
            self.about = replace(self.about, by_corpus=False)
            self._varies = True
            return self._scanned_epoch(epoch)
        order = answer[0]
        if (selected := self._corpus.select(order)).is_complete:
            return selected
        with self.file.turn(self._scanning.waiting, HEAD_START if self._scanning.rank else 0.0):
            if (stored := self.file.load(self.file_name(1))) is not None:  # including what other processes have found meanwhile
                self._corpus = SequenceTable(stored[1].pop(""), stored[1])
            if not self._corpus.select(order).is_complete:
                read, _ = self._scan(epoch)
                if len(read.tags) != len(order):
                    expected = f"{self.source.where}: expected {len(order)} sequences in epoch {epoch} of {self.source.name}"
                    raise DataError(f"{expected}, got {len(read.tags)}")
                for key, column in read.lengths.items():
                    self._corpus.lengths[key][order] = column
                self.file.save(self.file_name(1), self.about.as_json(), {"": self._corpus.tags, **self._corpus.lengths})
        return self._corpus.select(order)

    def _scanned_epoch(self, epoch: int) -> SequenceTable:
        return self._stored(self.file_name(epoch), lambda: (self.about, self._scan(epoch)[0]))[1]

    def _scan(self, epoch: int) -> tuple[SequenceTable, list[int]]:
        tags: list[str] = []
        lengths: dict[str, list[int]] = {}
        checksums: list[int] = []
        scanned: ScannedSequences = self._ask("scan", epoch, 0, 1)
        with self._scanning.progress(
            f"{self.source.where}: lengths of {self.source.name}, epoch {epoch}", scanned.total
        ) as advance:
            while True:
                tags += scanned.tags
                checksums += scanned.checksums
                for key, column in scanned.lengths.items():
                    lengths.setdefault(key, []).extend(column)
                advance(len(scanned.tags))
                if scanned.ended:
                    break
                scanned = self._ask("scan", epoch, len(tags), EVERYTHING)
        if not tags and epoch > 1:
            lengths = {key: [] for key in self.about.streams}
        columns = {key: numpy.array(column, dtype=numpy.int32) for key, column in lengths.items()}
        return SequenceTable(numpy.array([tag.encode("utf-8") for tag in tags], dtype=bytes), columns), checksums


class StreamedDataset(IndexedDataset):
    """The sequences of an epoch in the order of the source: index i is the i-th sequence that it yields."""

    is_stochastic = True
    has_fixed_order = True

    def __init__(self, reader: Reader, epoch: int) -> None:
        self._reader = reader
        self._epoch = epoch
        self.window = reader.source.window
        table = reader.epoch(epoch)
        super().__init__(reader.about.streams, table.tags, table.lengths)

    def at_epoch(self, epoch: int) -> Dataset:
        if epoch == self._epoch or not self._reader.source.constant:
            return self if epoch == self._epoch else StreamedDataset(self._reader, epoch)
        changed = copy(self)
        changed._epoch = epoch  # of random numbers that do not change the lengths
        return changed

    def row(self, number: int) -> dict[str, Array]:
        return self.sequences([number])[0]

    def where(self, number: int) -> str:
        return f"{self._reader.source.where}: expected sequence {number} of epoch {self._epoch}"

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        items = self._reader.read(self._epoch, indices)
        if self.window is not None and max(indices) == self.num_sequences - 1 and self._reader.has_more(self._epoch):
            raise DataError(
                f"{self._reader.source.where}: expected {self._reader.source.name} to end after the {self.num_sequences} "
                f"sequences that it had when their lengths were found, got more ({self._advice(False)})"
            )
        return [self._check_sequence(index, *item) for index, item in zip(indices, items, strict=True)]

    def close(self) -> None:
        self._reader.close()

    def how_read(self) -> str:
        by = "by RETURNN" if self.window is None else "from beginning to end"
        return f"read {by} ({self._reader.source.name})"

    def warnings(self) -> list[str]:
        return self._reader.warnings() + ([] if self.window is None else batch_warnings(self.lengths))

    def _check_sequence(self, index: int, tag: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """A sequence, checked against the lengths that batches were planned with. Raises: DataError."""
        [expected] = self.tags([index])
        wanted = f"{self.where(index)} to be {expected!r}"
        result = {}
        for key, stream in self.streams.items():
            values = arrays.get(key)
            if tag != expected or values is None or len(values) != self.lengths[key][index]:
                got = repr(tag) if tag != expected else "none" if values is None else f"{len(values)} frames"
                raise DataError(
                    f"{wanted} with {self.lengths[key][index]} frames in {key!r}, got {got} ({self._advice(tag == expected)})"
                )
            if values.shape[1:] != stream.shape or not holds(stream.dtype, values):
                raise DataError(
                    f"{wanted} with {stream.dtype} frames of shape {stream.shape} in {key!r}, got {values.dtype} of shape "
                    f"{values.shape[1:]}"
                )
            result[key] = values.astype(stream.dtype, copy=False)
        return result

    def _advice(self, same: bool) -> str:
        """What to do about a sequence (the same one, or another) whose length has changed."""
        by_corpus = self._reader.about.by_corpus
        epoch = 1 if by_corpus or self._reader.source.constant else self._epoch
        file = self._reader.file.path(self._reader.file_name(epoch))
        if file is None:
            return "its lengths were found by reading it once before; if they differ between epochs, set lengths_dir"
        advice = f"its lengths were found before, in {file}: if the data or a function has changed since then, remove this file"
        if not by_corpus or not same:
            return advice
        self._reader.file.save(VARIES, {}, {})
        return f"{advice}; if lengths differ between epochs, start again: from now on, each epoch is read for its lengths"


def open_streamed(source: StreamReading, fingerprint: str, scanning: Scanning, num_workers: int = 1) -> Dataset:
    """Open a source that is read from beginning to end, to train or evaluate on. Raises: DataError.

    Args:
        fingerprint: identifies the source of saved lengths.
    """
    reader = Reader(source, fingerprint, scanning, num_workers)
    try:
        return StreamedDataset(reader, 1)
    except BaseException:
        reader.close()
        raise


def _checksum_of(corpus: SequenceTable) -> int:
    return zlib.crc32(corpus.tags.tobytes())
