"""Batches that do not fit into memory are split, and the gradients of their pieces added up: `split_on_oom`.

Losses are sums over elements, so the gradients are those of the whole batch. A rank splits alone, without a message to the
others: backward passes are no collectives, and with `split_on_oom` gradients are sent only after the last one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy

from hvdtrain.data.naming import batch_text
from hvdtrain.data.types import Array, Batch, BatchParts, Packed, Padded
from hvdtrain.errors import ConfigError
from hvdtrain.runtime import log


def split_batch(batch: Batch) -> tuple[Batch, Batch]:
    """Two batches with the sequences (or pieces) of one, about half of the frames in each, and no more padding than they need."""
    frames: Array
    if batch.joined is not None:
        frames = batch.joined
    elif batch.is_packed:
        frames = numpy.asarray(numpy.sum([padded.seq_lens for padded in batch.data.values()], axis=0, dtype=numpy.int64))
    else:
        frames = numpy.ones(len(batch.indices), dtype=numpy.int64)  # rows are equally long
    sums = numpy.cumsum(frames)
    middle = min(int(numpy.searchsorted(sums, sums[-1] / 2)) + 1, len(sums) - 1)
    return _slice(batch, slice(0, middle)), _slice(batch, slice(middle, len(sums)))


def _slice(batch: Batch, rows: slice) -> Batch:
    """Some successive sequences, or pieces, of a batch."""
    tags = batch.seq_tags
    parts = batch.parts
    joined = batch.joined
    piece = Batch(
        {name: _rows(padded, rows) if joined is None else _pieces(padded, joined, rows) for name, padded in batch.data.items()},
        batch.indices[rows],
        None if tags is None else lambda: tags()[rows],
        joined=None if joined is None else joined[rows],
        parts=None if parts is None else BatchParts(parts.names, parts.numbers[rows]),
    )
    return piece if batch.collate is None else batch.collate(piece)


def _rows(padded: Padded, rows: slice) -> Padded:
    seq_lens: Array = padded.seq_lens[rows]
    if isinstance(padded, Packed):
        first = int(padded.seq_lens[: rows.start].sum(dtype=numpy.int64))
        return replace(padded, values=padded.values[first : first + int(seq_lens.sum(dtype=numpy.int64))], seq_lens=seq_lens)
    return replace(padded, values=padded.values[rows, : int(seq_lens.max())], seq_lens=seq_lens)


def _pieces(padded: Padded, joined: Array, pieces: slice) -> Padded:
    first, count = int(joined[: pieces.start].sum()), int(joined[pieces].sum())
    return replace(padded, values=padded.values[:, first : first + count], seq_lens=numpy.array([count], padded.seq_lens.dtype))


class BatchSplitter:
    """Runs steps on batches, and on pieces of those that do not fit.

    Args:
        is_out_of_memory: whether an exception means that memory did not suffice.
        free: releases what a failed attempt has left in memory.

    Attributes:
        num_batches: how many batches were split since `take`.
    """

    def __init__(self, is_out_of_memory: Callable[[BaseException], bool], free: Callable[[], None]) -> None:
        self._is_out_of_memory = is_out_of_memory
        self._free = free
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
            if not self._has_split:
                self._has_split = True
                log.warning(
                    f"split_on_oom: a batch does not fit into memory and is split, {batch_text(batch)} (later ones are counted)"
                )
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
        number, self.num_batches = self.num_batches, 0
        return number

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
