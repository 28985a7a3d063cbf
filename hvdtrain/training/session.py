"""An open job: the ranks, the data, the model and its checkpoints. `start_up/job.py` opens it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.checkpoint.saver_base import SaverBase
from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.data.types import Array
from hvdtrain.learner.base import Learner
from hvdtrain.learner.reducer import Reducer
from hvdtrain.report.epoch import EpochReport
from hvdtrain.runtime.goodput import Goodput
from hvdtrain.runtime.interrupt import Interrupt
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import Watchdog

StepRecorder = Callable[[int, int, Array], None]
"""Called before a step with the epoch, the number of earlier steps of the training, and the indices of this rank's sequences."""

EpochMeasure = Callable[[EpochReport], Mapping[str, float]]
"""Called with the report of an epoch; returns numbers by name, which become an entry of it."""


class Epochs(Protocol):
    """What differs between the epochs of a training."""

    def keys(self, epoch: int) -> Mapping[str, Any]:
        """The keys that have a value for this epoch only, with their values. Collective, if they change at all.

        Raises:
            ConfigError: a key may not change, or has a wrong value; on all ranks alike.
        """
        ...

    def feeds(self, feeds: Sequence[Feed], epoch: int) -> list[Feed]:
        """The datasets of an epoch, given those of the job. Collective, if they change at all. Raises: HvdtrainError."""
        ...


@dataclass(frozen=True)
class Session:
    """The parts of a job on every rank: opened, built, loaded, and about to begin.

    Attributes:
        feeds: the datasets; in a training, train comes first.
        interrupt: signals and the time limit; watched in a training only.
        best: keeps best.json, which names the best epoch.
        progress: how far the model has been trained.
        epochs: the keys and datasets that change with the epoch.
        goodput: measures where the seconds of the training go.
        loader: loads models into that of the job.
        checkpoint_hooks: what plug-ins do with the model and the checkpoints.
        measures: by name, what plug-ins measure about epochs on this rank.
    """

    comm: Communicator
    timer: Timer
    watchdog: Watchdog
    interrupt: Interrupt
    feeds: list[Feed]
    learner: Learner
    reducer: Reducer
    saver: SaverBase
    best: BestModel
    progress: Progress
    epochs: Epochs
    goodput: Goodput
    loader: Loader
    checkpoint_hooks: Sequence[CheckpointHooks] = ()
    measures: Mapping[str, EpochMeasure] = field(default_factory=dict)
