"""A kind of dataset: sequences of random vectors, and the line on which they lie as 'classes'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.keys import DatasetKeys
from hvdtrain.data.types import Stream

if TYPE_CHECKING:
    from hvdtrain.data.types import Array


@dataclass(frozen=True, kw_only=True)
class LinearDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "LinearDataset"`: vectors, and a linear function of them."""

    opener: ClassVar[str] = f"{__name__}:open_linear"

    num_seqs: int = key(REQUIRED, "number of sequences", positive)
    slope: float = key(1.0, "the factor on the sum of a vector")


class LinearDataset(Dataset):
    """Data keys 'data' and 'target', one frame for each sequence up to five."""

    def __init__(self, num_sequences: int, slope: float) -> None:
        import numpy

        self._slope = slope
        dtype = numpy.dtype(numpy.float32)
        self.streams = {"data": Stream(dtype, (3,), 3, sparse=False), "target": Stream(dtype, (1,), 1, sparse=False)}
        self.lengths = dict.fromkeys(self.streams, numpy.arange(num_sequences, dtype=numpy.int32) % 5 + 1)

    @property
    def num_sequences(self) -> int:
        return len(self.lengths["data"])

    def sequence(self, index: int) -> dict[str, Array]:
        import numpy

        data = numpy.random.default_rng(index).normal(size=(int(self.lengths["data"][index]), 3)).astype(numpy.float32)
        return {"data": data, "target": self._slope * data.sum(axis=1, keepdims=True)}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]


def open_linear(where: str, keys: LinearDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open a LinearDataset."""
    return LinearDataset(keys.num_seqs, keys.slope)
