"""What plug-ins do with the model and the checkpoints of a job: the table `checkpoint_hooks`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # plug-ins import this file for their keys, which `--help` lists: numpy would make it slower
    from hvdtrain.checkpoint.files import Checkpoint
    from hvdtrain.checkpoint.folder import CheckpointFolder, ContentsProtocol
    from hvdtrain.checkpoint.loader import Loader
    from hvdtrain.checkpoint.progress import Progress
    from hvdtrain.checkpoint.saver_base import SaverBase
    from hvdtrain.comm.base import Communicator
    from hvdtrain.learner.preload import PreloadFunction
    from hvdtrain.schedule.history import EpochRecord

LoadConstants = Callable[["PreloadFunction"], list[str]]
"""Loads parameters by what loads some of a file, and returns their names."""

Age = tuple[int, float]
"""That of a checkpoint or a record: later ones compare larger."""


Needed = Callable[[Sequence[int]], Mapping[int, list[str]]]
"""Of epochs that have a model, those whose models some plug-in needs, with the reasons."""


class DiskProtocol(Protocol):
    """Where checkpoints are written before they are in the model's folder. Both methods raise CheckpointError.

    Attributes:
        is_awaited: whether the steps wait for `write`; otherwise they wait for a copy in memory only.
    """

    is_awaited: bool

    def write(self, target: Checkpoint, contents: ContentsProtocol) -> ContentsProtocol:
        """Write a checkpoint, in place of the one before. Returns its files."""
        ...

    def copy(self, target: Checkpoint, contents: ContentsProtocol, keep_models: Collection[Age]) -> None:
        """Put a checkpoint into the model's folder, as `CheckpointFolder.write` does; `contents` may be what `write` returned."""
        ...


class CheckpointHooks:
    """What a plug-in does with the model and the checkpoints of a job. It is made when a job opens, on all ranks.

    The methods are in the order of their calls; a plug-in overrides those that it needs.
    """

    def fetch(self, comm: Communicator, checkpoints: CheckpointFolder) -> None:
        """Collective. Put the newest checkpoint into the folder, before a training looks for it. Raises: CheckpointError."""

    def disk(self, checkpoints: CheckpointFolder) -> DiskProtocol | None:
        """Where checkpoints are written first; None: into the folder."""
        return None

    def fills_model(self) -> bool:
        """Whether `load` gives all parameters a value in a task other than training, which then needs no trained model."""
        return False

    def constants(self) -> LoadConstants | None:
        """What gives parameters values that are neither trained nor saved, and returns their names; None: there are none.

        It is called on every rank when the model has been made."""
        return None

    def built(self, loader: Loader) -> None:
        """Called on all ranks once the model of a training is made, before anything is loaded."""

    def history(self, epoch: int) -> list[EpochRecord]:
        """On rank 0: the records of the epochs up to this one, if the model's file has none. Raises: HvdtrainError."""
        return []

    def load(self, loader: Loader, *, is_training: bool, is_fresh: bool) -> None:
        """Collective. Give parameters other values, once a model is loaded.

        Args:
            is_fresh: whether there is no checkpoint to continue from, or in another task no trained model.

        Raises:
            CheckpointError: a file cannot be read, or is of another model.
        """

    def restored(self, progress: Progress) -> None:
        """Called on all ranks when a training goes on from its checkpoint, or begins, before its first epoch."""

    def begin_epoch(self, epoch: int, progress: Progress, saver: SaverBase, loader: Loader) -> None:
        """Collective. Called before an epoch is planned that begins, not where it is resumed. Raises: CheckpointError."""

    def needed_within(self, records: Sequence[EpochRecord]) -> Collection[Age]:
        """Of evaluations within epochs whose models are there, the ages of those whose models are still needed.

        Args:
            records: of epochs and evaluations that have a model, oldest first.
        """
        return ()

    def needed_epochs(self, epochs: Sequence[int], history: Sequence[EpochRecord]) -> dict[int, list[str]]:
        """Of epochs that have a model, in order, those whose models are still needed, with the reasons."""
        return {}

    def clean_up(self, checkpoints: CheckpointFolder, history: Sequence[EpochRecord], needed: Needed) -> bool:
        """On rank 0, after the model of an epoch is written: remove models that are no longer wanted. Returns whether it did.

        Args:
            needed: as `needed_epochs`, of all plug-ins.
        """
        return False


def needed_epochs(
    checkpoint_hooks: Sequence[CheckpointHooks], epochs: Sequence[int], history: Sequence[EpochRecord]
) -> dict[int, list[str]]:
    """The same of several plug-ins."""
    reasons: dict[int, list[str]] = {}
    for hooks in checkpoint_hooks:
        for epoch, why in hooks.needed_epochs(epochs, history).items():
            reasons.setdefault(epoch, []).extend(why)
    return reasons


def constants_of(checkpoint_hooks: Sequence[CheckpointHooks]) -> LoadConstants | None:
    """What gives parameters the values that plug-ins keep constant; None: there are none."""
    loaders = [load for hooks in checkpoint_hooks if (load := hooks.constants()) is not None]

    def load_all(load: PreloadFunction) -> list[str]:
        return [name for load_constants in loaders for name in load_constants(load)]

    return load_all if loaders else None
