"""The walk from settings to a trained model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.config.plugins import Registry
from hvdtrain.engine import Engine
from hvdtrain.learner.base import Learner
from hvdtrain.runtime.goodput import ACCOUNTS, steady_time
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.settings import Settings
from hvdtrain.start_up.announce import announce, check_space, gather_hosts, log_end, record_start
from hvdtrain.start_up.checkpoints import checkpoint_folder
from hvdtrain.start_up.data import note_changed_files
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.limits import open_limits, open_rates
from hvdtrain.start_up.measures import refuse_wrong_directions, wrong_scores
from hvdtrain.start_up.overfit import overfit_settings, repeat_batches
from hvdtrain.start_up.reporters import open_reporters
from hvdtrain.training.average import Average
from hvdtrain.training.callbacks import Callbacks, pruned_before
from hvdtrain.training.session import EpochMeasure, Session, StepRecorder
from hvdtrain.training.step_log import StepLog, open_step_log

RECORDERS: Registry[Callable[[Settings, Session], AbstractContextManager[StepRecorder | None]]] = Registry("recorders")
"""What plug-ins do before every step, such as writing down its sequences."""

MEASURES: Registry[Callable[[Settings, Session], EpochMeasure | None]] = Registry("measures")
"""What plug-ins measure about epochs."""

FINAL_MODELS: Registry[Callable[[Settings, Session, StepLog], Sequence[Average]]] = Registry("final_models")
"""What plug-ins make of the checkpoints after the last epoch, such as averages of them."""

CALLBACKS: Registry[Callable[[Settings], Sequence[Any]]] = Registry("callbacks")
"""Those of plug-ins."""


@dataclass(frozen=True)
class Trained:
    """The result of a training, on every rank.

    Attributes:
        learner: with the model after the last epoch.
        history: of all finished epochs, including those of earlier starts.
        best: the contents of best.json (`checkpoint/progress.py`); None: no epoch has a score.
        checkpoint: the file with the last epoch's model.
        num_epochs: the number of epochs that this start finished.
        averages: those of `average_checkpoints`, with their scores.
        pruned: what a callback or track_epoch of this rank has raised to end an Optuna trial after its last epoch; None: nothing.
    """

    learner: Learner
    history: Sequence[EpochRecord]
    best: Mapping[str, Any] | None
    checkpoint: Path
    num_epochs: int
    averages: Sequence[Average]
    pruned: Exception | None


def train(settings: Settings, comm: Communicator | None = None) -> Trained:
    """Train as the config says, from the newest checkpoint on.

    Args:
        comm: ranks that are connected already; None: connect them as the config says.

    Raises:
        HvdtrainError: a mistake in the config, the data or a checkpoint, or training was stopped.
    """
    began = steady_time()
    pruned: Exception | None = None
    if settings.run.overfit_batches is not None:
        settings = overfit_settings(settings)
    with (
        open_session(settings, "train", comm) as session,
        open_step_log(settings.log, session.comm.rank, settings.process) as step_log,
    ):
        if settings.run.overfit_batches is not None:
            session = repeat_batches(session, settings.run.overfit_batches)
        limits = replace(open_limits(settings, session.epochs), mistake=partial(wrong_scores, settings))
        epochs_before = session.progress.epoch
        hosts = gather_hosts(session)
        announce(settings, session, limits, hosts)
        refuse_wrong_directions(settings, session.progress.history)
        if (open_account := ACCOUNTS.last) is not None:
            session = replace(session, goodput=open_account(settings, session, began))
        start = record_start(settings, session, hosts)
        # The last start may have been killed before it wrote best.json, or had other keys for what is best.
        on_rank_zero(session.comm, lambda: session.best.update(session.best.records(session.progress)), name="best")
        session.interrupt.defer()  # from here on, a signal ends the training after an update, with a checkpoint
        if session.comm.rank == 0:
            this_process.launcher().on_training()
        if not limits.are_reached(session.progress):
            on_rank_zero(session.comm, partial(check_space, settings, session), name="space")
            opened_measures = {name: open_measure(settings, session) for name, open_measure in MEASURES.items()}
            measures = {name: measure for name, measure in opened_measures.items() if measure is not None}
            session = replace(session, measures=measures)
            rates = open_rates(settings, session.comm.size, session.epochs)
            callbacks = together(session.comm, lambda: _open_callbacks(settings, session.comm.rank), name="callbacks")
            with (
                note_changed_files(session.feeds),
                open_reporters(settings, session, start) as reporters,
                session.goodput.training(),
                ExitStack() as recording,
            ):
                opened = [recording.enter_context(open_recorder(settings, session)) for open_recorder in RECORDERS.values()]
                recorders = [recorder for recorder in opened if recorder is not None]
                pruned = Engine(session, rates, limits, reporters, step_log, recorders, callbacks).run()
        else:  # the last start may have been killed before Optuna knew
            pruned = pruned_before(limits.end_after_epoch(session.progress))
        averages = [average for make in FINAL_MODELS.values() for average in make(settings, session, step_log)]
        progress = session.progress
        num_epochs = progress.epoch - epochs_before
        log_end(settings, session, num_epochs)
        checkpoint = checkpoint_folder(settings).checkpoint_at(progress.epoch).model_file
        best = session.best.summary(session.best.records(progress))
        return Trained(session.learner, list(progress.history), best, checkpoint, num_epochs, averages, pruned)


def _open_callbacks(settings: Settings, rank: int) -> Callbacks:
    return settings.callbacks.open(rank, [callback for make in CALLBACKS.values() for callback in make(settings)])
