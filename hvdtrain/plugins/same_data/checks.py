"""Comparing the data with that of the checkpoint, and between the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.data.feed import Feed
from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.same_data import SameDataKeys
from hvdtrain.plugins.same_data.identity import AGAIN, Identity, as_close, changes, identify, rewritten_files, sample_of
from hvdtrain.runtime import log
from hvdtrain.settings import Settings
from hvdtrain.start_up.data import DataCheck


def compare_with_checkpoint(settings: Settings, comm: Communicator, progress: Progress, feeds: Sequence[Feed]) -> None:
    """Collective. Compare the data with that of the checkpoint which the progress is of, and note what is there now.

    Between epochs, other data is noted in the log; an older checkpoint may have nothing to compare with.

    Raises:
        CheckpointError: training would continue within an epoch, and train is not what the epoch began with.
        DataError: the data cannot be read.
    """
    datasets = {feed.name: feed.parts for feed in feeds}
    accept = settings.of(SameDataKeys).accept_changed_data

    def compare() -> tuple[dict[str, list[Identity]], bool]:
        epoch = progress.current if progress.current is not None and not progress.current.trained else None
        has_changed = False
        for name, leaves in datasets.items():
            before = progress.data.get(name)
            if before is None:
                continue
            differences = list(changes(before, leaves))
            is_begun = epoch is not None and name == "train"
            if differences and is_begun and not accept:
                raise CheckpointError(
                    f"{name}: expected the data that epoch {progress.epoch + 1} began with, got {'; '.join(differences)} "
                    "(continue with that data, or with this: ++accept_changed_data 1; or remove "
                    f"{progress.file} to repeat the epoch from its beginning)"
                )
            has_changed = has_changed or bool(differences and is_begun)
            if differences:
                log.write(2 if is_begun else 3, f"{name}: other data than in the checkpoint: {'; '.join(differences)}")
            elif files := rewritten_files(before, leaves):
                more = f" and {len(files) - 1} more" if len(files) > 1 else ""
                log.detail(f"{name}: {files[0]}{more}: written since the checkpoint; lengths, tags and some values are the same")
        return {name: identify(leaves) for name, leaves in datasets.items() if leaves}, has_changed

    progress.data, has_changed = on_rank_zero(comm, compare, name="data")
    if has_changed and progress.current is not None:
        progress.current.fingerprints = []  # the batches may be others, too


def compare_ranks(comm: Communicator, feeds: Sequence[Feed], epoch: int) -> None:
    """Collective. Raises: ConfigError, if some sequences are others on another rank; DataError."""
    for feed in feeds if comm.size > 1 else ():  # also where each rank has its own order
        for times in (2, AGAIN):
            sample = together(comm, partial(sample_of, feed.dataset, epoch, times), name="sample")
            by_rank = comm.gather(sample if comm.rank == 0 else sample.outline(), name="samples")
            texts = as_close(sample, by_rank)
            first = as_close(by_rank[0], by_rank)
            if feed.distribution != "shard":  # ranks may have other sequences, but not the same ones with other values
                same = {place for place, name in by_rank[0].names.items() if sample.names.get(place) == name}
                texts = {place: texts[place] if place in same else text for place, text in first.items()}
            if all(comm.gather(texts == first, name="same_sample")):
                break
        else:
            check_alike(comm, "data", texts, of=f"{feed.name}: ")


SAME_DATA = DataCheck(compare_with_checkpoint, compare_ranks)
