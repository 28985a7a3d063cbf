"""Conversions of stored values to arrays: numbers, texts as classes of a vocabulary, encoded sound."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy

from hvdtrain.data.formats.folder import Units, Vocabulary, split
from hvdtrain.data.formats.wav import damage, damage_of_file
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

Convert = Callable[[Any, str], Array]
"""Turns a stored value into an array; also gets a description of its place for messages. Raises: DataError."""


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


def classes(vocabulary: Vocabulary, units: Units) -> Convert:
    """Of a text, or of a list whose strings are entries of the vocabulary."""

    def convert(value: Any, where: str) -> Array:
        entries = split(str(value), units) if isinstance(value, str) else [str(entry) for entry in value]
        vocabulary.check(entries, where, str(value))
        return vocabulary.classes(entries)

    return convert


def sound(rate: int | None) -> Convert:
    """Decode sound of a sampling rate in Hz; None: that of the first file that is read."""
    try:
        import soundfile
    except ImportError:
        raise DataError("Audio: expected the package soundfile, got none (pip install soundfile)") from None
    rates = [rate] * (rate is not None)

    def convert(value: Any, where: str) -> Array:
        encoded = value["bytes"]
        try:
            if problem := damage_of_file(value["path"]) if encoded is None else damage(io.BytesIO(encoded), len(encoded)):
                raise DataError(f"{where}: expected a whole sound file, got {problem}")
            samples, found = soundfile.read(
                value["path"] if encoded is None else io.BytesIO(encoded), dtype="float32", always_2d=True
            )
        except (OSError, RuntimeError) as error:
            raise DataError(f"{where}: expected a sound file, got: {error}") from None
        rates.append(found)
        if found != rates[0]:
            raise DataError(f"{where}: expected {rates[0]} samples per second, got {found}")
        del rates[1:]
        return samples  # type: ignore[no-any-return]  # soundfile has no types

    return convert
