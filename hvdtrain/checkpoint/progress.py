"""The progress of a training, which a checkpoint holds next to the tensors; and best.json, which names the best epoch so far."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.data.plan.order_keys import ORDER_VERSION
from hvdtrain.disk.atomic import write_atomically
from hvdtrain.errors import CheckpointError
from hvdtrain.runtime import log
from hvdtrain.runtime.records import records_of
from hvdtrain.runtime.scores import Scores
from hvdtrain.schedule.directions import base_of, implies_higher_is_better
from hvdtrain.schedule.history import EpochRecord, EvaluationRecord, UsedRates, merge_records
from hvdtrain.schedule.measure import Measure, best_of, complete_history


@dataclass
class EpochProgress:
    """The progress within the current epoch.

    Attributes:
        epoch: counted from 1.
        first_step: the number of training steps done when the epoch began.
        position: the number of batches done on all ranks together; if every rank goes through all data, on each rank.
        trained: whether all batches are done and all ranks have the same model again, so that only the evaluation remains.
        elapsed: the seconds that the epoch has taken, up to the last stop or checkpoint.
        computing: those spent in training steps.
        scores: the scores of the batches done, as far as the ranks have gathered them.
        rates: the learning rates of the updates done.
        syncs: the number of syncs of the ranks' parameters.
        sent: the bytes that rank 0 has sent for these and as gradients.
        sent_between_groups: those of them that it has sent to other groups of ranks.
        fingerprints: checksums of the epoch's plan, by rank.
        order_version: the `ORDER_VERSION` (`data/plan/order.py`) that the plan was made with.
        made_from: by name, the inputs of the plan; empty in checkpoints of earlier releases.
        initial: the losses and errors of the epoch's first batch on the first rank that had one.
        splits: the number of batches that did not fit into a rank's memory and were split.
        updated: the number of updates that were checked and applied, in the whole training or, if every rank updates alone, on
            all ranks together; and `skipped`: those that were skipped, as gradients were not finite.
        left_out: the number of broken sequences in the batches done, as far as the ranks have gathered it.
        learning_rate: the epoch's rate since an evaluation within it has changed it; None: none has.
        is_evaluation_due: whether an evaluation within the epoch comes before the next step.
        ended_by: why the epoch ends before all its steps are done; '': it does not.
    """

    epoch: int
    first_step: int
    position: int = 0
    trained: bool = False
    elapsed: float = 0.0
    computing: float = 0.0
    syncs: int = 0
    sent: int = 0
    sent_between_groups: int = 0
    scores: Scores = field(default_factory=Scores)
    rates: UsedRates = field(default_factory=UsedRates)
    fingerprints: list[int] = field(default_factory=list)
    order_version: int = ORDER_VERSION
    made_from: dict[str, str] = field(default_factory=dict)
    initial: dict[str, float] = field(default_factory=dict)
    splits: int = 0
    updated: int = 0
    skipped: int = 0
    left_out: int = 0
    learning_rate: float | None = None
    is_evaluation_due: bool = False
    ended_by: str = ""


@dataclass
class Progress:
    """Attributes:
    step: the number of training steps done (a step is one batch on every rank).
    epoch: the last finished epoch.
    history: the records of the finished epochs, oldest first; without those before an imported model.
    evaluations: the records of evaluations within epochs, oldest first.
    current: the epoch after it, if it has begun.
    report: the last finished epoch's line in scores.jsonl.
    data: by dataset, what a plug-in keeps of its data to compare it later, in plain values.
    keys: by name, the values of keys that a plug-in compares later; empty in checkpoints of earlier releases.
    spent: where the seconds went, as the account of a plug-in has it; empty in checkpoints of earlier releases.
    finished: why a callback ends the training after the current epoch, or has ended it after the last one, and `num_epochs` then:
        more epochs are trained all the same; None: none does.
    callbacks: by name, what callbacks with a `state_dict` keep in checkpoints.
    file: the model's file from which training continues; None: training began anew. It is not stored.
    start: the log line about that; '': there is none. It is not stored.
    """

    step: int = 0
    epoch: int = 0
    history: list[EpochRecord] = field(default_factory=list)
    current: EpochProgress | None = None
    report: dict[str, Any] | None = None
    data: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    spent: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None
    start: str = ""
    evaluations: list[EvaluationRecord] = field(default_factory=list)
    finished: tuple[str, int] | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)

    @property
    def records(self) -> list[EpochRecord]:
        """The records of the finished epochs and of the evaluations within epochs, oldest first."""
        return merge_records(self.history, self.evaluations)

    def finish_epoch(self, record: EpochRecord, report: dict[str, Any]) -> None:
        """Record that the current epoch is trained and evaluated."""
        self.epoch = record.epoch
        self.current = None
        self.report = report
        self.history = [*complete_history(self.history, record.losses), record]

    def state(self) -> dict[str, Any]:
        """The progress as plain numbers, texts, lists and dicts. `epoch` is that in the checkpoint's name, finished or not."""
        current = None
        if self.current is not None:
            current = {**vars(self.current), "scores": self.current.scores.state(), "rates": asdict(self.current.rates)}
        evaluations = {"evaluations": [asdict(record) for record in self.evaluations]} if self.evaluations else {}
        return {
            "epoch": self.epoch if self.current is None else self.current.epoch,
            "step": self.step,
            "history": [asdict(record) for record in self.history],
            **evaluations,
            "within": current,
            "report": self.report,
            "data": self.data,
            "keys": self.keys,
            "spent": self.spent,
            **({} if self.finished is None else {"finished": list(self.finished)}),
            **({"callbacks": self.callbacks} if self.callbacks else {}),
        }

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> Progress:
        """The progress from what `state` returned, or from another program's checkpoint (RETURNN's has an epoch and a step)."""
        current = None
        if state.get("within") is not None:
            stored = {"order_version": 1, **state["within"]}  # version 1 was not stored
            rates = UsedRates(**stored.get("rates", {}))
            current = EpochProgress(**{**stored, "scores": Scores.from_state(stored["scores"]), "rates": rates})
        return Progress(
            step=int(state.get("step") or 0),
            epoch=int(state.get("epoch") or 0) - (current is not None),
            history=[EpochRecord(**record) for record in state.get("history") or []],
            current=current,
            report=state.get("report"),
            data=state.get("data") or {},
            keys=state.get("keys") or {},
            spent=state.get("spent") or {},
            evaluations=[EvaluationRecord(**record) for record in state.get("evaluations") or []],
            finished=None if state.get("finished") is None else (str(state["finished"][0]), int(state["finished"][1])),
            callbacks=state.get("callbacks") or {},
        )

    def describe(self) -> str:
        """Where training stands, in words.

        >>> Progress(step=20, epoch=2).describe()
        'after epoch 2, step 20'
        >>> Progress(step=23, epoch=2, current=EpochProgress(epoch=3, first_step=20)).describe()
        'in epoch 3, after its step 3'
        """
        if self.current is None:
            return f"after epoch {self.epoch}, step {self.step}"
        if self.current.trained:
            return f"with the evaluation of epoch {self.current.epoch}"
        return f"in epoch {self.current.epoch}, after its step {self.step - self.current.first_step}"


BEST = "best.json"


class BestModel:
    """Keeps best.json up to date, after every epoch (in the background, after its model), and when training resumes.

    Args:
        within_epochs: whether evaluations within epochs compete as well.

    Attributes:
        measure: compares epochs.
    """

    def __init__(self, checkpoints: CheckpointFolder, measure: Measure, within_epochs: bool = False) -> None:
        self.measure = measure
        self.within_epochs = within_epochs
        self._checkpoints = checkpoints
        self._file = records_of(checkpoints.prefix) / BEST
        self._lock = Lock()  # a background thread may write a checkpoint while an epoch ends

    def records(self, progress: Progress) -> Sequence[EpochRecord]:
        """What competes for the best model."""
        return progress.records if self.within_epochs else progress.history

    def update(self, history: Sequence[EpochRecord]) -> None:
        """Write the file atomically, if it has changed. A failure is logged, and training continues."""
        with self._lock:
            path = self._file
            summary = self.summary(list(history))
            text = "" if summary is None else json.dumps(summary, indent=2) + "\n"
            try:
                if (path.read_bytes() if path.exists() else b"") == text.encode():
                    return
                if not text:
                    path.unlink()
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(path, text)
            except OSError as error:
                log.warning(f"{path}: expected to write which epoch is best, got: {error}")

    def summary(self, history: Sequence[EpochRecord]) -> dict[str, Any] | None:
        """The contents of the file for a history; None: no epoch has a score.

        Returns:
            `measure`, `higher_is_better`; `epoch`, `score`, `file` and `scores` of the best epoch, where `file` is None if its
            model was not saved or was removed, and `step` if it was evaluated within the epoch; `saved`, the same for the best
            epoch whose model exists.
        """
        measure = self.measure.name(history)
        best = self.measure.best(history)
        if measure is None or best is None:
            return None
        models = {checkpoint.age: checkpoint for checkpoint in self._checkpoints.models()}
        saved = best_of([record for record in history if record.age in models], measure, self.measure.higher)
        rule = {"measure": measure, "higher_is_better": self.measure.is_higher_better(measure)}
        return {
            **rule,
            **_entry(best, measure, models),
            "saved": None if saved is None else _entry(saved, measure, models),
        }


def _entry(record: EpochRecord, measure: str, models: Mapping[tuple[int, float], Checkpoint]) -> dict[str, Any]:
    # For JSON: text if a score is not finite, as in scores.jsonl.
    scores = {name: score if math.isfinite(score) else str(score) for name, score in record.scores.items()}
    model = models.get(record.age)
    step = {} if record.at_step is None else {"step": record.at_step}
    file = None if model is None else model.model_file.name
    return {"epoch": record.epoch, **step, "score": scores[measure], "file": file, "scores": scores}


def best_position(prefix: Path) -> tuple[int, int | None]:
    """The best epoch whose model exists, from best.json, and the step if its model is from within the epoch.

    Raises:
        CheckpointError: the file has none.
    """
    path = records_of(prefix) / BEST
    try:
        best = json.loads(path.read_text(encoding="utf-8"))
        epoch = int(best["saved"]["epoch"])
        measure = str(best["measure"])
        higher = bool(best["higher_is_better"])
        step = int(best["saved"]["step"]) if "step" in best["saved"] else None
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        raise CheckpointError(
            f"{path}: expected the best epoch that has a model, got none (a training writes the file)"
        ) from None
    if implies_higher_is_better(base_of(measure)) and not higher:  # by an earlier release, which took the first dev score by name
        raise CheckpointError(
            f"{path}: expected a score whose lower values are better, got {measure!r}, whose name says that higher values are "
            f"better (set higher_is_better = {[base_of(measure)]}; the command of the training then writes the file anew)"
        )
    return epoch, step
