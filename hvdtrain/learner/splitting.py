"""Batches that do not fit into memory are split, and the gradients of their pieces added up: `split_on_oom`.

Losses are sums over elements, so the gradients are those of the whole batch. A rank splits alone, without a message to the
others: backward passes are no collectives, and with `split_on_oom` gradients are sent only after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy

from hvdtrain.data.types import Array, Batch, BatchParts, Packed, Padded
from hvdtrain.errors import ConfigError


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches with the sequences of one, about half of the frames in each, and no more padding than they need."""
    if batch.joined is not None:
        return _split_joined(batch, batch.joined)
    lengths: Array = numpy.asarray(numpy.sum([padded.seq_lens for padded in batch.data.values()], axis=0, dtype=numpy.int64))
    sums = (
        numpy.cumsum(lengths)
        if any(isinstance(padded, Packed) for padded in batch.data.values())
        else numpy.arange(1, len(lengths) + 1)
    )
    middle = int(numpy.searchsorted(sums, sums[-1] / 2)) + 1
    middle = min(middle, len(lengths) - 1)
    return _part(batch, slice(0, middle)), _part(batch, slice(middle, len(lengths)))


def _split_joined(batch: Batch, joined: Array) -> tuple[Batch, Batch]:
    """Two batches with the pieces of one, which are joined to one row."""
    middle = min(int(numpy.searchsorted(numpy.cumsum(joined), joined.sum() / 2)) + 1, len(joined) - 1)
    frame = int(joined[:middle].sum())
    halves = []
    for pieces, frames in ((slice(0, middle), slice(0, frame)), (slice(middle, None), slice(frame, None))):
        data = {}
        for name, padded in batch.data.items():
            values = padded.values[:, frames]
            data[name] = replace(padded, values=values, seq_lens=numpy.array([values.shape[1]], dtype=padded.seq_lens.dtype))
        parts = None if batch.parts is None else BatchParts(batch.parts.names, batch.parts.numbers[pieces])
        halves.append(Batch(data, batch.indices[pieces], joined=joined[pieces], parts=parts))
    return halves[0], halves[1]


def _part(batch: Batch, rows: slice) -> Batch:
    tags, parts = batch.seq_tags, batch.parts
    return Batch(
        {name: _rows(padded, rows) for name, padded in batch.data.items()},
        batch.indices[rows],
        None if tags is None else lambda: tags()[rows],
        parts=None if parts is None else BatchParts(parts.names, parts.numbers[rows]),
    )


def _rows(padded: Padded, rows: slice) -> Padded:
    seq_lens: Array = padded.seq_lens[rows]
    if isinstance(padded, Packed):
        first = int(padded.seq_lens[: rows.start].sum(dtype=numpy.int64))
        return replace(padded, values=padded.values[first : first + int(seq_lens.sum(dtype=numpy.int64))], seq_lens=seq_lens)
    return replace(padded, values=padded.values[rows, : int(seq_lens.max())], seq_lens=seq_lens)


class BatchSplitter:
    """Runs steps on batches, and on pieces of those that do not fit.

    Args:
        is_out_of_memory: whether an exception means that memory did not suffice.
        free: releases what a failed attempt has left in memory.
        note: called with every batch that is split for the first time.

    Attributes:
        num_batches: how many batches were split since `take`.
    """

    def __init__(
        self, is_out_of_memory: Callable[[BaseException], bool], free: Callable[[], None], note: Callable[[Batch], None]
    ) -> None:
        self._is_out_of_memory = is_out_of_memory
        self._free = free
        self._note = note
        self._one_number: str | None = None  # a loss that is one number for several sequences
        self._has_split = False
        self.num_batches = 0

    def run(self, batch: Batch, step: Callable[[Batch], None]) -> None:
        """Run a step on a batch, or if memory does not suffice, on its pieces.

        Args:
            step: changes nothing if it fails.

        Raises:
            ConfigError: a piece has other gradients than its share of those of the batch.
        """
        pieces = [batch]
        while pieces:
            piece = pieces.pop(0)
            if self._fits(piece, step):
                continue
            if piece is batch:
                self.num_batches += 1
                self._note(batch)
            self._has_split = True
            self._free()
            self._check()
            pieces[:0] = split_batch(piece)

    def check_loss(self, name: str, is_scalar: bool, num_sequences: int) -> None:
        """Called with every loss that is minimized. Raises: ConfigError, if it cannot be split."""
        if is_scalar and num_sequences > 1:
            self._one_number = name
            self._check()

    def take(self) -> int:
        """The number of batches that were split since the last call."""
        taken, self.num_batches = self.num_batches, 0
        return taken

    def _fits(self, piece: Batch, step: Callable[[Batch], None]) -> bool:
        """Run the step; False if memory did not suffice. The exception, and with it the tensors that its frames refer to, is gone
        when this returns. Raises: the exception of a piece that cannot be split.
        """
        try:
            step(piece)
        except BaseException as error:
            if not self._is_out_of_memory(error):
                raise
            if len(piece.indices) == 1:
                error.add_note("split_on_oom: this is a single sequence, which cannot be split (max_seq_length drops long ones)")
                raise
            return False
        return True

    def _check(self) -> None:
        if self._has_split and self._one_number is not None:
            raise ConfigError.of(
                "wrong-result",
                "split_on_oom: expected losses with one number per element, so that the gradients of a batch are the sum of "
                f"those of its pieces, got one number for a whole batch in {self._one_number} (mark it with reduction='none')",
            )
