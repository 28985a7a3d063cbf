"""Saves and loads checkpoints on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from hvdtrain.checkpoint.average_rules import Averages
from hvdtrain.checkpoint.cleanup import PATTERN, CleanupRule
from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.local import FilesOnDisk, LocalDisk
from hvdtrain.checkpoint.preload import Preload, load_preloads, require_all
from hvdtrain.checkpoint.progress import BestModel, EpochProgress, Progress
from hvdtrain.checkpoint.saver_base import RankState, SaverBase
from hvdtrain.checkpoint.stored import read_progress
from hvdtrain.comm.base import Communicator, gather_together, on_rank_zero, together
from hvdtrain.errors import CheckpointError, DamagedCheckpoint, HvdtrainError
from hvdtrain.learner.contents import NO_MARKS, CheckpointContents, Reader
from hvdtrain.learner.integrity import SAVE_ID, damage, new_save_id
from hvdtrain.learner.model_state import ROLES, StatePart
from hvdtrain.learner.reducer import EpochSync, changed
from hvdtrain.learner.running_average import RunningAverage, RunningSums
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime import log
from hvdtrain.schedule.history import EpochRecord

NO_AVERAGES = Averages()

ALIKE = "alike"
"""The entry of a checkpoint with the lowest rank that has the same model and optimizer, for each rank."""


class Saver(SaverBase):
    """Writes checkpoints from which a training continues as if it had not been stopped.

    Rank 0 writes the model and its optimizer. Each rank writes the state in which it differs: the optimizer's state if parameters
    are averaged, and within an epoch BatchNorm's statistics, the parameters between two averages, and messages under way. The
    model that rank 0 writes is the average, from which a training continues on a different number of ranks. Computing it does not
    change the training, so results do not depend on when and how often checkpoints are written.
    """

    def __init__(
        self,
        comm: Communicator,
        state: StateBase,
        sync: EpochSync,
        checkpoints: CheckpointFolder,
        distribution: Literal["shard", "random_seed_offset"],
        cleanup: CleanupRule | None = None,
        averages: Averages = NO_AVERAGES,
        background: ThreadPoolExecutor | None = None,
        best: BestModel | None = None,
        local: LocalDisk | None = None,
    ) -> None:
        self._comm = comm
        self._state = state
        self._sync = sync
        self._checkpoints = checkpoints
        self._distribution = distribution
        self._cleanup = cleanup
        self._averages = averages
        self._background = background
        self._best = best
        self._local = local
        self._writing: Future[None] | None = None  # on rank 0
        self._is_writing = False  # on all ranks
        self._last: Checkpoint | None = None  # the last one that this start has written or continued from

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
        parts = self._rank_local_parts()
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
            if self._background is None or self._is_local_awaited:
                on_rank_zero(self._comm, start_writing, name="save")
            elif self._comm.rank == 0:  # without a message: the next checkpoint is early enough to hear of a failure
                try:
                    start_writing()
                except HvdtrainError as error:
                    self._writing = Future()
                    self._writing.set_exception(error)
        self._is_writing = self._background is not None
        self._last = target
        log.detail(f"Save model under {target.model_file}")
        return target

    def _start_writing(self, target: Checkpoint, entries: Mapping[str, Any], progress: Progress) -> None:
        """Write a checkpoint, or in the background a copy of it that is in memory or on a local disk. Raises: CheckpointError."""
        if self._background is None:
            self._write(target, self._state.contents(entries), progress)
            return
        contents: CheckpointContents | FilesOnDisk
        if self._local is not None and self._is_local_awaited:
            contents = self._local.write(target, self._state.contents(entries))
        else:
            contents = self._state.copied(self._state.contents(entries))
        self._writing = self._background.submit(self._write, target, contents, progress)

    @property
    def _is_local_awaited(self) -> bool:
        return self._local is not None and self._local.is_awaited

    def _write(self, target: Checkpoint, contents: CheckpointContents | FilesOnDisk, progress: Progress) -> None:
        """Write a checkpoint, then update best.json and clean up, in any thread. Raises: CheckpointError."""
        keep_models = self._kept_within(progress)
        if self._local is None:
            self._checkpoints.write(target, contents, keep_models)
        else:
            files = contents if isinstance(contents, FilesOnDisk) else self._local.write(target, contents)
            self._local.copy(target, files, keep_models)
        if target.step is not None:
            return
        self._note_best(progress)  # before the model that best.json names may be removed
        if self._cleanup is not None:
            clean_up(self._checkpoints, self._cleanup, progress.history, self._averages)
            self._note_best(progress)

    def save_evaluated(self, progress: Progress) -> Checkpoint | None:
        self.finish()
        record = progress.evaluations[-1]
        target = self._checkpoints.new(record.epoch, record.step)
        age = target.age
        if not on_rank_zero(self._comm, lambda: age in self._wanted_within(progress, age), name="wanted_model"):
            return None
        entries = {**progress.state(), SAVE_ID: new_save_id(), "size": self._comm.size, "distribution": self._distribution}
        self._sync.flush(self._state)
        # With its optimizer. A file that another start has left may have other weights, and is replaced.
        is_saved = self._last is not None and self._last.age == age

        def write() -> None:
            if not is_saved:
                self._checkpoints.write_model(target, self._state.contents(entries, model_only=True))
            self._checkpoints.tidy_models(target, self._kept_within(progress))
            self._note_best(progress)

        with self._sync.averaged_model(self._state), self._state.averaged_weights():
            on_rank_zero(self._comm, write, name="save_model")
        log.detail(f"Save model under {target.model_file}")
        return target

    def _kept_within(self, progress: Progress) -> set[tuple[int, float]]:
        """The ages of the models within epochs that are kept: those that may be the best, or that averages need."""
        return self._wanted_within(progress, None)

    def _wanted_within(self, progress: Progress, new: tuple[int, float] | None) -> set[tuple[int, float]]:
        """The same if there was a model of the age `new`, too."""
        if not progress.evaluations or self._best is None or not self._best.within_epochs:
            return set()
        existing = {checkpoint.age for checkpoint in self._checkpoints.models()} | ({new} if new is not None else set())
        return self._averages.kept_within(progress.records, existing)

    def finish(self) -> None:
        if self._is_writing:
            self._is_writing = False
            on_rank_zero(self._comm, self._await_writing, name="finish_saving")

    def _await_writing(self) -> None:
        """Wait for a checkpoint that this rank is writing in the background. Raises: CheckpointError."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def load(self, checkpoint: Checkpoint, fresh_optimizer: bool = False) -> Progress:
        """Collective. Continue from a checkpoint, on all ranks.

        Args:
            fresh_optimizer: leave out the optimizer's state and the ranks' files: every rank continues from the model's file, as
                on a different number of ranks.

        Raises:
            CheckpointError: a rank cannot read it, or the number of ranks has to be the one that wrote it.
        """
        state, progress = together(self._comm, lambda: self._read(checkpoint, fresh_optimizer), name="load_checkpoint")
        self._last = checkpoint
        self.broadcast()
        has_same_size = state.get("size") == self._comm.size
        if has_same_size and self._were_alike(state):
            if not fresh_optimizer:
                self._load_rank(checkpoint, state)
        elif (
            not has_same_size
            and progress.current is not None
            and not progress.current.trained
            and state["distribution"] == "random_seed_offset"
        ):
            raise CheckpointError(
                f"{checkpoint.model_file}: expected the {state['size']} ranks that wrote it in the middle of epoch "
                f"{progress.current.epoch}, got {self._comm.size}: with random_seed_offset each rank has done a different "
                "part of the epoch (remove the file to repeat the epoch from its beginning)"
            ).on_all_ranks()
        elif state.get("reducer"):
            self._restore(checkpoint, state["reducer"][0], same_ranks=False)
        return progress

    def _read(self, checkpoint: Checkpoint, fresh_optimizer: bool = False) -> tuple[dict[str, Any], Progress]:
        """Load this rank's model and optimizer; return the other entries and the progress. Raises: CheckpointError."""
        file = checkpoint.model_file
        without_optimizer = fresh_optimizer or self._checkpoints.is_from_elsewhere(checkpoint)
        state = self._state.load(file, None if without_optimizer else checkpoint.optimizer_file)
        progress = replace(read_progress(state, file), file=file)
        if missing := [name for name in ("epoch", "step") if state.get(name) is None]:
            raise DamagedCheckpoint(
                f"{file}: expected the position in the training, got a file without {' and '.join(missing)} (to start with its "
                "weights only, give the key `model` another folder, and import_model_train_epoch1 this file)"
            )
        if state["epoch"] != checkpoint.epoch or (progress.current is None) != (checkpoint.step is None):
            raise DamagedCheckpoint(
                f"{file}: expected the state {checkpoint.describe()}, as its name says, got that {progress.describe()} (was the "
                "file renamed?)"
            )
        if self._state.running is not None:
            self._restore_running(checkpoint, state, self._state.running)
        return state, progress

    def _restore_running(self, checkpoint: Checkpoint, state: Mapping[str, Any], running: RunningAverage) -> None:
        """Continue the sums of a checkpoint, if it has them. Raises: CheckpointError."""
        file = checkpoint.running_file
        if not file.exists():
            log.info(f"running_average: {checkpoint.model_file.name} has no sums; they begin here")
            return
        sums, marks = RunningSums.read(file)
        if marks.get(SAVE_ID) != state.get(SAVE_ID):
            raise DamagedCheckpoint(f"{file}: expected the sums saved with {checkpoint.model_file.name}, got others")
        running.restore(sums)

    def _were_alike(self, state: Mapping[str, Any]) -> bool:
        """Collective. Whether ranks that have the same model now had the same one in a checkpoint, so that each can continue from
        its own state."""
        first = state.get(ALIKE)
        if first is None:  # an earlier release, where either all ranks were alike or none
            first = range(self._comm.size) if "optimizer" in state.get("own", ()) else [0] * self._comm.size
        were_alike = len({first[rank] for rank in self._sync.alike}) == 1
        if all(self._comm.gather(were_alike, name="alike")):
            return True
        log.info("the ranks are in other groups than in the checkpoint: all continue from its model and the optimizer of rank 0")
        return False

    def is_intact(self, checkpoint: Checkpoint, model_only: bool = False) -> bool:
        """Whether training could continue from a checkpoint, or from its model. Finds out by loading it, on this rank only."""
        try:
            state, _ = self._read(checkpoint, fresh_optimizer=model_only)
        except CheckpointError:
            return False
        ranks = range(state.get("size", 1)) if state.get("own") and not model_only else ()
        files = [checkpoint.rank_file(rank, state["size"]) for rank in ranks]
        return all(file.exists() and damage(file) is None for file in files)

    def load_model(self, file: Path, epoch: int | None, read: Reader | None = None, with_optimizer: bool = False) -> Progress:
        """Collective. Load a model without its optimizer, unless `read` returns that.

        Args:
            epoch: the last epoch that counts as done; None: the epoch in the file, with its steps and scores.
            read: the key checkpoint_reader, which is not asked about files of this training.
            with_optimizer: load the optimizer, too, and go on within the epoch that `read` says has begun.

        Raises:
            CheckpointError: a rank cannot read it.
        """
        read = None if self._checkpoints.has_name(file) else read

        def load() -> tuple[Progress, int]:
            stored = self._state.load(file, None, read, with_optimizer)
            return read_progress(stored, file), stored.get("batches") or 0

        progress, batches = together(self._comm, load, name="load_model")
        self.broadcast()
        if epoch is None:
            current = None
            if batches and with_optimizer:
                done = min(progress.step, -(-batches // self._comm.size))
                current = EpochProgress(progress.epoch + 1, progress.step - done, position=batches)
            return replace(progress, current=current, data={}, keys={}, spent={}, callbacks={})
        history = [record for record in progress.history if record.epoch <= epoch]
        return Progress(step=progress.step, epoch=epoch, history=history)  # as in RETURNN, steps go on also if epochs do not

    def preload(self, preloads: list[Preload], is_whole: bool = False) -> None:
        """Collective. Load parameters of other models, on every rank.

        Args:
            is_whole: whether these are to be all parameters of the model.

        Raises:
            CheckpointError: a file cannot be read, or parameters are missing from all files.
        """

        def load_all() -> None:
            loaded = load_preloads(preloads, self._state.preload)
            if is_whole:
                require_all(preloads, {*self._state.tensors("parameters"), *self._state.tensors("frozen")}.difference(loaded))
            for preload in preloads:
                if preload.filename is not None:
                    log.info(f"Loaded {preload.filename} for preload_from_files.{preload.name}.")

        together(self._comm, load_all, name="preload")

    def broadcast(self) -> None:
        """Collective. Broadcast rank 0's model."""
        share_model(self._comm, self._state)

    def _load_rank(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        if parts := state.get("own"):
            file = checkpoint.rank_file(self._comm.rank, self._comm.size)
            marks = {SAVE_ID: state[SAVE_ID]} if SAVE_ID in state else NO_MARKS
            together(self._comm, lambda: self._state.load_rank(file, parts, marks), name="load_own")
        if reducer := state.get("reducer"):
            self._restore(checkpoint, reducer[self._comm.rank])

    def _restore(self, checkpoint: Checkpoint, state: dict[str, Any], same_ranks: bool = True) -> None:
        """Collective. Give the reducer its state. Raises: CheckpointError."""

        def restore() -> None:
            try:
                self._sync.restore(state, same_ranks)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise DamagedCheckpoint(
                    f"{checkpoint.model_file}: expected the state of this config's reducer in 'reducer', got another: {error!r}"
                ) from None

        together(self._comm, restore, name="restore_reducer")

    def _note_best(self, progress: Progress) -> None:
        if self._best is not None:
            self._best.update(self._best.records(progress))

    def _rank_local_parts(self) -> tuple[StatePart, ...]:
        """The parts of the state that every rank has to save."""
        if self._comm.size == 1:
            return ()
        parts = self._sync.rank_local_state()
        return tuple(part for part in parts if part == "optimizer" or part == "kept" or self._state.tensors(part))


def share_model(comm: Communicator, state: StateBase) -> None:
    """Collective. Broadcast rank 0's model."""
    for role in ROLES:
        state.set_tensors(role, changed(state.tensors(role), partial(comm.broadcast, name=f"initial_{role}")))


def clean_up(
    checkpoints: CheckpointFolder, rule: CleanupRule, history: Sequence[EpochRecord], averages: Averages = NO_AVERAGES
) -> None:
    """Remove the models that neither a rule keeps nor an average needs."""
    epochs = checkpoints.finished_epochs()
    reasons_to_keep = rule.epochs_to_keep(epochs, {record.epoch: record.comparable for record in history})
    for epoch, reasons in averages.epochs_to_keep(epochs, history).items():
        reasons_to_keep[epoch] = [*reasons_to_keep.get(epoch, []), *reasons]
    reasons_to_keep = dict(sorted(reasons_to_keep.items()))
    removed = [epoch for epoch in epochs if epoch not in reasons_to_keep]
    if removed:
        log.info(f"We have stored models for epochs {_shorten(epochs)} and keep epochs {list(reasons_to_keep)}.")
        reasons = [f"{epoch}: {', '.join(why)}" for epoch, why in reasons_to_keep.items()]
        log.info(f"Why they are kept: {'; '.join(reasons)}.")
        if rule.keep is None and any(why == [PATTERN] for why in reasons_to_keep.values()):
            log.info("The pattern is the default of `keep`; cleanup_old_models = {..., 'keep': []} keeps no others.")
        log.info(f"We will delete the models of epochs {removed}.")
        checkpoints.remove(checkpoints.at(epoch) for epoch in removed)


def _shorten(epochs: list[int]) -> str:
    if len(epochs) <= 6:
        return str(epochs)
    return f"[{', '.join(map(str, epochs[:3]))}, ..., {', '.join(map(str, epochs[-3:]))}]"
