"""A dataset's batches for one rank, epoch by epoch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from hvdtrain.data.batches import ReadAhead, batches
from hvdtrain.data.combine.cache import Budget
from hvdtrain.data.dataset import at_epoch, file_bounds
from hvdtrain.data.files.unchanged import Unchanged
from hvdtrain.data.plan.chunks import Chunks
from hvdtrain.data.plan.epoch import BatchKeys, Plan, plan
from hvdtrain.data.plan.order import OrderKeys, full_epoch
from hvdtrain.data.plan.selection import used
from hvdtrain.data.types import Array, Batch, Dataset
from hvdtrain.errors import DataError

SEED_STEP = 16127
"""How far apart the ranks' seeds are under 'random_seed_offset'; RETURNN's number."""


@dataclass(frozen=True)
class Feed:
    """What one rank needs to know to read its part of a dataset.

    Attributes:
        distribution: 'shard': batch i of an epoch goes to rank i % size. 'random_seed_offset': every rank goes through all
            sequences, in an order of its own.
        subset: the sequences to use, ascending; None: all of them.
        chunks: the chunks of all sequences, where they are cut: batches then consist of chunks.
        files: the files that it is read from, which are to stay as they are.
        budget: the memory in which the dataset keeps what it read.
        select: what to use of a plan; None: all of it.
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
    select: Callable[[Plan], Plan] | None = None

    @property
    def lengths(self) -> Mapping[str, Array]:
        """By data key, frames of everything that the first epoch's indices may speak of: sequences, or chunks of them."""
        return self.lengths_in(1)

    def lengths_in(self, epoch: int) -> Mapping[str, Array]:
        """The lengths of an epoch, which differ where a function changes them by the epoch."""
        return at_epoch(self.dataset, epoch).lengths if self.chunks is None else self.chunks.lengths

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch (counted from 1). Raises: DataError, if a file is another than at the start."""
        if self.files is not None:
            self.files.check()
        keys = self.order_keys
        if self.distribution == "random_seed_offset":
            keys = replace(keys, random_seed_offset=keys.random_seed_offset + self.rank * SEED_STEP)
        lengths = at_epoch(self.dataset, epoch).lengths
        if self.chunks is not None and lengths is not self.dataset.lengths:
            raise DataError(
                f"chunking: expected lengths that are those of every epoch, got a map_lengths in {self.name} that takes it"
            )
        made = plan(
            lengths,
            keys,
            self.batch_keys,
            epoch,
            subset=used(self.dataset, self.subset, full_epoch(keys, epoch)),
            file_bounds=file_bounds(self.dataset),
            chunks=self.chunks,
        )
        return made if self.select is None else self.select(made)

    def num_sequences(self, plan: Plan) -> int:
        """How many sequences a plan goes through, each cut into chunks or not."""
        return len(plan.order) if self.chunks is None else int((self.chunks.numbers[plan.order] == 0).sum())

    def share(self, plan: Plan, position: int = 0) -> list[Array]:
        """This rank's batches of a plan, as indices of sequences (or of chunks), without those up to a position: the number
        of batches that all ranks did together; each rank for itself where every rank goes through all data.
        """
        return plan.share(self.rank, self.size, position) if self.distribution == "shard" else plan.share(0, 1, position)

    def read(self, share: list[Array], epoch: int) -> ReadAhead[Batch]:
        """The batches themselves, as they are in an epoch, read in the background."""
        dataset = at_epoch(self.dataset, epoch)
        return ReadAhead(batches(dataset, share) if self.chunks is None else self.chunks.batches(dataset, share))
