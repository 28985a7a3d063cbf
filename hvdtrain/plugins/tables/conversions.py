"""Conversions of stored values to arrays: numbers, texts as classes of a vocabulary, encoded sound."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.speech.vocabulary import LOOKED_AT, Units, Vocabulary, split
from hvdtrain.plugins.speech.wav import damage, is_length_guessed

Convert = Callable[[Any, str], Array]
"""Turns a stored value into an array; also gets a description of its place for messages. Raises: DataError."""


def check_units(units: str, kind: str) -> None:
    """Check the argument `units` of a class of datasets. Raises: ConfigError."""
    if units not in ("characters", "words"):
        raise ConfigError.of("unknown-value", f"units: expected 'characters' or 'words', got {units!r} in the {kind}")


def load_npy(file: Path | io.BytesIO, where: str) -> Array:
    """The array in a .npy file. Raises: DataError."""
    try:
        values: Any = numpy.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{where}: expected a .npy file of numbers, got: {error}") from None
    if not isinstance(values, numpy.ndarray):
        raise DataError(f"{where}: expected a .npy file of numbers, got an archive of several arrays")
    return values


def numbers(axes: int, dtype: str) -> Convert:
    """Of numbers with one or two axes. A single number is a sequence of one frame."""

    def convert(value: Any, where: str) -> Array:
        try:
            ragged = isinstance(value, numpy.ndarray) and value.dtype == object
            array = numpy.asarray(list(value) if ragged else value, dtype=dtype)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}: expected numbers in rows of the same length, got: {error}") from None
        array = array.reshape(1) if array.ndim == 0 else array
        if array.ndim != axes:
            raise DataError(f"{where}: expected numbers with {axes} axes, got {array.ndim} of shape {array.shape}")
        return array

    return convert


class TextClasses:
    """Of a text, or of a list whose strings are entries of the vocabulary."""

    def __init__(self, vocabulary: Vocabulary, units: Units) -> None:
        self._vocabulary = vocabulary
        self._units = units
        self._first: list[list[str]] = []
        self.labels = vocabulary.entries

    def __call__(self, value: Any, where: str) -> Array:
        entries = split(str(value), self._units) if isinstance(value, str) else [str(entry) for entry in value]
        if len(self._first) < LOOKED_AT:
            self._first.append(entries)
        self._vocabulary.check(entries, where, str(value))
        return self._vocabulary.classes(entries)

    def misfit(self) -> str:
        """What to say if most units of the first texts are not in the vocabulary; '': nothing."""
        return self._vocabulary.misfit(self._first)


def sound(rate: int | None = None, channels: int | None = None) -> Convert:
    """Decode sound: the bytes of a file, or a dict with `bytes` or a `path`, and perhaps its `sampling_rate`.

    Args:
        rate: in Hz; None: that of the first file that is read.
        channels: their number; None: any.
    """
    soundfile = import_package("soundfile", "Audio")
    rates = [rate] * (rate is not None)

    def convert(value: Any, where: str) -> Array:
        about = value if isinstance(value, dict) else {"bytes": value}
        encoded = about.get("bytes")
        path = about.get("path")
        says = about.get("sampling_rate")
        if encoded is None and not path:
            raise DataError(f"{where}: expected a sound file, got neither its bytes nor a path")
        try:
            encoded = Path(str(path)).read_bytes() if encoded is None else encoded
            if problem := damage(io.BytesIO(encoded), len(encoded)):
                raise DataError(f"{where}: expected a whole sound file, got {problem}")
            with soundfile.SoundFile(io.BytesIO(encoded)) as file:
                rate = file.samplerate
                says_frames = file.frames
                samples = file.read(-1 if file.seekable() else says_frames, dtype="float32", always_2d=True)  # GSM cannot seek
            if len(samples) < says_frames and not is_length_guessed(io.BytesIO(encoded)):
                raise DataError(
                    f"{where}: expected {says_frames} samples, as the file says, got {len(samples)} (was it cut off?)"
                )
        except (OSError, RuntimeError) as error:
            raise DataError(f"{where}: expected a sound file, got: {getattr(error, 'error_string', error)}") from None
        if channels not in (None, samples.shape[1]):
            raise DataError(
                f"{where}: expected sound with as many channels as its Audio says, {channels}, got {samples.shape[1]}"
            )
        rates.append(rate)
        if rate != rates[0] or says not in (None, rate):
            expected = rates[0] if rate != rates[0] else says
            raise DataError(f"{where}: expected {expected} samples per second, got {rate}")
        del rates[1:]
        return samples  # type: ignore[no-any-return]  # soundfile has no types

    return convert
