"""Log mel features as Kaldi computes them, from sound, in numpy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy

from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import ConfigError

FULL_SCALE = 32768.0
"""Kaldi's features are those of 16-bit integers; sound here is from -1 to 1."""

PREEMPHASIS = 0.97

SMALLEST = float(numpy.finfo(numpy.float32).eps)
"""The floor of energies before the logarithm."""

AT_ONCE = 200
"""Frames that are computed at once: few enough for the cache of a core."""


class LogMel:
    """Log energies of triangular mel filters: `compute-fbank-feats` of Kaldi without dither, with its defaults.

    In a config, the class can be the `map_seq` of a MapDataset, and its `lengths` the `map_lengths`:

        mel = LogMel(sample_rate=16000)
        train = {"class": "MapDataset", "dataset": ..., "map_seq": mel, "map_lengths": mel.lengths, "map_outputs": ...}

    Args:
        sample_rate: samples per second.
        num_mels: the number of filters.
        window: seconds of a frame.
        hop: seconds between the beginnings of two frames. A frame is inside the sound, so the last samples may be in no frame.
        low, high: the frequencies in Hz at which the lowest filter begins and the highest ends; zero or less for `high`: that
            many below half of the sample rate.
        key: the data key of the sound, which the features replace.
    """

    def __init__(
        self,
        sample_rate: int = 16000,
        num_mels: int = 80,
        window: float = 0.025,
        hop: float = 0.01,
        low: float = 20.0,
        high: float = 0.0,
        key: str = "data",
    ) -> None:
        self.sample_rate = sample_rate
        self.num_mels = num_mels
        self.key = key
        self._window = int(sample_rate * window)
        self._hop = int(sample_rate * hop)
        top = high if high > 0 else sample_rate / 2 + high
        if self._hop < 1 or self._window < 2 or num_mels < 1 or not 0 <= low < top <= sample_rate / 2:
            raise ConfigError.of(
                "out-of-range",
                f"log_mel: expected frames of several samples and frequencies from 0 to {sample_rate / 2:g} Hz, got "
                f"window {window}, hop {hop}, {num_mels} filters from {low} to {top:g} Hz",
            )
        self._fft = 1 << (self._window - 1).bit_length()
        steps = numpy.arange(self._window)
        hann = 0.5 - 0.5 * numpy.cos(2 * numpy.pi * steps / (self._window - 1))
        self._shape = (hann**0.85).astype(numpy.float32)  # Kaldi's window, called Povey's
        self._filters = _filters(num_mels, self._fft, sample_rate, low, top)

    @property
    def stream(self) -> Stream:
        """What the features are."""
        return Stream(numpy.dtype(numpy.float32), (self.num_mels,), self.num_mels, sparse=False)

    def num_frames(self, samples: Array) -> Array:
        """The number of frames of sounds, given their numbers of samples."""
        frames: Array = numpy.maximum(0, (numpy.asarray(samples) - self._window) // self._hop + 1)
        return frames.astype(numpy.int32)

    def features(self, sound: Array) -> Array:
        """Features of shape (frames, num_mels) of sound of shape (samples,) or (samples, channels), whose mean is used."""
        mono = sound.mean(axis=1) if sound.ndim == 2 and sound.shape[1] != 1 else sound.reshape(-1)
        count = int(self.num_frames(numpy.array(len(mono))))
        result = numpy.empty((count, self.num_mels), numpy.float32)
        scaled = numpy.ascontiguousarray(mono, dtype=numpy.float32) * numpy.float32(FULL_SCALE)
        for first in range(0, count, AT_ONCE):
            last = min(first + AT_ONCE, count)
            frames = numpy.lib.stride_tricks.sliding_window_view(scaled, self._window)[first * self._hop :: self._hop][
                : last - first
            ]
            frames = frames - frames.mean(axis=1, keepdims=True)
            before = numpy.concatenate([frames[:, :1], frames[:, :-1]], axis=1)
            spectrum = numpy.fft.rfft((frames - numpy.float32(PREEMPHASIS) * before) * self._shape, self._fft, axis=1)
            power = spectrum.real**2 + spectrum.imag**2
            energies = power[:, : self._fft // 2] @ self._filters
            result[first:last] = numpy.log(numpy.maximum(energies, SMALLEST))
        return result

    def __call__(self, arrays: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of a sequence with features in place of its sound."""
        return {**arrays, self.key: self.features(arrays[self.key])}

    def lengths(self, lengths: Mapping[str, Array]) -> dict[str, Array]:
        """The lengths of all sequences with those of features in place of those of sound."""
        return {**lengths, self.key: self.num_frames(lengths[self.key])}


def mel(frequency: Any) -> Any:
    """A frequency in Hz on the mel scale."""
    return 1127.0 * numpy.log(1.0 + frequency / 700.0)


def _filters(num_mels: int, fft: int, sample_rate: int, low: float, high: float) -> Array:
    """Triangles over the bins of a spectrum: float32 of shape (fft // 2, num_mels)."""
    bins = mel(numpy.arange(fft // 2) * (sample_rate / fft))[:, None]
    edges = numpy.linspace(mel(low), mel(high), num_mels + 2)
    lowest = edges[:-2]
    center = edges[1:-1]
    highest = edges[2:]
    triangles: Array = numpy.minimum((bins - lowest) / (center - lowest), (highest - bins) / (highest - center))
    return triangles.clip(min=0.0).astype(numpy.float32)


def log_mel_of(where: str, rate: int, arguments: Mapping[str, Any]) -> LogMel:
    """That of the key `log_mel` of a dataset, given the rate of its sound. Raises: ConfigError."""
    try:
        return LogMel(**{"sample_rate": rate, **arguments})
    except TypeError as error:
        raise ConfigError.of("unknown-key", f"{where}.log_mel: expected arguments of LogMel, got: {error}") from None
