"""Loads checkpoints and models, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.checkpoint.saver_base import ALIKE
from hvdtrain.checkpoint.stored import read_progress
from hvdtrain.comm.base import Communicator, together
from hvdtrain.errors import CheckpointError, DamagedCheckpoint
from hvdtrain.learner.averaging import changed
from hvdtrain.learner.contents import NO_MARKS, Reader
from hvdtrain.learner.integrity import SAVE_ID, damage
from hvdtrain.learner.model_state import ROLES
from hvdtrain.learner.reducer import EpochSync
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime import log


class Loader:
    """Gives the model of all ranks, its optimizer and its reducer what a file says.

    After `load`, a training continues as if it had not been stopped: on the same number of ranks, each has its former state; on
    another number, each begins with the model that rank 0 wrote.
    """

    def __init__(self, comm: Communicator, state: StateBase, sync: EpochSync, checkpoints: CheckpointFolder) -> None:
        self.comm = comm
        self.state = state
        self.sync = sync
        self.checkpoints = checkpoints

    def load(self, checkpoint: Checkpoint, fresh_optimizer: bool = False) -> Progress:
        """Collective. Continue from a checkpoint, on all ranks.

        Args:
            fresh_optimizer: leave out the optimizer's state and the ranks' files: every rank continues from the model's file, as
                on a different number of ranks.

        Raises:
            CheckpointError: a rank cannot read it, or the number of ranks has to be the one that wrote it.
        """
        state, progress = together(self.comm, lambda: self._read(checkpoint, fresh_optimizer), name="load_checkpoint")
        self.broadcast()
        has_same_size = state.get("size") == self.comm.size
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
                f"{progress.current.epoch}, got {self.comm.size}: with random_seed_offset each rank has done a different "
                "part of the epoch (remove the file to repeat the epoch from its beginning)"
            ).on_all_ranks()
        elif state.get("reducer"):
            self._restore(checkpoint, state["reducer"][0], same_ranks=False)
        return progress

    def _read(self, checkpoint: Checkpoint, fresh_optimizer: bool = False) -> tuple[dict[str, Any], Progress]:
        """Load this rank's model and optimizer; return the other entries and the progress. Raises: CheckpointError."""
        file = checkpoint.model_file
        without_optimizer = fresh_optimizer or self.checkpoints.is_from_elsewhere(checkpoint)
        state = self.state.load(file, None if without_optimizer else checkpoint.optimizer_file)
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
        if self.state.running is not None:
            self.state.running.load(checkpoint.running_file, file, state)
        return state, progress

    def _were_alike(self, state: Mapping[str, Any]) -> bool:
        """Collective. Whether ranks that have the same model now had the same one in a checkpoint, so that each can continue from
        its own state."""
        first = state.get(ALIKE)
        if first is None:  # an earlier release, where either all ranks were alike or none
            first = range(self.comm.size) if "optimizer" in state.get("own", ()) else [0] * self.comm.size
        were_alike = len({first[rank] for rank in self.sync.alike}) == 1
        if all(self.comm.gather(were_alike, name="alike")):
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
        read = None if self.checkpoints.has_name(file) else read

        def load() -> tuple[Progress, int]:
            stored = self.state.load(file, None, read, with_optimizer)
            return read_progress(stored, file), stored.get("batches") or 0

        progress, batches = together(self.comm, load, name="load_model")
        self.broadcast()
        if epoch is None:
            current = None
            if batches and with_optimizer:
                done = min(progress.step, -(-batches // self.comm.size))
                current = EpochProgress(progress.epoch + 1, progress.step - done, position=batches)
            return replace(progress, current=current, data={}, keys={}, spent={}, callbacks={}, finished=None)
        history = [record for record in progress.history if record.epoch <= epoch]
        return Progress(step=progress.step, epoch=epoch, history=history)  # as in RETURNN, steps go on also if epochs do not

    def broadcast(self) -> None:
        """Collective. Broadcast rank 0's model."""
        share_model(self.comm, self.state)

    def _load_rank(self, checkpoint: Checkpoint, state: dict[str, Any]) -> None:
        if parts := state.get("own"):
            file = checkpoint.rank_file(self.comm.rank, self.comm.size)
            marks = {SAVE_ID: state[SAVE_ID]} if SAVE_ID in state else NO_MARKS
            together(self.comm, lambda: self.state.load_rank(file, parts, marks), name="load_own")
        if reducer := state.get("reducer"):
            self._restore(checkpoint, reducer[self.comm.rank])

    def _restore(self, checkpoint: Checkpoint, state: dict[str, Any], same_ranks: bool = True) -> None:
        """Collective. Give the reducer its state. Raises: CheckpointError."""

        def restore() -> None:
            try:
                self.sync.restore(state, same_ranks)
            except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
                raise DamagedCheckpoint(
                    f"{checkpoint.model_file}: expected the state of this config's reducer in 'reducer', got another: {error!r}"
                ) from None

        together(self.comm, restore, name="restore_reducer")


def share_model(comm: Communicator, state: StateBase) -> None:
    """Collective. Broadcast rank 0's model."""
    for role in ROLES:
        state.set_tensors(role, changed(state.tensors(role), partial(comm.broadcast, name=f"initial_{role}")))
