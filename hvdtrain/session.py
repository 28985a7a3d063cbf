"""An open job: the ranks, the data, the model and its checkpoints. `start_up/job.py` opens it."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.checkpoint.saver import SaverProtocol
from hvdtrain.comm.base import Communicator
from hvdtrain.data.feed import Feed
from hvdtrain.learner.base import Learner
from hvdtrain.learner.reducer import Reducer
from hvdtrain.runtime.interrupt import Interrupt
from hvdtrain.runtime.timer import Timer
from hvdtrain.runtime.watchdog import Watchdog


@dataclass(frozen=True)
class Session:
    """The parts of a job on every rank: opened, built, loaded, and about to begin.

    Attributes:
        feeds: the datasets; in a training, train comes first.
        interrupt: signals and the time limit; watched in a training only.
        best: keeps best.json, which names the best epoch.
        progress: how far the model has been trained.
    """

    comm: Communicator
    timer: Timer
    watchdog: Watchdog
    interrupt: Interrupt
    feeds: list[Feed]
    learner: Learner
    reducer: Reducer
    saver: SaverProtocol
    best: BestModel
    progress: Progress
