"""The chunks that sequences are cut into: parts of equal size, which are then batched as if each were a sequence.

The chunks of a dataset are numbered, sequence by sequence, so that a plan refers to chunks as it does to sequences: by index.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.plan.chunks import Chunker
from hvdtrain.data.types import Array, Batch
from hvdtrain.data.views import PartsOfSequences
from hvdtrain.errors import DataError
from hvdtrain.plugins.chunks.keys import FRAMES_END, ChunkKeys, Context, Tail, keys_of, limit_of, parse, parse_context

if TYPE_CHECKING:
    from hvdtrain.settings import Settings


@dataclass(frozen=True)
class FixedChunks:
    """All chunks of a dataset.

    Attributes:
        first: the index of the first chunk of every sequence, then the number of chunks; int64 of shape (num_sequences + 1,).
        sequences: the index of every chunk's sequence; int64 of shape (num_chunks,).
        numbers: the number of every chunk in its sequence, from 0; int64 of shape (num_chunks,).
        lengths: by data key, number of frames of every chunk; int32 of shape (num_chunks,).
        steps: by data key, number of frames between the starts of two chunks; without data keys that stay whole.
        context: the frames that every chunk has in addition, before and after it; None: there are none.
    """

    first: Array
    sequences: Array
    numbers: Array
    lengths: Mapping[str, Array]
    steps: Mapping[str, int]
    context: Context | None = None

    @property
    def key(self) -> str:
        return "chunking" if self.steps else "context_window"

    def numbers_of(self, sequences: Array) -> Array:
        counts = self.first[sequences + 1] - self.first[sequences]
        ends = numpy.cumsum(counts)
        total = int(ends[-1]) if len(ends) else 0
        return numpy.repeat(self.first[sequences] - (ends - counts), counts) + numpy.arange(total)

    def dataset(self, dataset: Dataset) -> PartsOfSequences:
        return ChunkedDataset(dataset, self)

    def as_text(self) -> dict[str, Any]:
        texts: dict[str, Any] = {"chunking": f"{len(self.sequences)} chunks in steps of {dict(self.steps)}"}
        return texts if self.context is None else {**texts, "context_window": self.context}

    def arrays(self) -> list[Array]:
        return [self.first, *self.lengths.values()]

    def shares(self, used: Array) -> tuple[Array, str]:
        with_chunks = used[numpy.diff(self.first)[used] > 0]
        line = f"{len(self.numbers_of(with_chunks))} chunks of {len(with_chunks)} sequences" if self.steps else ""
        return with_chunks, line


def make_chunks(lengths: Mapping[str, Array], keys: ChunkKeys) -> FixedChunks | None:
    """The chunks of all sequences, with their context; None if both are off. If only chunking is off, a chunk is a sequence.

    A data key with at most one frame, while other data keys of the sequence are longer, stays whole and is repeated in each
    chunk.

    Args:
        lengths: by data key, number of frames of every sequence.

    Raises:
        DataError: the data keys of a sequence have different numbers of chunks, or one has too many frames with its context.
    """
    how = parse(keys.chunking)
    context = parse_context(keys.context_window)
    if how is None and context is None:
        return None
    steps: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name in lengths:
        size_and_step = None if how is None else how.size_and_step(name)
        if size_and_step is not None:
            sizes[name], steps[name] = size_and_step
    columns = {name: column.astype(numpy.int64) for name, column in lengths.items()}
    whole = _whole({name: columns[name] for name in sizes})
    counts = _counts(columns, sizes, steps, whole, keys)
    first = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64, copy=False)
    sequences = numpy.repeat(numpy.arange(len(counts)), counts)
    numbers = numpy.arange(first[-1]) - first[sequences]
    chunk_lengths = {}
    for name, column in columns.items():
        here = column[sequences]
        if name in sizes:
            inside = numpy.minimum(sizes[name], here - numbers * steps[name])
            here = numpy.where(whole[name][sequences], here, inside)
        added = 0 if context is None else sum(context.frames(name))
        if added and len(here) and here.max() + added >= FRAMES_END:
            raise DataError(
                f"context_window: expected less than 2**31 frames with those before and after, got {added} of the data key "
                f"{name} with sequences of up to {here.max()}"
            )
        chunk_lengths[name] = (here + added).astype(numpy.int32)
    return FixedChunks(first, sequences, numbers, chunk_lengths, steps, context)


def _whole(columns: Mapping[str, Array]) -> dict[str, Array]:
    """By data key that is cut, a mask of the sequences whose single frame belongs to the whole sequence."""
    longest = numpy.maximum.reduce(list(columns.values())) if columns else numpy.zeros(0)
    return {name: (column <= 1) & (longest > 1) for name, column in columns.items()}


def _counts(
    columns: Mapping[str, Array], sizes: Mapping[str, int], steps: Mapping[str, int], whole: Mapping[str, Array], keys: ChunkKeys
) -> Array:
    """The number of chunks of every sequence; int64 of shape (num_sequences,). Raises: DataError."""
    size = len(next(iter(columns.values())))
    if not sizes:
        return numpy.ones(size, dtype=numpy.int64)
    counts = numpy.full(size, -1, dtype=numpy.int64)
    first_with: dict[int, str] = {}  # by step, the first data key that has it
    by_key = {}
    for name in sizes:
        here = by_key[name] = _counts_of(columns[name], steps[name], limit_of(keys.min_chunk_size, name), keys.chunking_tail)
        same_step = first_with.setdefault(steps[name], name)
        wrong = ~whole[name] & (counts >= 0) & (counts != here)
        if keys.chunking_tail != "drop_short":
            # Chunks of the same step begin at the same frames, so they should end at the same ones.
            wrong |= ~whole[name] & ~whole[same_step] & (columns[name] != columns[same_step])
        if wrong.any():
            index = int(numpy.flatnonzero(wrong)[0])
            got = " and ".join(f"{by_key[key][index]} of the {columns[key][index]} frames of {key!r}" for key in by_key)
            raise DataError(
                f"chunking: expected data keys that are cut into the same number of chunks (and have the same length if they "
                f"have the same step), got {got} in sequence {index} (give sizes and steps by data key, or even it out "
                "with min_chunk_size)"
            )
        counts = numpy.where(whole[name] | (counts >= 0), counts, here)
    return counts


def _counts_of(column: Array, step: int, least: int, tail: Tail | None) -> Array:
    if tail != "drop_short":
        return numpy.where(column > 0, numpy.maximum(1, -(-(column - least) // step)), 0)
    least = max(least, 1)
    return numpy.where(column >= least, (column - least) // step + 1, 0)


def _with_zeros(values: Array, start: int, stop: int) -> Array:
    """The frames of a sequence from `start` up to `stop`, with zeros for those beyond its ends."""
    inside = values[max(start, 0) : stop]
    missing = max(-start, 0), max(stop - len(values), 0)
    return numpy.pad(inside, [missing, *[(0, 0)] * (values.ndim - 1)]) if any(missing) else inside


class ChunkedDataset(PartsOfSequences):
    """The chunks of a dataset's sequences as a dataset; its batches give the indices of the sequences, not of the chunks."""

    def __init__(self, dataset: Dataset, chunks: FixedChunks) -> None:
        super().__init__(dataset)
        self._chunks = chunks
        self.streams = dataset.streams
        self.lengths = chunks.lengths

    @property
    def num_sequences(self) -> int:
        return len(self._chunks.sequences)

    def sequence(self, index: int) -> dict[str, Array]:
        return self.sequences([index])[0]

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        return list(map(self._part, indices, self.whole(self._chunks.sequences[list(indices)].tolist())))

    def batch(self, indices: Array, packed: Collection[str] = ()) -> Batch:
        data = self.packed(indices, packed) if packed else self.padded(indices)
        return Batch(data, self._chunks.sequences[indices], partial(self.tags, indices.tolist()))

    def _part(self, index: int, arrays: Mapping[str, Array]) -> dict[str, Array]:
        number = int(self._chunks.numbers[index])
        chunk = {}
        for name, values in arrays.items():
            before, after = (0, 0) if self._chunks.context is None else self._chunks.context.frames(name)
            length = int(self.lengths[name][index]) - before - after
            start = number * self._chunks.steps.get(name, 0) if length < len(values) else 0
            chunk[name] = _with_zeros(values, start - before, start + length + after)
        return chunk

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(self._chunks.sequences[list(indices)].tolist())


def keys_in(settings: Settings, *, is_training: bool) -> ChunkKeys:
    """The keys that apply in training, or in evaluation, where sequences stay whole."""
    keys = settings.of(ChunkKeys)
    return keys if is_training else replace(keys, chunking=None)


def chunks_of(settings: Settings, is_training: bool, lengths: Mapping[str, Array]) -> FixedChunks | None:
    """The chunks of all sequences, by the keys of training or of evaluation; None: sequences stay whole."""
    return make_chunks(lengths, keys_in(settings, is_training=is_training))


def uses(settings: Settings, is_training: bool) -> dict[str, bool]:
    """By key, whether the config sets it for training, or for evaluation."""
    keys = keys_in(settings, is_training=is_training)
    return {
        "chunking": parse(keys.chunking) is not None,
        "context_window": parse_context(keys.context_window) is not None,
    }


def data_keys(settings: Settings) -> dict[str, list[str]]:
    keys = settings.of(ChunkKeys)
    return {"min_chunk_size" if parse(keys.chunking) is None else "chunking": keys_of(keys)}


CHUNKER = Chunker(chunks_of, uses, data_keys)
