"""Callbacks: methods of the config's objects that are called when an epoch begins, a step ends, a model is saved, ..."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.check import build_objects
from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import ConfigError, Problem, prunes

if TYPE_CHECKING:
    from hvdtrain.schedule.history import EpochRecord
    from hvdtrain.training.phase import EvaluatedModel, Phase
    from hvdtrain.training.session import Session

EVENTS = {
    "on_train_begin": "before the first epoch of this start of the program",
    "on_epoch_begin": "before the steps of an epoch, or before its remaining steps after a resume",
    "on_idle_step": "on a rank without a batch, before a step of the others",
    "on_step_end": "after every step, which is one batch on every rank",
    "on_evaluation_begin": "before a dataset is evaluated, also within an epoch",
    "on_evaluation_end": "after a dataset was evaluated, also within an epoch",
    "on_epoch_end": "after all evaluations of an epoch, before it is saved",
    "on_save": "after a checkpoint was written, also within an epoch, or the model of an evaluation within it",
    "on_stop": "at the end of the training, whether finished or stopped, but not after an error",
}
"""By method, when it is called."""


class Training:
    """The argument of callbacks: the state of the training. Each attribute has its value at the time when it is read.

    Attributes:
        model: the object that `get_model` returned.
        optimizer: the optimizer of the framework.
        rank, size: the rank of this process, and the number of ranks.
        learning_rate: of the last update, or at the beginning of the epoch.
        scores: in on_evaluation_end and on_epoch_end, the epoch's scores so far by name, such as 'train_loss_ce' and
            'dev_loss_wer'; afterwards those of the last epoch.
        checkpoint: the file of the last saved model, such as exp/model.003.pt; None: none so far. With save_in_background, it may
            not be complete yet.
        is_last_step: in on_step_end, whether the epoch ends after this step, on all ranks.
        stopped_by: in on_stop, why the training ends before its last epoch; None: it does not.
    """

    def __init__(self, session: Session, phase: Phase, evaluated: EvaluatedModel) -> None:
        comm = session.comm
        progress = session.progress
        self._learner = session.learner
        self._watchdog = session.watchdog
        self._phase = phase
        self._evaluated = evaluated
        self._progress = progress
        self._best = session.best
        self.rank = comm.rank
        self.size = comm.size
        self.learning_rate: float | None = None
        self.scores: Mapping[str, float] = progress.history[-1].scores if progress.history else {}
        self.checkpoint: Path | None = None
        self.is_last_step = False
        self.stopped_by: str | None = None
        self.wants_stop: str | None = None
        self.wants_finish: str | None = None
        self.wants_evaluation = False
        self.pruned: Exception | None = None
        self.added_scores: dict[str, float] = {}
        self.takes_scores = False

    @property
    def model(self) -> Any:
        return self._learner.model

    @property
    def optimizer(self) -> Any:
        return self._learner.optimizer

    @property
    def epoch(self) -> int:
        """The epoch that is being trained or evaluated, or else the last one, counted from 1."""
        return self._phase.epoch

    @property
    def dataset(self) -> str | None:
        """The name of the dataset that is evaluated, in on_evaluation_begin and on_evaluation_end; otherwise None."""
        return self._phase.dataset

    @property
    def is_within_epoch(self) -> bool:
        """Whether this is an evaluation within an epoch (`eval_interval_steps`), in on_evaluation_begin and on_evaluation_end."""
        return self._phase.is_within_epoch

    @property
    def finished_epoch(self) -> int:
        """The last epoch that is trained and evaluated; 0: none."""
        return self._progress.epoch

    @property
    def best_epoch(self) -> int | None:
        """The best epoch, as in best.json; None: no epoch has a score."""
        best = self._best_record()
        return None if best is None else best.epoch

    @property
    def best_step(self) -> int | None:
        """The step of the whole training after which the best model was evaluated, if that was within its epoch."""
        best = self._best_record()
        return None if best is None else best.at_step

    def _best_record(self) -> EpochRecord | None:
        return self._best.measure.best(self._best.records(self._progress))

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside the `with` block, the model has the weights that are evaluated and saved: the averages of `ema_decay`, or those
        of an optimizer that has other ones for evaluations, and where ranks train on their own, the averages of the ranks. All
        ranks have to enter it together, and leave it before the callback returns."""
        return self._evaluated.use()

    @property
    def step(self) -> int:
        """The number of steps done in the whole training."""
        return self._phase.step

    @property
    def epoch_step(self) -> int:
        """The number of steps done in this epoch; between epochs 0."""
        current = self._progress.current
        return 0 if current is None else self.step - current.first_step

    def add_score(self, name: str, value: float) -> None:
        """Add a score to those of train_step: in on_evaluation_end one of the dataset, as 'dev_loss_NAME', in on_epoch_end one of
        the training data, as 'train_loss_NAME'. That of rank 0 counts.

        Raises:
            ConfigError: it is called elsewhere.
        """
        if not self.takes_scores:
            where = "on_evaluation_end or on_epoch_end"
            raise ConfigError.of("wrong-call", f"add_score: expected a call in {where}, got one elsewhere, of {name!r}")
        if name in self.added_scores or f"{self.dataset or 'train'}_loss_{name}" in self.scores:
            raise ConfigError.of("duplicate", f"add_score: expected a name that no score has, got {name!r} twice")
        self.added_scores[name] = float(value)

    def beat(self) -> None:
        """Say that a callback which takes many minutes makes progress. Half an hour without one ends the job, as it may hang."""
        self._watchdog.go_on()

    def stop(self, reason: str) -> None:
        """Request a stop, as a signal does: all ranks stop after the same step, a few steps from now, with a checkpoint and
        status 75 (`docs/resuming.md`). A request of one rank is enough.
        """
        self.wants_stop = self.wants_stop or reason

    def finish(self, reason: str) -> None:
        """Request the end of the training after this epoch, as early stopping does: with its evaluation, its model, and status 0.
        A request of one rank is enough, in any callback but `on_stop`, which is called after the last checkpoint.
        """
        self.wants_finish = self.wants_finish or reason

    def evaluate(self) -> None:
        """Request an evaluation within the epoch in `on_step_end`, after this step's update, as `eval_interval_steps` does.
        All ranks have to call it after the same step; after an epoch's last step it has no effect, as the epoch is evaluated.
        """
        self.wants_evaluation = True

    def prune(self, error: Exception) -> None:
        """End training after this epoch, as `finish` does, and raise an error of Optuna's when all is saved."""
        self.pruned = error
        self.finish(f"{PRUNED}{f': {error}' if str(error) else ''}")


PRUNED = "the trial was pruned"


def pruned_before(end: str | None) -> Exception | None:
    """What ended the training as pruned in an earlier start, which was stopped or killed before it could raise it.

    Args:
        end: why the training ends after this epoch, or has ended; None: it does not.
    """
    optuna = sys.modules.get("optuna")  # where it is not imported, no code expects its error
    if end is None or not end.startswith(PRUNED) or optuna is None:
        return None
    return optuna.TrialPruned(end.removeprefix(PRUNED).removeprefix(": "))  # type: ignore[no-any-return]


Call = Callable[[Training], None]


class Callbacks:
    """Calls the callbacks of this rank, in the order of the config.

    Args:
        objects: the config's objects on this rank.
    """

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        # Looked up once: on_step_end is called in every step.
        self._objects: dict[str, Any] = {}
        for callback in objects:
            if all(callable(getattr(callback, name, None)) for name in ("state_dict", "load_state_dict")):
                number = sum(name.partition(" ")[0] == type(callback).__name__ for name in self._objects)
                self._objects[f"{type(callback).__name__} {number + 1}" if number else type(callback).__name__] = callback
        self._calls: dict[str, list[tuple[str, Call]]] = {
            event: [(type(callback).__name__, getattr(callback, event)) for callback in objects if hasattr(callback, event)]
            for event in EVENTS
        }

    def has(self, event: str) -> bool:
        """Whether any of them has the method `event`."""
        return bool(self._calls[event])

    def state(self) -> dict[str, Any]:
        """By class, a copy of what callbacks with a `state_dict` keep in checkpoints: numbers, texts, lists and dicts.

        Raises:
            ConfigError: it is something else, which a checkpoint could not be read with.
        """
        return {name: plain(f"callbacks: {name}.state_dict()", callback.state_dict()) for name, callback in self._objects.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Give callbacks what they kept, by `load_state_dict`; one without an entry begins anew."""
        for name in self._objects.keys() & state.keys():
            self._objects[name].load_state_dict(state[name])

    def call(self, event: str, training: Training, note: Callable[[str], object] | None = None) -> None:
        """Call the method `event` of all callbacks that have it, also after one that has pruned an Optuna trial.

        Args:
            note: called before each of them with the name of its class; None: nothing is.
        """
        for name, call in self._calls[event]:
            if note is not None:
                note(name)
            try:
                call(training)
            except Exception as error:
                if not prunes(error):
                    raise
                training.prune(error)


def plain(where: str, value: Any) -> Any:
    """A copy of plain values; numbers of numpy become Python's. Raises: ConfigError, if one is not plain."""
    if value is None or isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins":
        return value
    if type(value) is dict:
        return {plain(where, name): plain(f"{where}[{name!r}]", entry) for name, entry in value.items()}
    if type(value) in (list, tuple):
        members = [plain(f"{where}[{number}]", member) for number, member in enumerate(value)]
        return members if isinstance(value, list) else tuple(members)
    if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():
        return plain(where, value.item())
    raise ConfigError.of(
        "wrong-result",
        f"{where}: expected numbers, texts, lists and dicts, got {type(value).__name__} "
        "(tensors: .tolist(), others: dict(), list())",
    )


NO_CALLBACKS = Callbacks()


@dataclass(frozen=True, kw_only=True)
class CallbackKeys(Section):
    """Functions that are called while a training runs."""

    callbacks: Any = key(
        None,
        "an object with methods on_epoch_end(training) and the like, a class, 'module:Class', a dict of `class` and its "
        "arguments, or a list of these; called on every rank, or on rank 0 if it has rank_zero_only = True (docs/training.md)",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        return build_objects("callbacks", self.callbacks, EVENTS, "on_")[1]

    def open(self, rank: int, of_plugins: Iterable[Any] = ()) -> Callbacks:
        """The callbacks of a rank: first those of plug-ins. Raises: ConfigError."""
        factories, _ = build_objects("callbacks", self.callbacks, EVENTS, "on_")
        objects = [factory.make() for factory in factories if rank == 0 or not getattr(factory.kind, "rank_zero_only", False)]
        return Callbacks([*of_plugins, *objects])
