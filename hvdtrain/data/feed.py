"""The batches of a dataset for one rank, epoch by epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

from hvdtrain.data.batches import ReadAhead
from hvdtrain.data.combine.cache import Budget
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files.unchanged import Unchanged
from hvdtrain.data.identity import Part
from hvdtrain.data.plan.bounds import BLOCK
from hvdtrain.data.plan.chunks import ChunkedDataset, Chunks
from hvdtrain.data.plan.epoch import BatchKeys, Plan
from hvdtrain.data.plan.order import OrderKeys, full_epoch
from hvdtrain.data.plan.selection import epoch_subset
from hvdtrain.data.plan.shared import PlanInputs
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import DataError

SEED_STEP = 16127
"""The distance between the seeds of two neighbouring ranks under 'random_seed_offset'; RETURNN's number."""


class Staging(Protocol):
    """What a learner does to batches on their way from the reading thread to a step."""

    def pin(self, batch: Batch) -> Batch:
        """The batch in memory that a device can copy from by itself. Called by the reading thread."""
        ...

    def send(self, batch: Batch) -> Batch:
        """Start to copy a batch to the device. Called by the thread that trains, one batch ahead."""
        ...


@dataclass(frozen=True)
class Feed:
    """What one rank needs to read its share of a dataset.

    Attributes:
        distribution: 'shard': batch i of an epoch goes to rank i % size. 'random_seed_offset': every rank goes through all
            sequences, in an order of its own.
        subset: the indices of the sequences to use, ascending; None: all of them.
        chunks: the chunks of all sequences, if they are cut: batches then consist of chunks.
        files: the files that the dataset reads, which must not change meanwhile.
        budget: the memory in which the dataset caches sequences.
        only: what to do instead of an epoch's plan; None: all of it.
        parts: the datasets that the dataset consists of, which identify its data.
    """

    name: str
    dataset: Dataset
    order_keys: OrderKeys
    batch_keys: BatchKeys
    rank: int
    size: int
    distribution: Literal["shard", "random_seed_offset"] = "shard"
    subset: Array | None = None
    chunks: Chunks | None = None
    files: Unchanged | None = None
    budget: Budget | None = None
    only: Plan | None = None
    parts: Sequence[Part] = ()

    @property
    def lengths(self) -> Mapping[str, Array]:
        """By data key, the number of frames of every sequence in the first epoch; of every chunk, if sequences are cut."""
        return self.lengths_in(1)

    def lengths_in(self, epoch: int) -> Mapping[str, Array]:
        """`lengths` in an epoch; they depend on it where `map_lengths` takes the epoch."""
        return self.dataset.at_epoch(epoch).lengths if self.chunks is None else self.chunks.lengths

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch (counted from 1). Raises: DataError, if a file changed since the start."""
        return self.inputs(epoch).plan() if self.only is None else self.only

    def inputs(self, epoch: int) -> PlanInputs:
        """What the plan of an epoch is made from. Raises: DataError, if a file changed since the start."""
        if self.files is not None:
            self.files.check()
        keys = self.order_keys
        if self.distribution == "random_seed_offset":
            keys = replace(keys, random_seed_offset=keys.random_seed_offset + self.rank * SEED_STEP)
        lengths = self.dataset.at_epoch(epoch).lengths
        if self.chunks is not None and lengths is not self.dataset.lengths:
            raise DataError(
                f"chunking: expected the same lengths in every epoch, got a map_lengths in {self.name} that takes the epoch"
            )
        return PlanInputs(
            lengths,
            keys,
            self.batch_keys,
            epoch,
            subset=epoch_subset(self.dataset, self.subset, full_epoch(keys, epoch)),
            file_bounds=self.dataset.file_bounds(),
            chunks=self.chunks,
        )

    def num_sequences(self, plan: Plan) -> int:
        """The number of sequences in a plan, whether they are cut into chunks or not."""
        return self.sequences_among(plan.order)

    def sequences_among(self, indices: Array) -> int:
        """The number of sequences among indices of a plan; if sequences are cut, that of their first chunks."""
        if self.chunks is None:
            return len(indices)
        parts = (indices[i : i + BLOCK] for i in range(0, len(indices), BLOCK))
        return sum(int((self.chunks.numbers[part] == 0).sum()) for part in parts)

    def share(self, plan: Plan, position: int = 0) -> Sequence[Array]:
        """This rank's batches of a plan, as indices of sequences (or of chunks).

        Args:
            position: the number of batches of the plan to leave out at the beginning: those that all ranks together have done, or
                this rank alone under 'random_seed_offset'.
        """
        return plan.share(self.rank, self.size, position) if self.distribution == "shard" else plan.share(0, 1, position)

    def read(self, share: Sequence[Array], epoch: int, staging: Staging | None = None) -> ReadAhead[Batch]:
        """The batches of a share with the arrays of an epoch, read in the background.

        Args:
            staging: the learner's; None: batches are not copied to a device ahead.
        """
        dataset = self.dataset.at_epoch(epoch)
        if self.chunks is not None:
            dataset = ChunkedDataset(dataset, self.chunks)
        batches = map(dataset.batch, share)
        if staging is None:
            return ReadAhead(batches)
        return ReadAhead(map(staging.pin, batches), begin=staging.send)
