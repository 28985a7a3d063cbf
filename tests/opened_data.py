"""Datasets for tests: one as a config describes it, and one in memory whose values say where they come from."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy
from launching import faults

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.types import Array, Stream


def opened(value: Any, **context: Any) -> Dataset:
    """The dataset of a config's `train`. More arguments are those of the context in which it is opened."""
    spec, problems = parse("train", value, {})
    assert spec is not None, problems
    return open_dataset(spec, OpeningContext(**context))


def problems_of(value: Any) -> list[str]:
    """Those of a config's `train`, each as of `faults`."""
    spec, found = parse("train", value, {})
    assert (spec is None) == bool(found)
    return faults(found)


class Numbers(Dataset):
    """Frame t of sequence i is 100 * i + t, in every data key.

    Attributes:
        reads: the sequences that were read, in turn.
    """

    def __init__(self, lengths: Mapping[str, Array]) -> None:
        self.lengths = lengths
        self.streams = {name: Stream(numpy.dtype("int32"), (), 10000, True) for name in lengths}
        self.reads: list[int] = []

    @property
    def num_sequences(self) -> int:
        return len(next(iter(self.lengths.values())))

    def sequence(self, index: int) -> dict[str, Array]:
        self.reads.append(index)
        return {name: 100 * index + numpy.arange(column[index], dtype=numpy.int32) for name, column in self.lengths.items()}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]
