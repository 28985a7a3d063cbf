"""Synthetic datasets: meaningless numbers (DummyDataset) and the 12-AX memory task (Task12AXDataset)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from hvdtrain.config.keys import REQUIRED, key, not_negative, positive
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.keys import DatasetKeys
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import Problem, problem

SYMBOLS = "123ABCXYZ"
ANSWERS = "LR"
SHORTEST = 10
LONGEST = 99
"""Of the 12-AX task: the classes of 'data' and of 'classes', and the limits of a sequence's length."""


@dataclass(frozen=True, kw_only=True)
class DummyDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "DummyDataset"`: meaningless numbers."""

    opener: ClassVar[str] = f"{__name__}:open_dummy"

    input_dim: int = key(REQUIRED, "dimension of the vectors in 'data'", positive)
    output_dim: int = key(REQUIRED, "number of classes in 'classes'", positive)
    num_seqs: int = key(REQUIRED, "number of sequences", positive)
    seq_len: int | dict[str, int] = key(
        2, "frames of every sequence, or a dict with the frames of 'data' and 'classes'", positive
    )

    def problems(self) -> list[Problem]:
        if not isinstance(self.seq_len, dict):
            return []
        right = self.seq_len.keys() == {"data", "classes"} and min(self.seq_len.values()) >= 0
        expected = "seq_len: expected zero or a positive number for 'data' and for 'classes'"
        return [] if right else problem("out-of-range", f"{expected}, got {self.seq_len}")


@dataclass(frozen=True, kw_only=True)
class Task12AXDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "Task12AXDataset"`: a synthetic memory task."""

    opener: ClassVar[str] = f"{__name__}:open_task12ax"

    num_seqs: int = key(REQUIRED, "number of sequences, each of 10 to 99 frames", positive)
    fixed_random_seed: int = key(1, "seed of the sequences, which are the same in every epoch", not_negative)


class SyntheticDataset(Dataset):
    """A dataset whose sequences are computed when they are read."""

    @property
    def num_sequences(self) -> int:
        return len(self.lengths["data"])

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]


class DummyDataset(SyntheticDataset):
    """Data keys 'data' (vectors of numbers from -0.5 to 0.4) and 'classes'; both count up from the index of the sequence."""

    def __init__(self, input_dim: int, output_dim: int, num_sequences: int, frames: Mapping[str, int]) -> None:
        import numpy  # not at the top: `--help` imports this file

        self.streams = {
            "data": Stream(numpy.dtype(numpy.float32), (input_dim,), input_dim, sparse=False),
            "classes": Stream(numpy.dtype(numpy.int32), (), output_dim, sparse=True),
        }
        self.lengths = {name: numpy.full(num_sequences, frames[name], numpy.int32) for name in self.streams}

    def sequence(self, index: int) -> dict[str, Array]:
        import numpy

        frames = int(self.lengths["data"][index])
        dim = self.streams["data"].dim
        values = (numpy.arange(index, index + frames * dim) % 10 - 5) / 10
        classes = numpy.arange(index, index + int(self.lengths["classes"][index])) % self.streams["classes"].dim
        return {"data": values.reshape(frames, dim).astype(numpy.float32), "classes": classes.astype(numpy.int32)}


def open_dummy(where: str, keys: DummyDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    frames = keys.seq_len if isinstance(keys.seq_len, dict) else {"data": keys.seq_len, "classes": keys.seq_len}
    return DummyDataset(keys.input_dim, keys.output_dim, keys.num_seqs, frames)


class Task12AXDataset(SyntheticDataset):
    """Data keys 'data' (one-hot vectors of 9 symbols) and 'classes' (0: L, 1: R), a function of the seed."""

    def __init__(self, num_sequences: int, seed: int) -> None:
        self._seed = seed
        import numpy  # not at the top: `--help` imports this file

        lengths = numpy.random.RandomState(seed).randint(SHORTEST, LONGEST + 1, size=num_sequences).astype(numpy.int32)
        self.streams = {
            "data": Stream(numpy.dtype(numpy.float32), (len(SYMBOLS),), len(SYMBOLS), sparse=False),
            "classes": Stream(numpy.dtype(numpy.int32), (), len(ANSWERS), sparse=True, labels=tuple(ANSWERS)),
        }
        self.lengths = {"data": lengths, "classes": lengths}

    def sequence(self, index: int) -> dict[str, Array]:
        import numpy

        symbols = self._symbols(index)
        data = numpy.eye(len(SYMBOLS), dtype=numpy.float32)[[SYMBOLS.index(symbol) for symbol in symbols]]
        return {"data": data, "classes": numpy.array([ANSWERS.index(answer) for answer in answers(symbols)], dtype=numpy.int32)}

    def _symbols(self, index: int) -> str:
        """Mostly AX and BY after digits, so that R is not too rare."""
        import numpy

        length = int(self.lengths["data"][index])
        generator = numpy.random.RandomState([self._seed, index])
        text = ""
        while len(text) < length:
            if generator.uniform() < 0.5:
                text += "12"[generator.randint(2)]
            if generator.uniform() < 0.9:
                text += ("AX", "BY")[generator.randint(2)]
            while generator.uniform() < 0.5:
                text += SYMBOLS[generator.randint(len(SYMBOLS))]
        return text[:length]


def answers(symbols: str) -> str:
    """The right answer to every symbol.

    >>> answers("1AX2AXBYAYB3Y")
    'LLRLLLLRLLLLR'
    """
    digit = letter = result = ""
    for symbol in symbols:
        result += "R" if digit + letter + symbol in ("1AX", "2BY") else "L"
        if symbol in "12":
            digit = symbol
        elif symbol in "AB":
            letter = symbol
        elif symbol in "XY":
            letter = ""
    return result


def open_task12ax(where: str, keys: Task12AXDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    return Task12AXDataset(keys.num_seqs, keys.fixed_random_seed)
