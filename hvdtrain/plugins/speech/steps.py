"""Steps of a `map_seq`: features, augmentation and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from fractions import Fraction
from functools import lru_cache

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.steps import Draw, Step
from hvdtrain.plugins.speech import step_keys
from hvdtrain.plugins.speech.log_mel import LogMel
from hvdtrain.plugins.speech.text import text_encoder


class LogMelStep(Step):
    """Sound becomes log mel features."""

    def __init__(self, keys: step_keys.LogMelKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._mel = LogMel(**asdict(keys))

    def apply(self, values: Array, draw: Draw) -> Array:
        return self._mel.features(values)

    def stream(self, stream: Stream) -> Stream:
        _check_sound("LogMel", self.key, stream)
        return self._mel.stream

    def lengths(self, lengths: Array, seed: int, epoch: int) -> Array:
        return self._mel.num_frames(lengths)


class SpecAugment(Step):
    """Spans of frames and of features are set to the mean of the sequence."""

    def __init__(self, keys: step_keys.SpecAugmentKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._keys = keys

    def apply(self, values: Array, draw: Draw) -> Array:
        keys = self._keys
        frames, features = values.shape
        if not frames:
            return values
        masked = values.copy()
        mean = values.mean()
        longest = min(keys.time_frames, int(keys.time_share * frames))
        for _ in range(keys.time_masks):
            begin, end = _span(frames, longest, draw.rng)
            masked[begin:end] = mean
        for _ in range(keys.feature_masks):
            begin, end = _span(features, min(keys.feature_width, features), draw.rng)
            masked[:, begin:end] = mean
        return masked

    def stream(self, stream: Stream) -> Stream:
        if len(stream.shape) != 1 or stream.dtype.kind != "f":
            raise DataError(f"SpecAugment: expected vectors of numbers in {self.key!r}, got frames of shape {stream.shape}")
        return stream


def _span(size: int, longest: int, rng: numpy.random.RandomState) -> tuple[int, int]:
    length = int(rng.randint(0, longest + 1))
    begin = int(rng.randint(0, size - length + 1))
    return begin, begin + length


WINGS = 16
"""The zero crossings of the low-pass filter on each side."""


class SpeedPerturbation(Step):
    """Sound is resampled, as with `speed` of sox: a filter with WINGS zero crossings on each side, under a Hann window."""

    has_random_lengths = True

    def __init__(self, keys: step_keys.SpeedPerturbationKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._factors = [Fraction(factor).limit_denominator(1000) for factor in keys.factors]
        self._filters = {factor: _filters(factor) for factor in self._factors if factor != 1}

    def apply(self, values: Array, draw: Draw) -> Array:
        factor = self._factors[_choice(draw.seed, draw.epoch, draw.index, len(self._factors))]
        if factor == 1 or not len(values):
            return values
        filters, reach = self._filters[factor]
        count = -(-len(values) * factor.denominator // factor.numerator)
        steps = numpy.arange(count) * factor.numerator
        places = steps // factor.denominator
        padded = numpy.pad(values.astype(numpy.float32), ((reach - 1, reach + 1), (0, 0)))
        resampled = numpy.zeros((count, values.shape[1]), numpy.float32)
        weights = filters[steps % factor.denominator]
        for offset in range(2 * reach):
            resampled += weights[:, offset, None] * padded[places + offset]
        return resampled

    def stream(self, stream: Stream) -> Stream:
        _check_sound("SpeedPerturbation", self.key, stream)
        return stream

    def lengths(self, lengths: Array, seed: int, epoch: int) -> Array:
        chosen = _choices(seed, epoch, len(lengths), len(self._factors))
        by_factor = numpy.array([(factor.numerator, factor.denominator) for factor in self._factors], numpy.int64)[chosen]
        return (-(-lengths.astype(numpy.int64) * by_factor[:, 1] // by_factor[:, 0])).astype(numpy.int32)


def _filters(factor: Fraction) -> tuple[Array, int]:
    """The weights of the samples around each place between two samples, of shape (denominator, 2 * reach); and the reach."""
    cutoff = min(1.0, 1.0 / float(factor))
    reach = int(numpy.ceil(WINGS / cutoff))
    shifts = numpy.arange(factor.denominator)[:, None] / factor.denominator
    distances = numpy.arange(-reach + 1, reach + 1)[None] - shifts
    window = numpy.where(abs(distances) < reach, 0.5 + 0.5 * numpy.cos(numpy.pi * distances / reach), 0.0)
    weights = cutoff * numpy.sinc(cutoff * distances) * window
    return (weights / weights.sum(axis=1, keepdims=True)).astype(numpy.float32), reach


@lru_cache(maxsize=4)
def _choices(seed: int, epoch: int, size: int, count: int) -> Array:
    """A number below `count` for each of `size` sequences. That of a sequence does not depend on `size`."""
    return numpy.random.RandomState([seed, epoch, 0x5EED]).randint(0, count, size)


def _choice(seed: int, epoch: int, index: int, count: int) -> int:
    size = 1 << max(10, index.bit_length())  # the same array for many sequences
    return int(_choices(seed, epoch, size, count)[index])


class AddNoise(Step):
    """Noise of another dataset is added to sound, from a random place on, repeated if it is too short."""

    def __init__(self, keys: step_keys.AddNoiseKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._noise = datasets[keys.noise]
        self._keys = keys

    def apply(self, values: Array, draw: Draw) -> Array:
        rng = draw.rng
        low, high = self._keys.snr
        is_chosen = rng.rand() < self._keys.share
        ratio = rng.uniform(low, high)
        number = rng.rand()
        place = rng.rand()
        if not is_chosen or not len(values):
            return values
        noise = self._noise.sequence(int(number * self._noise.num_sequences))["data"]
        if not len(noise):
            return values
        piece = numpy.resize(numpy.roll(noise, -int(place * len(noise)), axis=0), values.shape)
        power = float(numpy.square(values).mean())
        noise_power = float(numpy.square(piece).mean())
        if not power or not noise_power:
            return values
        return (values + piece * numpy.float32((power / noise_power) ** 0.5 * 10 ** (-ratio / 20))).astype(values.dtype)

    def stream(self, stream: Stream) -> Stream:
        _check_sound("AddNoise", self.key, stream)
        noise = self._noise.streams.get("data")
        if noise is None or noise.shape != stream.shape or noise.dtype.kind != "f":
            got = "no data key 'data'" if noise is None else f"{noise.dtype} of shape {noise.shape}"
            raise DataError(f"AddNoise: expected noise like the sound, {stream.dtype} of shape {stream.shape}, got {got}")
        return stream


class TokensStep(Step):
    """A text becomes class indices."""

    has_unknown_lengths = True

    def __init__(self, keys: step_keys.TokensKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        vocabularies = keys.of_key("vocabulary", keys.key), keys.of_key("vocabulary_from", keys.key)
        self._encoder = text_encoder(str(keys.units), *vocabularies)

    def apply(self, values: Array, draw: Draw) -> Array:
        return self._encoder.encode(" ".join(map(str, values)), f"sequence {draw.index}")

    def stream(self, stream: Stream) -> Stream:
        if stream.dtype != object:
            raise DataError(f"Tokens: expected texts in {self.key!r}, got {stream.dtype} (KaldiFolder: units = 'text')")
        return self._encoder.stream


def _check_sound(step: str, key: str, stream: Stream) -> None:
    if stream.dtype.kind != "f" or len(stream.shape) != 1:
        raise DataError(
            f"{step}: expected sound in {key!r}, numbers of shape (samples, channels), got {stream.dtype} frames of shape "
            f"{stream.shape}"
        )
