"""best.json beside the model: which finished epoch is the best one, and where its model is."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.errors import CheckpointError
from hvdtrain.runtime.log import say
from hvdtrain.schedule.history import EpochRecord, best_of, error_key, is_higher_better

NAME = "best.json"


class BestModel:
    """Keeps best.json up to date. It is written after every epoch, in the background after its model, and when training resumes.

    Args:
        wanted: the names of which the first that exists is the score that compares epochs; empty: the score that newbob uses.
        higher: the scores whose higher values are better.
    """

    def __init__(self, checkpoints: CheckpointFolder, wanted: Sequence[str], higher: Collection[str]) -> None:
        self._checkpoints = checkpoints
        self._wanted = wanted
        self._higher = higher
        self._lock = Lock()  # a checkpoint may be written by another thread than the one that ends epochs

    def note(self, history: Sequence[EpochRecord]) -> None:
        """Write the file, whole or not at all, if it has to change. If that fails, the log says so, and training goes on."""
        with self._lock:
            path = self._checkpoints.folder / NAME
            found = self.found(list(history))
            text = "" if found is None else json.dumps(found, indent=2) + "\n"
            try:
                if (path.read_text(encoding="utf-8") if path.exists() else "") == text:
                    return
                if not text:
                    path.unlink()
                    return
                path.parent.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_name(NAME + ".unfinished")
                unfinished.write_text(text, encoding="utf-8")
                os.replace(unfinished, path)
            except OSError as error:
                say(2, f"{path}: expected to write which epoch is best, got: {error}")

    def found(self, history: Sequence[EpochRecord]) -> dict[str, Any] | None:
        """What the file says of a history; None: no epoch has a score.

        Returns:
            `measure`, `higher_is_better`; `epoch`, `score`, `file` and `scores` of the best epoch, where `file` is None if its
            model was not saved or was removed; `saved`, the same of the best of those epochs whose model is there.
        """
        names = (error_key(record.scores, self._wanted) for record in reversed(history))
        measure = next((name for name in names if name is not None), None)
        best = None if measure is None else best_of(history, measure, self._higher)
        if measure is None or best is None:
            return None
        there = set(self._checkpoints.finished())
        saved = best_of([record for record in history if record.epoch in there], measure, self._higher)
        rule = {"measure": measure, "higher_is_better": is_higher_better(measure, self._higher)}
        return {
            **rule,
            **self._entry(best, measure, there),
            "saved": None if saved is None else self._entry(saved, measure, there),
        }

    def _entry(self, record: EpochRecord, measure: str, there: Collection[int]) -> dict[str, Any]:
        scores = {name: _number(score) for name, score in record.scores.items()}
        file = self._checkpoints.at(record.epoch).model_file.name if record.epoch in there else None
        return {"epoch": record.epoch, "score": scores[measure], "file": file, "scores": scores}


def _number(score: float) -> float | str:
    """A score as JSON knows it: one that is not finite as text, as in scores.jsonl."""
    return score if math.isfinite(score) else str(score)


def best_epoch(folder: Path) -> int:
    """The best epoch whose model is there, as best.json says. Raises: CheckpointError."""
    path = folder / NAME
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))["saved"]
    except (OSError, ValueError, KeyError, TypeError):
        saved = None
    if saved is None:
        raise CheckpointError(f"{path}: expected the best epoch that has a model, got none (a training writes the file)")
    return int(saved["epoch"])
