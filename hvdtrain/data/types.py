"""The values that datasets return: streams, padded arrays and batches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from hvdtrain.errors import DataError

if TYPE_CHECKING:
    import numpy

    Array = numpy.ndarray[Any, Any]
else:  # `--help` imports the keys of every dataset without numpy
    Array = Any

External = Literal["refuse", "follow"]
"""What to do where an HDF file refers to other files: a data file must not make the trainer read others without permission."""


def imported_class(module: str, name: str) -> Any:
    """A class of a package that is not imported here, for isinstance. It is an empty tuple, of which nothing is an instance, if
    the package is not imported yet, or another thread is still importing it.

    >>> import fractions, sys
    >>> imported_class("fractions", "Fraction"), imported_class("fractions", "None_yet"), imported_class("not_imported", "Class")
    (<class 'fractions.Fraction'>, (), ())
    """
    return getattr(sys.modules.get(module), name, ())


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

    @property
    def holds_items(self) -> bool:
        """Whether a sequence is one object of any kind, for a `collate` function, not frames."""
        return self.dim == 0 and self.dtype.kind == "O"

    @property
    def words(self) -> str:
        """What its frames are, for messages."""
        return f"{'class indices' if self.sparse else 'frames'} of shape {self.shape} and dimension {self.dim}"

    @property
    def frame_size(self) -> int:
        """Bytes of a frame; a text counts as a pointer."""
        return self.dtype.itemsize * prod(self.shape)


@dataclass(frozen=True)
class Padded:
    """One data key of a batch.

    Attributes:
        values: shape (batch, time, ...), zero after the end of each sequence.
        seq_lens: int32 of shape (batch,).
    """

    values: Array
    seq_lens: Array

    def sequences(self) -> list[Array]:
        """The values of every sequence, without padding."""
        return [row[:length] for row, length in zip(self.values, self.seq_lens.tolist(), strict=True)]


@dataclass(frozen=True)
class Packed(Padded):
    """One data key of a batch without padding: the frames of one sequence after the other.

    Attributes:
        values: shape (frames, ...).
    """

    def sequences(self) -> list[Array]:
        ends = self.seq_lens.cumsum().tolist()
        return [self.values[end - length : end] for end, length in zip(ends, self.seq_lens.tolist(), strict=True)]


@dataclass(frozen=True)
class Items(Padded):
    """The items of a batch, which a `collate` function makes tensors of.

    Attributes:
        values: shape (batch, 1), of objects.
        seq_lens: the lengths that the batch was planned with.
    """


@dataclass(frozen=True)
class BatchParts:
    """The datasets that the sequences of a batch come from, if an epoch mixes several.

    Attributes:
        names: of all these datasets.
        numbers: of each sequence, the number of its dataset; int64 of shape (batch,).
    """

    names: tuple[str, ...]
    numbers: Array


ITEMS = "data"
"""The data key of the items of `collate`, each of any kind."""

Broken = tuple[int, str]
"""The index of a sequence that cannot be read, and the message about it."""


@dataclass(frozen=True)
class Batch:
    """Several sequences, padded to the longest, or packed; or pieces of sequences, joined to one row without padding.

    Attributes:
        data: by data key.
        indices: of the sequences in the dataset, int64 of shape (batch,), or (number of pieces,).
        seq_tags: reads the names of the sequences.
        joined: the number of frames of every piece, int64 of shape (number of pieces,); None: sequences are padded or packed.
        broken: sequences of the plan that are left out; chunks and pieces count by themselves.
        left_out: the number of sequences that are left out; one that is cut counts where it begins.
        parts: where the sequences come from; None: an epoch does not mix datasets.
        collate: adds the tree to a batch of these items, or of some of them; None: the data is arrays.
        tree: what `collate` made of the items, a tree of tensors of any kind, in place of the arrays.
    """

    data: Mapping[str, Padded]
    indices: Array
    seq_tags: Callable[[], list[str]] | None = None
    joined: Array | None = None
    broken: Sequence[Broken] = ()
    left_out: int = 0
    parts: BatchParts | None = None
    collate: Callable[[Batch], Batch] | None = None
    tree: Any = None

    @property
    def is_packed(self) -> bool:
        """Whether a data key is packed."""
        return any(isinstance(padded, Packed) for padded in self.data.values())

    @property
    def row_tags(self) -> Callable[[], list[str]] | None:
        """Reads the name of the sequence in each row; None: it is unknown, or a row consists of pieces of several sequences."""
        return self.seq_tags if self.joined is None else None

    @property
    def if_any(self) -> Batch | None:
        """The batch; None: all of its sequences are broken."""
        return self if len(self.indices) else None

    @property
    def num_items(self) -> int:
        """Of a batch for `collate`, the number of its items that are not None: those it leaves out do not count."""
        return sum(item is not None for [item] in self.data[ITEMS].values)

    @property
    def planned(self) -> Array:
        """The indices with those of broken sequences, in any order."""
        import numpy  # here, as `--help` imports this file

        return (
            numpy.append(self.indices, [index for index, _ in self.broken]).astype(numpy.int64) if self.broken else self.indices
        )


def arrays_in(item: Any) -> Iterator[Array]:
    """The numbers and texts in an item of any kind, as arrays."""
    import numpy

    if isinstance(item, (str, bytes, int, float, complex)) or getattr(item, "__array__", None) is not None:
        yield numpy.atleast_1d(getattr(item, "detach", lambda: item)())  # a tensor's values without its gradient
    elif isinstance(item, (Mapping, list, tuple)):
        for each in item.values() if isinstance(item, Mapping) else item:
            yield from arrays_in(each)
    else:
        yield from arrays_in(getattr(item, "__dict__", {}))


class UnlikeError(DataError):
    """Sequences do not fit into a batch. The message names the sequence, but not the dataset, which is unknown here."""
