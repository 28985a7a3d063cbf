"""The batches of a dataset for one rank, epoch by epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy

from hvdtrain.data.broken import BrokenSequences, check_finite
from hvdtrain.data.cache import NO_CACHE, Cache
from hvdtrain.data.dataset import Dataset, DatasetPart, ended_iterator_error
from hvdtrain.data.expected import BatchCheck, Expected, source_of
from hvdtrain.data.files import Unchanged
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.bounds import SEQUENCES_AT_ONCE
from hvdtrain.data.plan.chunks import Chunks
from hvdtrain.data.plan.epoch import Plan, RankBatches
from hvdtrain.data.plan.frames import FrameDataset
from hvdtrain.data.plan.inputs import PlanInputs
from hvdtrain.data.plan.order_keys import OrderKeys, full_epoch, limit_of, part_of
from hvdtrain.data.plan.selection import epoch_subset
from hvdtrain.data.read_ahead import ReadAhead, Staging, ahead_of
from hvdtrain.data.types import Array, Batch, BatchParts, UnlikeError
from hvdtrain.data.views import PartsOfSequences, Redrawn
from hvdtrain.errors import BrokenSequence, DataError, HvdtrainError

SEED_STEP = 16127
"""The distance between the seeds of two neighbouring ranks under 'random_seed_offset'; RETURNN's number."""


@dataclass(frozen=True)
class Feed:
    """What one rank needs to read its share of a dataset.

    Attributes:
        distribution: 'shard': batch i of an epoch goes to rank i % size. 'random_seed_offset': every rank goes through all
            sequences, in a different order.
        subset: the indices of the sequences to use, ascending; None: all of them.
        chunks: the chunks of all sequences, if they are cut: batches then consist of chunks.
        files: the files that the dataset reads, which must not change during training.
        cache: the memory in which sequences stay once they are read.
        only: a plan to use instead of an epoch's; None: the epoch's.
        parts: the datasets that the dataset consists of, which identify its data.
        expected: the entries of `extern_data` by data key, which every batch is compared with.
        broken: the broken sequences that are left out of batches, up to a limit.
        made_for: the number of ranks that its batches are made for; None: `size`.
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
    cache: Cache = NO_CACHE
    only: Plan | None = None
    parts: Sequence[DatasetPart] = ()
    expected: Mapping[str, Expected] = field(default_factory=dict)
    broken: BrokenSequences = field(default_factory=lambda: BrokenSequences("data", 0))
    made_for: int | None = None

    @property
    def source(self) -> str:
        """The name, with the files if there are any."""
        return source_of(self.name, list(dict.fromkeys(path for source in self.parts for path in source.files)))

    @property
    def passes(self) -> int:
        """How often the ranks together go through the data in an epoch."""
        return 1 if self.distribution == "shard" else self.size

    @property
    def _ranks(self) -> int:
        return self.made_for or self.size

    def check_files(self) -> None:
        """Raises: DataError, if a data file has changed since the start."""
        if self.files is not None:
            self.files.check()

    @property
    def lengths(self) -> Mapping[str, Array]:
        """By data key, the number of frames of every sequence in the first epoch; of every chunk, if sequences are cut."""
        return self.lengths_in(1)

    def lengths_in(self, epoch: int) -> Mapping[str, Array]:
        """`lengths` in an epoch; they depend on it if `map_lengths` takes the epoch. Without data keys that batches leave out."""
        return self._batch_lengths(self.dataset.at_epoch(epoch).lengths if self.chunks is None else self.chunks.lengths)

    def _batch_lengths(self, lengths: Mapping[str, Array]) -> Mapping[str, Array]:
        return {name: lengths[name] for name in self.frame_keys} if self.batch_keys.frame_batches else lengths

    @property
    def frame_keys(self) -> list[str]:
        """The data keys in batches of frames: those that `extern_data` names, or all if it names none."""
        return [name for name in self.dataset.streams if name in self.expected] or list(self.dataset.streams)

    @property
    def packed_keys(self) -> tuple[str, ...]:
        """The data keys of batches without padding."""
        setting = self.batch_keys.packed
        streams = self.dataset.streams
        return (
            tuple(name for name in streams if name in setting) if isinstance(setting, list) else tuple(streams) if setting else ()
        )

    def padding(self, plan: Plan, epoch: int) -> dict[str, float]:
        """By data key, the share of the frames in an epoch's batches that is padding."""
        packed = self.packed_keys
        return {name: 0.0 if name in packed else share for name, share in plan.padding(self.lengths_in(epoch)).items()}

    def plan(self, epoch: int) -> Plan:
        """The plan of an epoch (counted from 1). Raises: DataError, if a file changed since the start."""
        return self.inputs(epoch).plan() if self.only is None else self.only

    def plan_inputs(self, epoch: int) -> dict[str, str]:
        """By name, as text, the inputs of the batches of an epoch. Raises: DataError, if a file changed since the start."""
        if self.only is not None:
            return {}
        return {
            "ranks": str(self._ranks),
            "horovod_dataset_distribution": self.distribution,
            **self.inputs(epoch).as_text(),
        }

    def inputs(self, epoch: int) -> PlanInputs:
        """The inputs of the plan of an epoch. Raises: DataError, if a file changed since the start."""
        self.check_files()
        keys = self.order_keys
        if self.distribution == "random_seed_offset":
            keys = replace(keys, random_seed_offset=keys.random_seed_offset + self.rank * SEED_STEP)
        now = self.dataset.at_epoch(epoch)
        lengths = now.lengths
        mix = self.dataset.mix
        if mix is not None and mix.needs_lengths and lengths is not self.dataset.lengths:
            raise DataError(
                f"{mix.where}.by: expected the same lengths in every epoch, got a map_lengths in {self.name} that takes the epoch"
            )
        if self.chunks is not None and lengths is not self.dataset.lengths:
            raise DataError(
                f"{self.chunks.key}: expected the same lengths in every epoch, got a map_lengths in {self.name} that takes the "
                f"epoch"
            )
        return PlanInputs(
            self._batch_lengths(lengths),
            keys,
            self.batch_keys,
            epoch,
            subset=epoch_subset(self.dataset, self.subset, full_epoch(keys, epoch)),
            file_bounds=now.file_bounds(),
            chunks=self.chunks,
            window=now.window,
            mix=mix,
            lengths_of_order=self._lengths_of_order(keys, epoch, lengths),
            max_batches=None if (most := limit_of(keys, epoch)) is None else most * (self._ranks if self.passes == 1 else 1),
        )

    def _lengths_of_order(self, keys: OrderKeys, epoch: int, lengths: Mapping[str, Array]) -> Mapping[str, Array] | None:
        """The lengths by which an epoch's sequences are ordered and chosen; None: its own.

        Epochs that share out the sequences (`partition_epoch`) must order them alike, so all take those of the first of them.
        """
        dataset = self.dataset
        if lengths is dataset.lengths or dataset.has_fixed_order:
            return None
        if dataset.mix is not None:
            return dataset.lengths
        first = epoch - part_of(keys, epoch)
        return None if first == epoch else self._batch_lengths(dataset.at_epoch(first).lengths)

    def sequences_among(self, indices: Array) -> int:
        """The number of sequences among indices of a plan; if sequences are cut, the number of first chunks, or pieces."""
        if indices.ndim == 2:
            return int((indices[:, 1] == 0).sum())
        if self.chunks is None:
            return len(indices)
        blocks = (indices[i : i + SEQUENCES_AT_ONCE] for i in range(0, len(indices), SEQUENCES_AT_ONCE))
        return sum(int((self.chunks.numbers[block] == 0).sum()) for block in blocks)

    def sequences_of(self, indices: Array) -> Array:
        """The sequence of each of a plan's indices, which may be chunks or pieces of sequences."""
        if indices.ndim == 2:
            return indices[:, 0]
        return indices if self.chunks is None else self.chunks.sequences[indices]

    def rank_batches(self, plan: Plan, position: int = 0) -> Sequence[Array]:
        """This rank's batches of a plan, as indices of sequences (or of chunks), or as pieces.

        Args:
            position: the number of batches to skip at the beginning of the plan: those that all ranks together have done, or this
                rank alone under 'random_seed_offset'.
        """
        rank, size = (self.rank, self.size) if self.distribution == "shard" else (0, 1)
        return plan.rank_batches(rank, size, position)

    def read(self, batches: Sequence[Array], epoch: int, staging: Staging | None = None) -> ReadAhead[Batch]:
        """Batches of a plan with the arrays of an epoch, read in the background.

        Args:
            staging: the learner's; None: batches are not copied to a device ahead.

        Raises:
            DataError: when it comes to a batch that does not match the plan, the dataset or the config.
        """
        dataset = self.dataset.at_epoch(epoch)
        if self.chunks is not None:
            dataset = self.chunks.dataset(dataset)
        if self.batch_keys.frame_batches:
            dataset = FrameDataset(dataset, self.frame_keys)
        from_files = bool(self.parts) and all(source.files for source in self.parts) and not self.dataset.is_stochastic
        check = BatchCheck(self.name, dataset, self.lengths_in(epoch), self.parts, self.expected, from_files)
        mix = self.dataset.mix
        packed = self.packed_keys
        has_items = dataset.collate is not None

        # A generator: it turns a StopIteration of the user's code into an error, where `map` would silently stop.
        def read_all() -> Iterator[Batch]:
            for number, indices in enumerate(batches):
                try:
                    draws = batches.draws(number) if isinstance(batches, RankBatches) and self.dataset.is_stochastic else None
                    batch = self._read_batch(dataset, check, packed, indices, draws)
                    if mix is not None:
                        batch = replace(batch, parts=BatchParts(mix.names, mix.parts_of(batch.indices)))
                    if has_items and len(batch.indices):
                        batch = dataset.collated(batch)
                except StopIteration as error:
                    raise ended_iterator_error(f"{self.name}, sequences {_first_few(indices)}", error) from error
                except UnlikeError as error:
                    raise DataError(f"{self.name}: {error}") from None
                except HvdtrainError:
                    raise
                except BaseException as error:
                    error.add_note(f"in a batch of {self.name}, sequences {_first_few(indices)}")
                    raise
                yield batch if staging is None else staging.pin(batch)

        return ReadAhead(read_all(), depth=ahead_of, begin=None if staging is None else staging.send)

    def _read_batch(
        self, dataset: Dataset, check: BatchCheck, packed: Collection[str], indices: Array, draws: Array | None
    ) -> Batch:
        """The batch with these indices, without broken sequences if that is allowed. Raises: DataError.

        Args:
            packed: the data keys without padding.
            draws: how often the epoch has had each of these sequences before; None: it does not matter.
        """

        def read(rows: slice | Array) -> Batch:
            source = dataset
            if draws is not None and draws[rows].any():
                again = draws[rows]
                source = dataset.drawn(again) if isinstance(dataset, PartsOfSequences) else Redrawn(dataset, again)
            batch = source.batch(indices[rows], packed)
            if self.broken.limit:
                check_finite(batch)
            return batch

        try:
            return check(read(slice(None)), indices)
        except BrokenSequence as error:
            if not self.broken.limit:
                where = "" if str(error).startswith(f"{self.name}, ") else f"{self.name}: "
                raise BrokenSequence(f"{where}{error} (skip_broken = N lets a training continue without N of them)") from None
        good = numpy.ones(len(indices), bool)
        broken = []
        for position, sequence in enumerate(self.sequences_of(indices).tolist()):
            try:
                read(slice(position, position + 1))
            except BrokenSequence as error:
                good[position] = False
                broken.append((sequence, str(error)))
        readable = indices[good]
        left_out = self.sequences_among(indices[~good])
        batch = check(read(good), readable) if len(readable) else Batch({}, self.sequences_of(readable))
        return replace(batch, broken=broken, left_out=left_out)


FEW_TAGS = 5
"""How many tags (or indices) of a batch's sequences a message lists."""


def _first_few(indices: Array) -> str:
    """The indices that begin a batch, for a message."""
    few = indices[:FEW_TAGS] if indices.ndim == 1 else indices[:FEW_TAGS, 0]
    return ", ".join(map(str, few.tolist())) + (", ..." if len(indices) > FEW_TAGS else "")


def check_files(feeds: Iterable[Feed]) -> None:
    """Raises: DataError, if a data file of a feed has changed since the start."""
    for feed in feeds:
        feed.check_files()
