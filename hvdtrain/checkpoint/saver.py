"""Saves checkpoints on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import ContentsProtocol
from hvdtrain.checkpoint.hooks import DiskProtocol
from hvdtrain.checkpoint.kept_models import KeptModels
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver_base import ALIKE, RankState, SaverBase
from hvdtrain.comm.base import gather_together, on_rank_zero, together
from hvdtrain.errors import HvdtrainError
from hvdtrain.learner.integrity import SAVE_ID, new_save_id
from hvdtrain.learner.model_state import StatePart
from hvdtrain.runtime import log


class Saver(SaverBase):
    """Writes checkpoints from which a training continues as if it had not been stopped.

    Rank 0 writes the model and its optimizer. Each rank writes the state in which it differs: the optimizer's state if parameters
    are averaged, and within an epoch BatchNorm's statistics, the parameters between two averages, and messages under way. The
    model that rank 0 writes is the average, from which a training continues on a different number of ranks. Computing it does not
    change the training, so results do not depend on when and how often checkpoints are written.

    `SaverBase` describes the methods; `training/saving.py` calls `prepare` and then `save`.

    Args:
        loader: of the same training: it has the ranks, the model's state, the reducer and the folder.
    """

    def __init__(
        self,
        loader: Loader,
        distribution: Literal["shard", "random_seed_offset"],
        kept: KeptModels | None = None,
        background: ThreadPoolExecutor | None = None,
        disk: DiskProtocol | None = None,
    ) -> None:
        self._comm = loader.comm
        self._state = loader.state
        self._sync = loader.sync
        self._checkpoints = checkpoints = loader.checkpoints
        self._distribution = distribution
        self._kept = KeptModels(checkpoints) if kept is None else kept
        self._background = background
        self._disk = disk
        self._writing: Future[None] | None = None  # on rank 0
        self._is_writing = False  # on all ranks
        self._last: Path | None = None  # the model's file of the last checkpoint that this start has written

    def prepare(self, check: Callable[[], object] = lambda: None) -> list[RankState]:
        self._sync.flush(self._state)
        self._is_writing = False

        def prepare_rank() -> RankState:
            check()
            self._await_writing()
            return RankState(self._sync.state(), new_save_id(), min(self._sync.alike))

        # All in one message: where ranks share cores, each message waits for all of them to be scheduled.
        return gather_together(self._comm, prepare_rank, name="rank_states")

    def save(self, progress: Progress, ranks: Sequence[RankState]) -> Checkpoint:
        step = None if progress.current is None else progress.step
        target = self._checkpoints.new(progress.epoch if progress.current is None else progress.current.epoch, step)
        parts: tuple[StatePart, ...] = ()  # of the state, that every rank has to save
        if self._comm.size > 1:
            local = self._sync.rank_local_state()
            parts = tuple(role for role in local if role == "optimizer" or role == "kept" or self._state.tensors(role))
        marks = {SAVE_ID: ranks[0].save_id}
        if parts:
            on_rank_zero(self._comm, lambda: self._checkpoints.prepare(target), name="prepare_save")
            file = target.rank_file(self._comm.rank, self._comm.size)
            together(
                self._comm,
                lambda: self._checkpoints.write_rank(file, partial(self._state.write_rank, parts=parts, marks=marks)),
                name="save_own",
            )
        entries = {
            **progress.state(),
            **marks,
            "size": self._comm.size,
            "distribution": self._distribution,
            "own": list(parts),
            "reducer": [rank.reducer for rank in ranks],
            ALIKE: [rank.alike for rank in ranks],
        }
        self._state.gather_state()
        start_writing = partial(self._start_writing, target, entries, progress)
        with self._sync.averaged_model(self._state):
            if self._background is None or (self._disk is not None and self._disk.is_awaited):
                on_rank_zero(self._comm, start_writing, name="save")
            elif self._comm.rank == 0:  # without a message: the next checkpoint is early enough to hear of a failure
                try:
                    start_writing()
                except HvdtrainError as error:
                    self._writing = Future()
                    self._writing.set_exception(error)
        self._is_writing = self._background is not None
        self._last = target.model_file
        log.detail(f"Save model under {target.model_file}")
        return target

    def _start_writing(self, target: Checkpoint, entries: Mapping[str, Any], progress: Progress) -> None:
        """Write a checkpoint, or in the background a copy of it that is in memory or on a local disk. Raises: CheckpointError."""
        if self._background is None:
            self._write(target, self._state.contents(entries), progress)
            return
        contents: ContentsProtocol
        if self._disk is not None and self._disk.is_awaited:
            contents = self._disk.write(target, self._state.contents(entries))
        else:
            contents = self._state.copied(self._state.contents(entries))
        self._writing = self._background.submit(self._write, target, contents, progress)

    def _write(self, target: Checkpoint, contents: ContentsProtocol, progress: Progress) -> None:
        """Write a checkpoint, then update best.json and clean up, in any thread. Raises: CheckpointError."""
        keep_models = self._kept.within_epochs(progress)
        (self._checkpoints.write if self._disk is None else self._disk.copy)(target, contents, keep_models)
        if target.step is None:
            self._kept.after_epoch(progress)

    def save_evaluated(self, progress: Progress) -> Checkpoint | None:
        self.finish()
        record = progress.evaluations[-1]
        target = self._checkpoints.new(record.epoch, record.step)
        if not on_rank_zero(
            self._comm, lambda: target.age in self._kept.within_epochs(progress, target.age), name="wanted_model"
        ):
            return None
        entries = {**progress.state(), SAVE_ID: new_save_id(), "size": self._comm.size, "distribution": self._distribution}
        self._sync.flush(self._state)
        # With its optimizer. A file that another start has left may have other weights, and is replaced.
        is_saved = target.model_file in (self._last, progress.file)

        def write() -> None:
            if not is_saved:
                self._checkpoints.write_model(target, self._state.contents(entries, model_only=True))
            self._checkpoints.tidy_models(target, self._kept.within_epochs(progress))
            self._kept.note_best(progress)

        with self._sync.averaged_model(self._state), self._state.averaged_weights():
            on_rank_zero(self._comm, write, name="save_model")
        log.detail(f"Save model under {target.model_file}")
        return target

    def finish(self) -> None:
        if self._is_writing:
            self._is_writing = False
            on_rank_zero(self._comm, self._await_writing, name="finish_saving")

    def _await_writing(self) -> None:
        """Wait for a checkpoint that this rank is writing in the background. Raises: CheckpointError."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()
