"""A callback that writes the model as libraries of Hugging Face load it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from hvdtrain.errors import ConfigError
from hvdtrain.runtime import log
from hvdtrain.training.callbacks import Training


class SavePretrained:
    """Calls the model's `save_pretrained` after epochs: transformers writes the whole model, PEFT the adapters.

    The weights are those of the epoch's checkpoint, so with `ema_decay` the averaged ones.

    Args:
        folder: is replaced when the files for it are complete.
        which: "best": whenever the best model so far was written, as best.json counts, also of an evaluation within an epoch;
            "last": that of any epoch.
        part: the attribute of the model that has `save_pretrained`, such as "encoder" or "encoder.inner"; "": the model itself.
        others: more objects to write, such as a tokenizer.
    """

    def __init__(
        self,
        folder: str | Path,
        which: Literal["best", "last"] = "best",
        part: str = "",
        others: Sequence[Any] = (),
    ) -> None:
        if which not in ("best", "last"):
            raise ConfigError.of("unknown-value", f"SavePretrained.which: expected 'best' or 'last', got {which!r}")
        self._folder = Path(folder)
        self._which = which
        self._part = part
        self._others = others

    def on_train_begin(self, training: Training) -> None:
        """Raises: ConfigError, if there is nothing with a `save_pretrained`."""
        self._writer(training)

    def on_save(self, training: Training) -> None:
        is_epoch = training.epoch == training.finished_epoch
        if self._which == "last" and not is_epoch:
            return
        if self._which == "best":
            at = training.best_step
            if training.best_epoch != training.epoch or not (is_epoch if at is None else at == training.step):
                return
        with training.evaluated_weights():
            if training.rank == 0:
                self._write(training)

    def _writer(self, training: Training) -> Any:
        try:
            part = attrgetter(self._part)(training.model) if self._part else training.model
        except AttributeError as error:
            raise ConfigError.of("unknown-value", f"SavePretrained.part: expected a part of the model, got {error}") from None
        if not callable(getattr(part, "save_pretrained", None)):
            raise ConfigError.of(
                "wrong-type",
                f"SavePretrained.part: expected the part of the model that has save_pretrained, got {self._part!r}, which is a "
                f"{type(part).__name__}",
            )
        return part

    def _write(self, training: Training) -> None:
        unfinished = self._folder.with_name(f"{self._folder.name}.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        for part in (self._writer(training), *self._others):
            part.save_pretrained(unfinished)
        shutil.rmtree(self._folder, ignore_errors=True)
        os.replace(unfinished, self._folder)
        within = "" if training.epoch == training.finished_epoch else f", step {training.step}"
        log.info(f"{self._folder}: the model of epoch {training.epoch}{within}, written by its save_pretrained")
