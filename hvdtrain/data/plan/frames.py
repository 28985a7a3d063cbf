"""Batches of frames: the frames of an epoch's sequences, one after the other, cut after every `batch_size` frames.

They have no padding, and suit models that treat every frame by itself. It is RETURNN's rule for networks that are not recurrent.
The batches consist of pieces of sequences. A piece is a row of the plan's order: a sequence, its first frame, and the frame after
its last one, the same in every data key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.padding import join
from hvdtrain.data.plan.batch_keys import Limit, Limits
from hvdtrain.data.plan.bounds import NO_LIMIT
from hvdtrain.data.types import Array, Batch, UnlikeError
from hvdtrain.data.views import PartsOfSequences
from hvdtrain.errors import DataError


def cut_frames(lengths: Mapping[str, Array], indices: Array, limits: Limits) -> tuple[Array, Array]:
    """The pieces of an epoch's batches, int64 of shape (pieces, 3), and the bounds of the batches, int64 of shape (batches + 1,).

    A batch ends after `batch_size` frames; if limits differ between data keys, after the smallest of them. It also ends with its
    sequence number `max_seqs`, where a sequence without frames between two others counts.

    Args:
        lengths: by data key, number of frames of every sequence.
        indices: of the sequences, in order; shape (number of sequences in the epoch,).

    Raises:
        DataError: the data keys of a sequence have different numbers of frames.
    """
    frames = _common_lengths(lengths, indices)
    places = numpy.flatnonzero(frames)
    if not len(places):
        return numpy.zeros((0, 3), dtype=numpy.int64), numpy.zeros(1, dtype=numpy.int64)
    sequences = indices[places]
    ends = numpy.cumsum(frames[places])
    begins = ends - frames[places]
    cuts = _cuts(ends, places, _smallest(lengths, limits.batch_size), limits.max_seqs)
    edges = _merge(begins, cuts)  # pieces begin where a sequence or a batch begins
    owners = numpy.searchsorted(ends, edges[:-1], side="right")
    pieces = numpy.stack([sequences[owners], edges[:-1] - begins[owners], edges[1:] - begins[owners]], axis=1)
    return pieces.astype(numpy.int64, copy=False), numpy.searchsorted(edges, cuts).astype(numpy.int64, copy=False)


def frames_of(pieces: Array) -> Array:
    """The number of frames of every piece; int64 of shape (pieces,)."""
    return pieces[:, 2].astype(numpy.int64) - pieces[:, 1]


def _common_lengths(lengths: Mapping[str, Array], indices: Array) -> Array:
    """The number of frames of every sequence in order, int64. Raises: DataError, unless it is the same in all data keys."""
    (first, column), *other_columns = lengths.items()
    frames = column[indices].astype(numpy.int64)
    for name, frames_there in other_columns:
        wrong = numpy.flatnonzero(frames_there[indices] != frames)
        if len(wrong):
            index = int(indices[wrong[0]])
            raise DataError(
                f"frame_batches: expected the same number of frames in all data keys, got {column[index]} of {first!r} and "
                f"{frames_there[index]} of {name!r} in sequence {index} (extern_data may name the data keys that the model uses; "
                "others are left out)"
            )
    return frames


def _smallest(lengths: Mapping[str, Array], limit: Limit) -> int:
    """The smallest limit of a data key: the frames of all keys are cut at the same places."""
    by_key = limit if isinstance(limit, Mapping) else dict.fromkeys(lengths, limit or NO_LIMIT)
    return min((most for name, most in by_key.items() if name in lengths), default=NO_LIMIT)


def _cuts(ends: Array, places: Array, size: int, most: int | None) -> Array:
    """Where batches begin in the row of all frames, then the number of frames; int64 of shape (batches + 1,).

    Args:
        ends: where every sequence ends in this row; all of them have frames.
        places: of these sequences in the epoch.
        size: the most frames of a batch.
        most: the most sequences of a batch; None: no limit.
    """
    total = int(ends[-1])
    if most is None:
        return numpy.append(numpy.arange(0, total, size), total)
    cuts = [0]
    while cuts[-1] < total:
        first = int(numpy.searchsorted(ends, cuts[-1], side="right"))
        last = int(numpy.searchsorted(places, int(places[first]) + most - 1))
        cuts.append(min(cuts[-1] + size, int(ends[min(last, len(ends) - 1)])))
    return numpy.array(cuts, dtype=numpy.int64)


def _merge(row: Array, new: Array) -> Array:
    """The numbers of two ascending rows, each once, ascending. numpy.union1d sorts all of them, in ten times the time.

    >>> _merge(numpy.array([0, 3, 7]), numpy.array([0, 5, 9])).tolist()
    [0, 3, 5, 7, 9]
    """
    places = numpy.searchsorted(row, new)
    is_new = row[numpy.minimum(places, len(row) - 1)] != new
    return numpy.insert(row, places[is_new], new[is_new])


class FrameDataset(PartsOfSequences):
    """A dataset whose batches are pieces of sequences, joined to one row: arrays of shape (1, frames, ...).

    Args:
        names: the data keys of the batches.
    """

    def __init__(self, dataset: Dataset, names: Sequence[str]) -> None:
        super().__init__(dataset)
        self.streams = {name: dataset.streams[name] for name in names}
        self.lengths = {name: dataset.lengths[name] for name in names}

    @property
    def num_sequences(self) -> int:
        return self._dataset.num_sequences

    def sequence(self, index: int) -> dict[str, Array]:
        return self._dataset.sequence(index)

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._dataset.tags(indices)

    def batch(self, indices: Array, packed: Collection[str] = ()) -> Batch:
        """A batch of pieces, int64 of shape (pieces, 3). Raises: DataError."""
        pieces = indices
        owners = pieces[:, 0].tolist()
        sequences = self.whole(owners)

        def describe(name: str, number: int) -> str:
            return f"sequence {self.tags([owners[number]])[0]!r}, data key {name!r}"

        data = {}
        for name, planned in self.lengths.items():
            parts = []
            for number, (owner, start, stop) in enumerate(pieces.tolist()):
                values = sequences[number][name]
                if len(values) != planned[owner]:
                    raise UnlikeError(
                        f"{describe(name, number)}: expected {planned[owner]} frames, as the batches were planned with, got "
                        f"{len(values)}"
                    )
                parts.append(values[start:stop])
            data[name] = join(parts, partial(describe, name))
        return Batch(data, pieces[:, 0].copy(), partial(self.tags, owners), joined=frames_of(pieces))
