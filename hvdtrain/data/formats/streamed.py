"""Training on data that is read from beginning to end: iterables (iterable.py), and datasets of plug-ins.

The plan of an epoch needs all lengths, which such a source mostly knows only once a sequence has been read. So the data is read
once for its lengths, which are saved in a file; after that, a sequence is identified by its place in the source's order of the
epoch. A dedicated process reads: it neither shares Python's lock with the training nor sees the modules that a config imports.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy

from hvdtrain.data.combine.workers import Workers
from hvdtrain.data.dataset import Dataset, Item, Scanning
from hvdtrain.data.formats.items import batch_warnings
from hvdtrain.data.formats.sequence_table import (
    EVERYTHING,
    FAR,
    VARIES,
    Question,
    ScannedSequences,
    SequenceTable,
    SourceTraits,
    Streamed,
)
from hvdtrain.data.index import HEAD_START, IndexFile
from hvdtrain.data.padding import holds
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

AGAIN = 4
"""The number of sequences that are read again, to see whether they are the same."""


SCAN_SECONDS = 0.5
"""How long the reading process reads between two reports of progress."""


class Reader:
    """Asks the reading processes, and holds the lengths.

    Args:
        where: the config key of the dataset, for messages.
        num_workers: the number of processes that read batches, if a sequence can be read without those before it.

    Raises:
        DataError: the source cannot be read.
    """

    def __init__(self, where: str, source: Streamed, scanning: Scanning, num_workers: int) -> None:
        self.where = where
        self.source = source
        self._scanning = scanning
        self._lock = threading.Lock()
        self._next = (0, 0)  # epoch and number of the sequence that the reading process has not read yet
        self._workers = Workers[Question](1, source.reading())
        self._workers.start()
        self._pool = self._workers
        if source.window is not None and not source.constant:  # so that reading ahead and scanning do not restart each other
            self._pool = Workers[Question](1, source.reading())
            self._pool.start()
        self._epochs: dict[int, SequenceTable] = {}
        self._corpus: SequenceTable | None = None
        self._unsaved: str | None = None
        try:
            self.file = IndexFile(scanning.folder, source.identity)
            self.about = self._inspect()
            if self.about.skips and num_workers > 1:
                self._pool = Workers[Question](num_workers, source.reading())
                self._pool.start()
        except BaseException:
            self.close()
            raise

    def epoch(self, epoch: int) -> SequenceTable:
        """The sequences of an epoch, which is scanned if their lengths are unknown. Raises: DataError."""
        if epoch not in self._epochs:
            found = self._corpus_epoch(epoch) if self.about.by_corpus else self._scanned_epoch(epoch)
            latest = sorted({*self._epochs, epoch} - {epoch})[-2:]
            self._epochs = {**{other: self._epochs[other] for other in latest}, epoch: found}
        return self._epochs[epoch]

    def read(self, epoch: int, numbers: Sequence[int]) -> list[Item]:
        """Sequences of an epoch. Raises: DataError."""
        if not self._workers.is_usable:
            what = "a dataset that RETURNN reads" if self.source.window is None else "an iterable"
            raise DataError(f"{self.where}: expected num_workers = 0 around {what}, got worker processes")
        skip = self.about.skips
        if not skip:
            self._skip_to(epoch, min(numbers))
            self._next = epoch, max(numbers) + 1
        apart = skip and self._pool is not self._workers
        questions = [("read", epoch, [number], skip) for number in numbers] if apart else [("read", epoch, list(numbers), skip)]
        with self._lock:
            answers = self._pool.results(questions)
        return [item for items in answers for item in items]

    def has_more(self, epoch: int) -> bool:
        """Whether an epoch of an iterable has more items than were read, which training would miss."""
        with self._lock:
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
                f"{self.about.name} yields other sequences when an epoch begins again: a run that resumes within an epoch "
                f"differs from one that was never stopped ({self.source.advice})"
            )
        if not self.about.by_corpus and not self.source.constant:
            lines.append(
                f"every epoch of {self.about.name} is read once for its lengths before it is trained on "
                "(convert it with hvdtrain dump to read it once in all)"
            )
        if not self.about.skips and self._scanning.size > 1:
            lines.append(
                f"{self.about.name} can only be read from its beginning: each of the {self._scanning.size} ranks reads all of it "
                "and trains on its share"
            )
        if self._unsaved is not None:
            lines.append(f"the lengths are found again in every run, as they cannot be saved: {self._unsaved} (lengths_dir)")
        return lines

    def _skip_to(self, epoch: int, number: int) -> None:
        """Read the sequences before one piece by piece, if a run resumes within an epoch."""
        begins = self._next[0] != epoch or number < self._next[1] - (self.source.window or 0)
        if number - (0 if begins else self._next[1]) < FAR:
            return
        self._scanning.note(f"{self.where}: reading and skipping the {number} sequences before the one to resume from ...")
        reached = 0
        while reached < number:
            self._scanning.waiting()
            with self._lock:
                [now] = self._pool.results([("skip", epoch, number)])
            if now == reached:  # the epoch has ended: reading raises the error
                return
            reached = now

    def _ask(self, *question: Any) -> Any:
        with self._lock:
            return self._workers.results([question])[0]

    def _turn(self) -> Any:
        return self.file.turn(self._scanning.waiting, HEAD_START if self._scanning.rank else 0.0)

    def _inspect(self) -> SourceTraits:
        """The properties of the source, from a file or from reading the first epoch."""
        if (about := self._load()) is not None:
            return about
        with self._turn():
            if (about := self._load()) is not None:  # another process saved it meanwhile
                return about
            name, num_parts, streams = self._ask("about", 1)
            about = SourceTraits(name, streams, by_corpus=False, skips=False, repeats=True)
            found, checksums = self._scan(1, name)
            about = replace(about, streams=self._ask("streams") or streams)
            about, corpus = self._examine(about, found, checksums, num_parts)
            if corpus is None:
                self._epochs[1] = found
            else:
                self._corpus = corpus
            self._save("epoch-1" if corpus is None else "corpus", about, found if corpus is None else corpus)
            return about

    def note_that_lengths_vary(self) -> None:
        """Record that the next run must find the lengths of every epoch."""
        self.file.save(VARIES, {}, {})

    def _load(self) -> SourceTraits | None:
        for part in ("corpus", "epoch-1"):
            if (kept := self._kept(part)) is not None:
                about, found = kept
                if about.by_corpus and self._lengths_vary():
                    continue
                if about.by_corpus:
                    self._corpus = found
                else:
                    self._epochs[1] = found
                return about
        return None

    def _lengths_vary(self) -> bool:
        path = self.file.path(VARIES)
        return path is not None and path.exists()

    def _examine(
        self, about: SourceTraits, first: SequenceTable, checksums: list[int], num_parts: int
    ) -> tuple[SourceTraits, SequenceTable | None]:
        """The properties of the source after reading the first epoch; and the corpus, if the source has one."""
        count = len(checksums)
        with self._lock:
            [repeats] = self._pool.results([("matches", 1, dict(enumerate(checksums[:AGAIN])), False)])
        places = sorted({count // 3, count // 2, count - 2})
        jumps = {place: checksums[place] for place in places}
        # Many datasets load the first sequence when an epoch begins, so skipping only shows from the third one on.
        skips = self.source.can_skip and repeats and places[0] > 1 and self._ask("matches", 1, jumps, True)
        about = replace(about, repeats=repeats, skips=skips)
        order, tags = self._ask("order", 1), self._ask("all_tags")
        if (
            self._lengths_vary()
            or order is None
            or tags is None
            or len(order[0]) != count
            or not numpy.array_equal(tags[order[0]], first.tags)
        ):
            return about, None
        corpus = SequenceTable(tags, {key: numpy.full(len(tags), -1, dtype=numpy.int32) for key in about.streams})
        for key, column in first.lengths.items():
            corpus.lengths[key][order[0]] = column
        # A later epoch may be of another corpus, and a function over the sequences may change their lengths in each epoch.
        later = 1 + num_parts
        if (order := self._ask("order", later)) is None or order[1] != _checksum_of(corpus):
            return about, None
        known = corpus.select(order[0][:FAR])  # some of these were in the first epoch, too
        places = numpy.flatnonzero(numpy.all([column >= 0 for column in known.lengths.values()], axis=0))[: 2 * AGAIN].tolist()
        items: list[Item] = self._ask("read", later, places, skips)
        same = all(
            len(arrays[key]) == column[place]
            for place, (_, arrays) in zip(places, items, strict=True)
            for key, column in known.lengths.items()
        )
        return (replace(about, by_corpus=True), corpus) if same else (about, None)

    def _corpus_epoch(self, epoch: int) -> SequenceTable:
        answer = self._ask("order", epoch)
        if answer is None or answer[1] != _checksum_of(self._known_corpus()):
            self.about = replace(self.about, by_corpus=False)
            return self._scanned_epoch(epoch)
        order = answer[0]
        if (found := self._known_corpus().select(order)).is_complete:
            return found
        with self._turn():
            if (kept := self._kept("corpus")) is not None:
                self._corpus = kept[1]  # including lengths that other processes have found meanwhile
            if not self._known_corpus().select(order).is_complete:
                read, _ = self._scan(epoch, self.about.name)
                if len(read.tags) != len(order):
                    what = f"{self.where}: expected {len(order)} sequences in epoch {epoch} of {self.about.name}"
                    raise DataError(f"{what}, got {len(read.tags)}")
                corpus = self._known_corpus()
                for key, column in read.lengths.items():
                    corpus.lengths[key][order] = column
                self._save("corpus", self.about, corpus)
        return self._known_corpus().select(order)

    def _scanned_epoch(self, epoch: int) -> SequenceTable:
        if (kept := self._kept(f"epoch-{epoch}")) is not None:
            return kept[1]
        with self._turn():
            if (kept := self._kept(f"epoch-{epoch}")) is not None:
                return kept[1]
            found, _ = self._scan(epoch, self.about.name)
            self._save(f"epoch-{epoch}", self.about, found)
            return found

    def _known_corpus(self) -> SequenceTable:
        if self._corpus is None:
            raise RuntimeError("no corpus")
        return self._corpus

    def _save(self, part: str, about: SourceTraits, found: SequenceTable) -> None:
        self._unsaved = self.file.save(part, about.as_json(), {"": found.tags, **found.lengths})

    def _kept(self, part: str) -> tuple[SourceTraits, SequenceTable] | None:
        if (kept := self.file.load(part)) is None:
            return None
        about, lengths = SourceTraits.from_json(kept[0]), dict(kept[1])
        return about, SequenceTable(lengths.pop(""), lengths)

    def _scan(self, epoch: int, name: str) -> tuple[SequenceTable, list[int]]:
        """Read an epoch for its lengths and the checksums of its sequences."""
        tags: list[str] = []
        lengths: dict[str, list[int]] = {}
        checksums: list[int] = []
        part: ScannedSequences = self._ask("scan", epoch, 0, 1)
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
        return SequenceTable(numpy.array([tag.encode("utf-8") for tag in tags], dtype=bytes), columns), checksums


class StreamedDataset(Dataset):
    """The sequences of an epoch in the order of the source: index i is the i-th sequence that it yields."""

    is_stochastic = True
    has_fixed_order = True

    def __init__(self, reader: Reader, epoch: int) -> None:
        self._reader = reader
        self._epoch = epoch
        self._found = reader.epoch(epoch)
        self.window = reader.source.window
        self.streams = reader.about.streams
        self.lengths = self._found.lengths

    @property
    def num_sequences(self) -> int:
        return len(self._found.tags)

    def at_epoch(self, epoch: int) -> Dataset:
        if epoch == self._epoch or not self._reader.source.constant:
            return self if epoch == self._epoch else StreamedDataset(self._reader, epoch)
        changed = copy(self)
        changed._epoch = epoch  # of random numbers that do not change the lengths
        return changed

    def sequence(self, index: int) -> dict[str, Array]:
        return self.sequences([index])[0]

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        items = self._reader.read(self._epoch, indices)
        if self.window is not None and max(indices) == self.num_sequences - 1 and self._reader.has_more(self._epoch):
            raise DataError(
                f"{self._reader.where}: expected {self._reader.about.name} to end after the {self.num_sequences} sequences "
                f"that it had when their lengths were found, got more ({self._advice(False)})"
            )
        return [self._check_sequence(index, *item) for index, item in zip(indices, items, strict=True)]

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [tag.decode("utf-8") for tag in self._found.tags[list(indices)].tolist()]

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._found.tags[start:stop]

    def close(self) -> None:
        self._reader.close()

    def how_read(self) -> str:
        by = "by RETURNN" if self.window is None else "from beginning to end"
        return f"read {by} ({self._reader.about.name})"

    def warnings(self) -> list[str]:
        return self._reader.warnings() + ([] if self.window is None else batch_warnings(self.lengths))

    def _check_sequence(self, index: int, tag: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
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
            if values.shape[1:] != stream.shape or not holds(stream.dtype, values):
                raise DataError(
                    f"{what} with {stream.dtype} frames of shape {stream.shape} in {key!r}, got {values.dtype} of shape "
                    f"{values.shape[1:]}"
                )
            result[key] = values.astype(stream.dtype, copy=False)
        return result

    def _advice(self, same: bool) -> str:
        """What to do about a sequence (the same one, or another) whose length has changed."""
        by_corpus = self._reader.about.by_corpus
        file = self._reader.file.path("corpus" if by_corpus else f"epoch-{1 if self._reader.source.constant else self._epoch}")
        if file is None:
            return "its lengths were found by reading it once before; if they differ between epochs, set lengths_dir"
        found = f"its lengths were found before, in {file}: if the data or a function has changed since then, remove this file"
        if not by_corpus or not same:
            return found
        self._reader.note_that_lengths_vary()
        return f"{found}; if lengths differ between epochs, start again: from now on, each epoch is read for its lengths"


def open_streamed(where: str, source: Streamed, scanning: Scanning, num_workers: int = 1) -> Dataset:
    """Open a source that is read from beginning to end, to train or evaluate on. Raises: DataError."""
    reader = Reader(where, source, scanning, num_workers)
    try:
        return StreamedDataset(reader, 1)
    except BaseException:
        reader.close()
        raise


def _checksum_of(corpus: SequenceTable) -> int:
    return zlib.crc32(corpus.tags.tobytes())
