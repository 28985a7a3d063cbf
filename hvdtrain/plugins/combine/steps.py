"""Steps of a `map_seq`, which know the lengths and the form of what they make, one after the other.

Random numbers depend on the seed, the epoch and the sequence only, so they are the same on any number of ranks and after a stop.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from hvdtrain.config.references import resolve
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.formats.found import find_lengths, fingerprint_of, measure_broken
from hvdtrain.data.kinds import StepKeys
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import BrokenSequence, DataError

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
        has_unknown_lengths: whether the new lengths are only known from reading.
    """

    has_random_lengths = False
    has_unknown_lengths = False

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
        self._measured: dict[int, Array] = {}
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
            if isinstance(step, Step) and step.has_unknown_lengths:
                self._measured[number] = self._find(number, step, steps[number], scanning)

    def __call__(self, arrays: Arrays, *, epoch: int, index: int, rng: numpy.random.RandomState) -> dict[str, Array]:
        return self._apply(arrays, Draw(self._seed, epoch, index, rng), self._steps)

    def lengths(self, inside: Dataset, epoch: int) -> dict[str, Array]:
        """The lengths of all sequences after the steps, given the dataset in an epoch."""
        lengths = dict(inside.lengths)
        for number, step in enumerate(self._steps):
            if isinstance(step, Step):
                measured = self._measured.get(number)
                lengths[step.key] = step.lengths(lengths[step.key], self._seed, epoch) if measured is None else measured
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
        if all(isinstance(each, Step) for each in earlier):  # functions may use all data keys, steps only change their own
            earlier = [each for each in earlier if isinstance(each, Step) and each.key == step.key]

        def measure(index: int) -> tuple[dict[str, int], dict[str, int]]:
            draw = Draw(self._seed, 1, index, numpy.random.RandomState([self._seed, 1, index]))
            return {step.key: len(step.apply(self._apply(dataset.sequence(index), draw, earlier)[step.key], draw))}, {}

        tags = zlib.crc32(b"\0".join(dataset.tag_bytes(0, dataset.num_sequences).tolist()))
        some = [str(dataset.sequence(index)[step.key]) for index in {0, dataset.num_sequences - 1}]
        sums = {key: zlib.crc32(column.tobytes()) for key, column in dataset.lengths.items()}
        before = [fingerprint_of(member) for member in self._steps[:number] if not isinstance(member, Step)]
        fingerprint = f"tokens {tags} {sums} {some} {before} {fingerprint_of(asdict(keys))}"
        where = f"{self._where}.{number}"
        lengths_by_key = find_lengths(where, lambda: fingerprint, [step.key], dataset.num_sequences, measure, scanning).lengths
        if broken := measure_broken(lengths_by_key, measure):
            raise BrokenSequence(broken[0])
        return lengths_by_key[step.key]
