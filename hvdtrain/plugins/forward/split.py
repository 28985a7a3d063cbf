"""The outputs of a batch, sequence by sequence."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.meter import BatchOutputs


class Outputs(dict[str, Array]):
    """The outputs of a sequence by name.

    Attributes:
        vectors: the names of outputs without a frame axis: features of the whole sequence, shape (features,).
        uncut: the names of outputs without numbers of frames: a sequence has as many as all others of its batch.
    """

    def __init__(self, vectors: frozenset[str], uncut: frozenset[str] = frozenset()) -> None:
        super().__init__()
        self.vectors = vectors
        self.uncut = uncut


def split_by_sequence(marked: BatchOutputs, batch: Batch) -> list[Outputs]:
    """The outputs of each sequence of a batch by name, without padding.

    Raises:
        ConfigError: an output has another number of rows, or of frames.
    """
    count = len(batch.indices)
    vectors = frozenset(marked.vectors)
    named = marked.values.items()
    uncut = frozenset(name for name, (values, seq_lens) in named if seq_lens is None and not isinstance(values, list))
    sequences = [Outputs(vectors, uncut) for _ in range(count)]
    for name, (values, seq_lens) in named:
        if seq_lens is not None and batch.is_packed:
            values = _split_packed(name, values, seq_lens)
            seq_lens = None
        rows = [marked.array_of(row) for row in values]
        lengths: Sequence[int | None] = [None] * len(rows) if seq_lens is None else seq_lens
        if not len(rows) == len(lengths) == count:
            raise ConfigError.of(
                "wrong-result", f"forward_step: expected an entry of {name} for each of {count} sequences, got {len(rows)}"
            )
        for sequence, row, length in zip(sequences, rows, lengths, strict=True):
            sequence[name] = row[:length] if row.ndim else row
    return sequences


def _split_packed(name: str, value: Any, lengths: Sequence[int]) -> list[Any]:
    """The rows of an output of packed data, whose frames come one sequence after the other. Raises: ConfigError."""
    if len(value) != sum(lengths):
        raise ConfigError.of(
            "wrong-result",
            f"forward_step: expected the {sum(lengths)} frames that seq_lens says in the output {name!r} of a packed batch, got "
            f"{len(value)}",
        )
    ends = accumulate(lengths)
    return [value[end - length : end] for end, length in zip(ends, lengths, strict=True)]
