"""Steps of a `map_seq`: features, augmentation and tokens, which know the lengths and the form of what they make.

Random numbers depend on the seed, the epoch and the sequence only, so they are the same on any number of ranks and after a stop.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy

from hvdtrain.config.source import resolve
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.fingerprint import fingerprint_of
from hvdtrain.data.formats.items import Counted
from hvdtrain.data.speech.found import lengths_by_reading
from hvdtrain.data.speech.log_mel import LogMel
from hvdtrain.data.speech.step_keys import (
    AddNoiseKeys,
    LogMelKeys,
    SpecAugmentKeys,
    SpeedPerturbationKeys,
    StepKeys,
    TokensKeys,
)
from hvdtrain.data.speech.text import text_encoder
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError

Arrays = Mapping[str, Array]
Streams = Mapping[str, Stream]


@dataclass(frozen=True)
class Draw:
    """Where random numbers are drawn.

    Attributes:
        index: of the sequence.
        rng: of the seed, the epoch and the sequence.
    """

    seed: int
    epoch: int
    index: int
    rng: numpy.random.RandomState


class Step(ABC):
    """Changes the arrays of a sequence. It may be given read-only arrays.

    Attributes:
        key: the data key that it changes.
        has_random_lengths: whether the new lengths depend on the epoch.
        has_found_lengths: whether the new lengths are only known from reading.
    """

    has_random_lengths = False
    has_found_lengths = False

    def __init__(self, key: str) -> None:
        self.key = key

    @abstractmethod
    def apply(self, values: Array, draw: Draw) -> Array:
        """The new array of the data key. Raises: BrokenSequence."""

    def stream(self, stream: Stream) -> Stream:
        """What the new array is, given the old one's. Raises: DataError, if the step cannot be applied to it."""
        return stream

    def lengths(self, lengths: Array, seed: int, epoch: int) -> Array:
        """The new lengths of all sequences, given the old ones."""
        return lengths


class LogMelStep(Step):
    """Sound becomes log mel features."""

    def __init__(self, keys: LogMelKeys, datasets: Mapping[str, Dataset]) -> None:
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

    def __init__(self, keys: SpecAugmentKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._keys = keys

    def apply(self, values: Array, draw: Draw) -> Array:
        keys, (frames, features) = self._keys, values.shape
        if not frames:
            return values
        masked, mean = values.copy(), values.mean()
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

    def __init__(self, keys: SpeedPerturbationKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._factors = [Fraction(factor).limit_denominator(1000) for factor in keys.factors]
        self._filters = {factor: _filters(factor) for factor in self._factors if factor != 1}

    def apply(self, values: Array, draw: Draw) -> Array:
        factor = self._factors[_choice(draw.seed, draw.epoch, draw.index, len(self._factors))]
        if factor == 1 or not len(values):
            return values
        filters, reach = self._filters[factor]
        count = _resampled_length(len(values), factor)
        steps = numpy.arange(count) * factor.numerator
        places = steps // factor.denominator
        padded = numpy.pad(values.astype(numpy.float32), ((reach - 1, reach + 1), (0, 0)))
        made = numpy.zeros((count, values.shape[1]), numpy.float32)
        weights = filters[steps % factor.denominator]
        for offset in range(2 * reach):
            made += weights[:, offset, None] * padded[places + offset]
        return made

    def stream(self, stream: Stream) -> Stream:
        _check_sound("SpeedPerturbation", self.key, stream)
        return stream

    def lengths(self, lengths: Array, seed: int, epoch: int) -> Array:
        chosen = _choices(seed, epoch, len(lengths), len(self._factors))
        by_factor = numpy.array([(factor.numerator, factor.denominator) for factor in self._factors], numpy.int64)[chosen]
        return (-(-lengths.astype(numpy.int64) * by_factor[:, 1] // by_factor[:, 0])).astype(numpy.int32)


def _resampled_length(samples: int, factor: Fraction) -> int:
    return -(-samples * factor.denominator // factor.numerator)


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

    def __init__(self, keys: AddNoiseKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        self._noise = datasets[keys.noise]
        self._keys = keys

    def apply(self, values: Array, draw: Draw) -> Array:
        rng = draw.rng
        low, high = self._keys.snr
        is_chosen, ratio, number, place = rng.rand(), rng.uniform(low, high), rng.rand(), rng.rand()
        if is_chosen >= self._keys.share or not len(values):
            return values
        noise = self._noise.sequence(int(number * self._noise.num_sequences))["data"]
        if not len(noise):
            return values
        taken = numpy.resize(numpy.roll(noise, -int(place * len(noise)), axis=0), values.shape)
        power, of_noise = float(numpy.square(values).mean()), float(numpy.square(taken).mean())
        if not power or not of_noise:
            return values
        return (values + taken * numpy.float32((power / of_noise) ** 0.5 * 10 ** (-ratio / 20))).astype(values.dtype)

    def stream(self, stream: Stream) -> Stream:
        _check_sound("AddNoise", self.key, stream)
        found = self._noise.streams.get("data")
        if found is None or found.shape != stream.shape or found.dtype.kind != "f":
            got = "no data key 'data'" if found is None else f"{found.dtype} of shape {found.shape}"
            raise DataError(f"AddNoise: expected noise like the sound, {stream.dtype} of shape {stream.shape}, got {got}")
        return stream


class TokensStep(Step):
    """A text becomes class indices."""

    has_found_lengths = True

    def __init__(self, keys: TokensKeys, datasets: Mapping[str, Dataset]) -> None:
        super().__init__(keys.key)
        given = keys.of_key("vocabulary", keys.key), keys.of_key("vocabulary_from", keys.key)
        self._encoder = text_encoder(str(keys.units), *given)

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


class Pipeline:
    """The steps of a `map_seq`, one after the other; functions keep all lengths.

    Args:
        where: the config key, for messages.
        steps: keys of steps, or functions.
        call: calls a function with the arguments that it takes.

    Attributes:
        streams: of the result.
        has_random_lengths: whether lengths depend on the epoch.
    """

    def __init__(
        self,
        where: str,
        steps: Sequence[StepKeys | Callable[..., Any]],
        dataset: Dataset,
        datasets: Mapping[str, Dataset],
        seed: int,
        call: Callable[[Callable[..., Any], Arrays, Draw], Any],
        scanning: Scanning,
    ) -> None:
        self._where = where
        self._dataset = dataset
        self._seed = seed
        self._call = call
        self._steps = [resolve(step.opener)(step, datasets) if isinstance(step, StepKeys) else step for step in steps]
        self._found: dict[int, Array] = {}
        streams = dict(dataset.streams)
        for number, step in enumerate(self._steps):
            if isinstance(step, Step):
                if step.key not in streams:
                    raise DataError(f"{where}.{number}: expected a data key of {', '.join(streams)}, got {step.key!r}")
                try:
                    streams[step.key] = step.stream(streams[step.key])
                except DataError as error:
                    raise DataError(f"{where}.{number}: {error}") from None
        self.streams: Streams = streams
        self.has_random_lengths = any(isinstance(step, Step) and step.has_random_lengths for step in self._steps)
        for number, step in enumerate(self._steps):
            if isinstance(step, Step) and step.has_found_lengths:
                self._found[number] = self._find(number, step, steps[number], scanning)

    def __call__(self, arrays: Arrays, *, epoch: int, index: int, rng: numpy.random.RandomState) -> dict[str, Array]:
        return self._apply(arrays, Draw(self._seed, epoch, index, rng), self._steps)

    def lengths(self, inside: Dataset, epoch: int) -> dict[str, Array]:
        """The lengths of all sequences after the steps, given the dataset in an epoch."""
        lengths = dict(inside.lengths)
        for number, step in enumerate(self._steps):
            if isinstance(step, Step):
                found = self._found.get(number)
                lengths[step.key] = step.lengths(lengths[step.key], self._seed, epoch) if found is None else found
        return lengths

    def _apply(self, arrays: Arrays, draw: Draw, steps: Sequence[Step | Callable[..., Any]]) -> dict[str, Array]:
        result = dict(arrays)
        for step in steps:
            if isinstance(step, Step):
                result[step.key] = step.apply(result[step.key], draw)
            else:
                result = self._call(step, result, draw)
        return result

    def _find(self, number: int, step: Step, keys: Any, scanning: Scanning) -> Array:
        """The lengths after a step that are only known from reading. Raises: DataError."""
        dataset = self._dataset

        earlier = self._steps[:number]
        if all(isinstance(one, Step) for one in earlier):  # functions may use all data keys, steps only change their own
            earlier = [one for one in earlier if isinstance(one, Step) and one.key == step.key]

        def length(index: int) -> int:
            draw = Draw(self._seed, 1, index, numpy.random.RandomState([self._seed, 1, index]))
            return len(step.apply(self._apply(dataset.sequence(index), draw, earlier)[step.key], draw))

        def count(block: range) -> Counted:
            return {step.key: numpy.fromiter(map(length, block), numpy.int32, len(block))}, {}

        tags = zlib.crc32(b"\0".join(dataset.tag_bytes(0, dataset.num_sequences).tolist()))
        some = [str(dataset.sequence(index)[step.key]) for index in {0, dataset.num_sequences - 1}]
        sums = {key: zlib.crc32(column.tobytes()) for key, column in dataset.lengths.items()}
        before = [fingerprint_of(member) for member in self._steps[:number] if not isinstance(member, Step)]
        identity = f"tokens {tags} {sums} {some} {before} {fingerprint_of(asdict(keys))}"
        found, _ = lengths_by_reading(f"{self._where}.{number}", identity, dataset.num_sequences, count, scanning)
        return found[step.key]
