"""The values that datasets return: streams, padded arrays and batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import DataError

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
else:  # `--help` imports the keys of every dataset without numpy
    Array = Any

External = Literal["refuse", "follow"]
"""What to do where an HDF file refers to other files: a data file must not make the trainer read others without permission."""


@dataclass(frozen=True)
class Stream:
    """One data key of a dataset: an array per sequence, with frames on the first axis.

    Attributes:
        dtype: of the frames, as stored.
        shape: of one frame: () for sparse data (one class index per frame), (dim,) for vectors.
        dim: the number of classes (sparse) or features (dense).
        sparse: whether a frame is a class index.
        labels: the names of the classes, if the source has them.
    """

    dtype: numpy.dtype[Any]
    shape: tuple[int, ...]
    dim: int
    sparse: bool
    labels: tuple[str, ...] = ()


@dataclass(frozen=True)
class Padded:
    """One data key of a batch.

    Attributes:
        values: shape (batch, time, ...), zero after the end of each sequence.
        seq_lens: int32 of shape (batch,).
    """

    values: Array
    seq_lens: Array


Broken = tuple[int, str]
"""The index of a sequence that cannot be read, and the message about it."""


@dataclass(frozen=True)
class Batch:
    """Several sequences, padded to the longest; or pieces of sequences, joined to one row without padding.

    Attributes:
        data: by data key.
        indices: of the sequences in the dataset, int64 of shape (batch,), or (number of pieces,).
        seq_tags: reads the names of the sequences.
        joined: the number of frames of every piece, int64 of shape (number of pieces,); None: sequences are padded.
        broken: sequences of the plan that are left out.
    """

    data: Mapping[str, Padded]
    indices: Array
    seq_tags: Callable[[], list[str]] | None = None
    joined: Array | None = None
    broken: Sequence[Broken] = ()

    @property
    def row_tags(self) -> Callable[[], list[str]] | None:
        """Reads the name of the sequence in each row; None: it is unknown, or a row consists of pieces of several sequences."""
        return self.seq_tags if self.joined is None else None

    @property
    def if_any(self) -> Batch | None:
        """The batch; None: all of its sequences are broken."""
        return self if len(self.indices) else None

    @property
    def planned(self) -> Array:
        """The indices with those of broken sequences, in any order."""
        import numpy  # here, as `--help` imports this file

        return (
            numpy.append(self.indices, [index for index, _ in self.broken]).astype(numpy.int64) if self.broken else self.indices
        )


class UnlikeError(DataError):
    """Sequences do not fit into a batch. The message names the sequence, but not the dataset, which is unknown here."""
