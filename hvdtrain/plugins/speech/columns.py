"""The data keys of a Kaldi folder: each reads one kind of line of one table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.broken import finite_problem
from hvdtrain.data.formats.item_form import stream_of
from hvdtrain.data.indexed import UNREADABLE
from hvdtrain.data.padding import holds
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.speech.log_mel import LogMel
from hvdtrain.plugins.speech.sound import SoundReader, load_archived
from hvdtrain.plugins.speech.tables import Table
from hvdtrain.plugins.speech.text import RawText, TextEncoder, UnitEncoder
from hvdtrain.plugins.speech.vocabulary import LOOKED_AT

OVERSHOOT = 0.5
"""Seconds by which a segment may end after its recording, as in Kaldi: it then ends with the recording."""


class Column(ABC):
    """A data key of a folder. Sequences are numbered as the utterances of the folder.

    Args:
        table: has a line for the sequences.
        positions: the number of the line of each sequence.
    """

    stream: Stream

    def __init__(self, table: Table, positions: Array) -> None:
        self.table = table
        self.positions = positions

    @abstractmethod
    def read(self, index: int) -> Array:
        """The array of a sequence. Raises: BrokenSequence."""

    def lengths(self) -> Array | None:
        """The lengths of all sequences, as far as they are known without reading; `UNREADABLE`: it is broken; None: unknown."""
        return None

    def length(self, index: int) -> int:
        """The length of a sequence. Raises: BrokenSequence."""
        return len(self.read(index))

    def value(self, index: int) -> str:
        """What the line of a sequence has."""
        return self.table.value(int(self.positions[index]))

    def where(self, index: int) -> str:
        """The line of a sequence, for messages."""
        return self.table.where(int(self.positions[index]))

    def _count(self) -> Array:
        """The lengths of all sequences, by reading them; `UNREADABLE` of those that cannot be read."""
        lengths = numpy.full(len(self.positions), UNREADABLE, numpy.int32)
        for index in range(len(lengths)):
            try:  # which takes less than `suppress`
                lengths[index] = self.length(index)
            except BrokenSequence:
                continue  # reading it again gives the message
        return lengths

    def _first(self, read: Callable[[int], Any]) -> Any:
        """What a function returns for the first sequence that can be read. Raises: BrokenSequence, if none can."""
        for index in range(len(self.positions)):
            try:
                return read(index)
            except BrokenSequence as error:
                failure = error
        raise failure


class TextColumn(Column):
    """Transcripts."""

    def __init__(self, table: Table, positions: Array, encoder: TextEncoder) -> None:
        super().__init__(table, positions)
        self._encoder = encoder
        self.stream = encoder.stream

    def read(self, index: int) -> Array:
        return self._encoder.encode(self.value(index), self.where(index))

    def length(self, index: int) -> int:
        return self._encoder.length(self.value(index), self.where(index))

    def lengths(self) -> Array | None:
        if isinstance(self._encoder, RawText):
            return numpy.ones(len(self.positions), numpy.int32)
        return self._count() if isinstance(self._encoder, UnitEncoder) else None

    def misfit(self) -> str:
        """What to say if a vocabulary does not fit the first transcripts; '': nothing."""
        first = range(min(LOOKED_AT, len(self.positions)))
        return self._encoder.misfit(map(self.value, first)) if isinstance(self._encoder, UnitEncoder) else ""


class NumbersColumn(Column):
    """Numbers in the line itself, separated by spaces or commas."""

    def __init__(self, table: Table, positions: Array, dtype: str) -> None:
        super().__init__(table, positions)
        self._dtype = numpy.dtype(dtype)
        largest = 0
        if self._dtype.kind == "i":
            for index in range(len(positions)):
                with suppress(BrokenSequence):
                    largest = max(largest, int(self.read(index).max(initial=0)))
        self.stream = Stream(self._dtype, (), largest + 1 if self._dtype.kind == "i" else 1, sparse=self._dtype.kind == "i")

    def read(self, index: int) -> Array:
        try:
            return numpy.array(self.value(index).replace(",", " ").split(), dtype=self._dtype)
        except (ValueError, OverflowError):
            raise BrokenSequence(f"{self.where(index)}: expected numbers, got {self.value(index)[:80]!r}") from None

    def lengths(self) -> Array:
        return self._count()


class ArrayColumn(Column):
    """Arrays in archives of Kaldi or in .npy files: vectors, or class indices; a single vector is a sequence of one frame."""

    def __init__(self, table: Table, positions: Array, root: Path, kind: str, allow_commands: bool) -> None:
        super().__init__(table, positions)
        self._root = root
        self._kind = kind
        self._allow_commands = allow_commands
        self.stream = stream_of(self._first(self._load))

    def read(self, index: int) -> Array:
        values = self._load(index)
        if values.shape[1:] != self.stream.shape or values.dtype != self.stream.dtype:
            raise BrokenSequence(
                f"{self.where(index)}: expected {self.stream.dtype} frames of shape {self.stream.shape} as in the first line, "
                f"got {values.dtype} of shape {values.shape[1:]}"
            )
        return check_finite(values, self.where(index))

    def _load(self, index: int) -> Array:
        name = self.value(index)
        where = self.where(index)
        values: Any
        if self._kind == "npy":
            path = self._root / name
            try:
                values = numpy.load(path, allow_pickle=False)
            except (OSError, ValueError, EOFError) as error:
                raise BrokenSequence(f"{where}: expected a .npy file of numbers, got: {error}") from None
        else:
            values = load_archived(self._root, name, where, self._allow_commands)
        if not isinstance(values, numpy.ndarray) or values.ndim == 0 or values.dtype.kind not in "iuf":
            raise BrokenSequence(f"{where}: expected an array of numbers, got {type(values).__name__}")
        if values.dtype.kind == "f":
            return numpy.atleast_2d(values.astype(numpy.float32, copy=False))
        if not holds(numpy.dtype(numpy.int32), values.astype(numpy.int64)):
            raise BrokenSequence(
                f"{where}: expected integers that int32 holds, got {values.dtype} from {values.min()} to {values.max()}"
            )
        classes: Array = values.astype(numpy.int32)
        return classes


class SoundColumn(Column):
    """Sound, from -1 to 1, of shape (samples, channels): whole recordings, or segments of them.

    Args:
        recordings: the wav.scp; the table itself, unless that is `segments`.
        rate: samples per second; None: those of the first recording.
    """

    def __init__(self, table: Table, positions: Array, recordings: Table, reader: SoundReader, rate: int | None) -> None:
        super().__init__(table, positions)
        self._recordings = recordings
        self._reader = reader
        self._lines = positions  # of the recordings
        self._starts: Array | None = None
        self._stops: Array | None = None  # none of segments that end with the recording, until its length is known
        self._has_rate_of_first = rate is None
        self._chosen = numpy.full(len(positions), -1)  # of all channels, by sequence; -1: none is chosen
        if table is not recordings:
            self._lines, times, self._chosen = _segments(table, positions, recordings)
        info = self._first(lambda index: reader.info(*self._recording(index)))
        self.rate = rate or info.rate
        self._chooses = bool((self._chosen >= 0).any())
        self._channels = 1 if self._chooses else info.channels
        self.stream = Stream(numpy.dtype(numpy.float32), (self._channels,), self._channels, sparse=False)
        self.tolerance = 0
        self._lengths: Array | None = None
        if table is not recordings:
            self._starts = numpy.rint(times[:, 0] * self.rate).astype(numpy.int64)
            self._stops = numpy.where(times[:, 1] < 0, -1, numpy.rint(times[:, 1] * self.rate)).astype(numpy.int64)

    def set_lengths(self, lengths: Array, tolerance: int = 0) -> None:
        """Set the numbers of samples of the sequences, as another file has them.

        Args:
            tolerance: the samples by which they may be wrong, as the file has rounded seconds: that many are cut or filled in.
        """
        self._lengths = lengths.astype(numpy.int32)
        self.tolerance = tolerance
        if self._starts is not None:
            self._stops = self._starts + lengths

    def lengths(self) -> Array | None:
        return self._lengths

    @property
    def num_recordings(self) -> int:
        """The number of recordings that segments are parts of; 0: the sequences are whole recordings."""
        return 0 if self._starts is None else len(self._recordings.ids)

    def recording_length(self, line: int) -> int:
        """The number of samples of a recording, by its line. Raises: BrokenSequence."""
        return self._checked_info(self._recordings.value(line), self._recordings.where(line))

    def set_recording_lengths(self, of_recordings: Array) -> None:
        """Cut the segments to the recordings, whose lengths are now known."""
        if self._starts is None or self._stops is None:
            return
        ends = of_recordings[self._lines]
        stops = numpy.where(self._stops < 0, ends, self._stops)
        stops = numpy.where((stops > ends) & (stops <= ends + OVERSHOOT * self.rate), ends, stops)
        good = (ends >= 0) & (stops <= ends) & (self._starts < stops)
        self._lengths = numpy.where(good, stops - self._starts, UNREADABLE).astype(numpy.int32)
        self._stops = stops

    def length(self, index: int) -> int:
        samples = self._checked_info(*self._recording(index))
        if self._starts is None or self._stops is None:
            return samples
        start = int(self._starts[index])
        stop = int(self._stops[index])
        stop = samples if stop < 0 or samples < stop <= samples + OVERSHOOT * self.rate else stop
        if not start < stop <= samples:
            raise BrokenSequence(
                f"{self.where(index)}: expected a segment of the recording, which has {samples / self.rate:g} seconds, got "
                f"{self.value(index)!r}"
            )
        if self._lengths is not None:  # it could not be read when the lengths were found
            self._lengths[index] = stop - start
            self._stops[index] = stop
        return stop - start

    def read(self, index: int) -> Array:
        name, where = self._recording(index)
        start = 0 if self._starts is None else int(self._starts[index])
        stop = None if self._stops is None or self._stops[index] < 0 else int(self._stops[index])
        samples, rate = self._reader.read(name, where, start, stop)
        if (chosen := int(self._chosen[index])) >= 0:
            if chosen >= samples.shape[1]:
                raise BrokenSequence(
                    f"{where}: expected a channel below {samples.shape[1]}, got {chosen} in {self.value(index)!r}"
                )
            samples = samples[:, chosen : chosen + 1]
        self._check(rate, samples.shape[1], where)
        expected = len(samples) if self._lengths is None else int(self._lengths[index])
        if samples_differ := expected - len(samples):
            if abs(samples_differ) > self.tolerance:
                raise BrokenSequence(
                    f"{where}: expected {expected} samples, as its length was given or found, got {len(samples)}"
                )
            samples = numpy.pad(samples[:expected], ((0, max(0, samples_differ)), (0, 0)))
        return check_finite(samples, where)

    def _recording(self, index: int) -> tuple[str, str]:
        """The file or command of a sequence, and its line for messages."""
        line = int(self._lines[index])
        where = self._recordings.where(line)
        if self.table is not self._recordings:
            where = f"{self.where(index)}, of {where}"
        return self._recordings.value(line), where

    def _checked_info(self, name: str, where: str) -> int:
        info = self._reader.info(name, where)
        self._check(info.rate, self._channels if self._chooses else info.channels, where)
        return info.samples

    def _check(self, rate: int, channels: int, where: str) -> None:
        if rate != self.rate:
            origin = "as the first recording has" if self._has_rate_of_first else "as sample_rate says"
            raise BrokenSequence(f"{where}: expected {self.rate} samples per second, {origin}, got {rate}")
        if channels != self._channels:
            whose = "as other segments have" if self._chooses else "as the first recording has"
            raise BrokenSequence(f"{where}: expected {self._channels} channels, {whose}, got {channels}")


class FbankColumn(Column):
    """Log mel features of sound."""

    def __init__(self, sound: SoundColumn, mel: LogMel) -> None:
        super().__init__(sound.table, sound.positions)
        self._sound = sound
        self._mel = mel
        self.stream = mel.stream

    def read(self, index: int) -> Array:
        return self._mel.features(self._sound.read(index))

    def lengths(self) -> Array | None:
        samples = self._sound.lengths()
        return None if samples is None else numpy.where(samples < 0, UNREADABLE, self._mel.num_frames(samples))

    def length(self, index: int) -> int:
        return int(self._mel.num_frames(numpy.array(self._sound.length(index))))


def check_finite(values: Array, where: str) -> Array:
    """The array. Raises: BrokenSequence, if a number is NaN or infinite."""
    if problem := finite_problem(values):
        raise BrokenSequence(f"{where}: {problem}")
    return values


def _segments(table: Table, positions: Array, recordings: Table) -> tuple[Array, Array, Array]:
    """The lines of the recordings of segments; their begin and end in seconds (an end of -1: that of the recording); and their
    channels, counted from 0 (-1: all).

    Raises:
        DataError: a line is not as described, or has a recording that there is not.
    """
    names = [b""] * len(positions)
    times = numpy.zeros((len(positions), 2))
    channels = numpy.full(len(positions), -1)
    for index, position in enumerate(positions.tolist()):
        fields = table.value(position).split()
        try:
            begin, end = map(float, fields[1:3])
            channel = int(fields[3]) if len(fields) > 3 else -1
            is_right = begin >= 0 and (end > begin or end < 0) and channel >= -1 and len(fields) <= 4
        except ValueError:
            is_right = False
        if not is_right:
            raise DataError(
                f"{table.where(position)}: expected `recording begin end` in seconds, and perhaps a channel, got "
                f"{table.value(position)!r}"
            )
        names[index] = fields[0].encode()
        times[index] = begin, end
        channels[index] = channel
    lines = recordings.positions(numpy.array(names, dtype=bytes))
    if len(unknown := numpy.flatnonzero(lines < 0)):
        index = int(unknown[0])
        raise DataError(
            f"{table.where(int(positions[index]))}: expected a recording of {recordings.path}, got {names[index].decode()!r}"
        )
    return lines, times, channels
