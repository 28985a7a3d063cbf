"""What determines the plan of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy

from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.chunks import Chunks
from hvdtrain.data.plan.costs import costs_of
from hvdtrain.data.plan.epoch import Plan, crc32, plan
from hvdtrain.data.plan.mix import Mix
from hvdtrain.data.plan.order_keys import OrderKeys, method_of, order_text, part_of, seed_of
from hvdtrain.data.types import Array


@dataclass(frozen=True)
class PlanInputs:
    """The arguments of `plan`."""

    lengths: Mapping[str, Array]
    order_keys: OrderKeys
    batch_keys: BatchKeys
    epoch: int
    subset: Array | None
    file_bounds: Array | None
    chunks: Chunks | None
    window: int | None = None
    mix: Mix | None = None
    lengths_of_order: Mapping[str, Array] | None = None
    max_batches: int | None = None

    @property
    def size(self) -> int:
        """The number of sequences, or of chunks."""
        return len(next(iter(self.lengths.values())) if self.chunks is None else self.chunks.sequences)

    def plan(self) -> Plan:
        """Raises: DataError."""
        return plan(**vars(self))

    def as_text(self) -> dict[str, str]:
        """By name, as text, the keys and other inputs that determine the plan. Raises: DataError."""
        order = self.order_keys
        batches = self.batch_keys
        limits = self.batch_keys.limits(self.epoch)
        frames = ", ".join(f"{column.sum(dtype=numpy.int64)} frames of {name!r}" for name, column in self.lengths.items())
        inputs = {
            "seq_ordering": order_text(order, self.epoch),
            **{name: getattr(order, name) for name in ("partition_epoch", "partition_by", "repeat_epoch")},
            "the seed of the order": seed_of(order, self.epoch),
            "batch_size per rank": limits.batch_size,
            "max_seqs per rank": limits.max_seqs,
            **{
                name: getattr(batches, name) for name in ("packed_batch_size", "max_pad_size", "min_seq_length", "max_seq_length")
            },
            **{
                name: getattr(batches, name)
                for name in ("frame_batches", "shuffle_batches", "online_shuffle_batches", "balance_ranks")
            },
            **({"largest_batches_first": True} if batches.largest_batches_first else {}),
            **({} if self.max_batches is None else {"max_batches of all ranks": self.max_batches}),
            "window": self.window,
            **({"chunking": None} if self.chunks is None else self.chunks.as_text()),
            "seq_list_filter_file": None if self.subset is None else f"{len(self.subset)} sequences",
            **({} if self.mix is None else {"the mix": self.mix.text()}),
            **({} if batches.batch_cost is None else {"batch_cost": f"costs with the checksum {crc32(self._costs())}"}),
            "the data": f"{len(next(iter(self.lengths.values())))} sequences, {frames}",
        }
        return {name: str(value) for name, value in inputs.items()}

    def _costs(self) -> Array:
        """The costs of sequences or chunks; empty if the config defines none. Raises: DataError."""
        costs = costs_of(self.batch_keys, self.lengths if self.chunks is None else self.chunks.lengths)
        return numpy.zeros(0) if costs is None else costs

    def checksum(self) -> int:
        """A checksum: the same on two ranks if they would make the same plan, and faster to compute. Raises: DataError."""
        order = self.order_keys
        batches = self.batch_keys
        epoch = self.epoch
        keys = (
            *(method_of(order, epoch), seed_of(order, epoch), part_of(order, epoch)),
            *(order.partition_epoch, order.partition_by, order.repeat_epoch),
            *(batches.limits(epoch), batches.min_seq_length, batches.max_seq_length),
            *(batches.shuffle_batches, batches.balance_ranks, batches.shuffle_window, list(self.lengths)),
            *(self.max_batches, self.window, batches.frame_batches, batches.largest_batches_first),
            None if self.mix is None else self.mix.text(),
        )
        checksum = crc32(numpy.frombuffer(repr(keys).encode(), dtype=numpy.uint8))
        chunks = [] if self.chunks is None else self.chunks.arrays()
        for array in (
            *self.lengths.values(),
            *(self.lengths_of_order or {}).values(),
            self.subset,
            self.file_bounds,
            *chunks,
            self._costs(),
        ):
            checksum = crc32(numpy.zeros(0) if array is None else array, checksum)
        return checksum


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """The differences between the inputs of two plans; '' if there are none or they are unknown.

    >>> differences({"ranks": "1", "window": "None"}, {"ranks": "2", "window": "None"})
    'ranks: 2, expected 1'
    """
    return "; ".join(f"{name}: {now[name]}, expected {value}" for name, value in before.items() if now.get(name, value) != value)
