"""The functions `epoch_start` and `epoch_end`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.config.references import as_function
from hvdtrain.plugins.returnn.keys import EpochFunctionKeys
from hvdtrain.settings import Settings
from hvdtrain.training.callbacks import Training


def epoch_functions_of(settings: Settings) -> list[EpochFunctions]:
    """What calls the functions of a config, if it has any. Raises: ConfigError."""
    keys = settings.of(EpochFunctionKeys)
    start = as_function(keys.epoch_start, "epoch_start")
    end = as_function(keys.epoch_end, "epoch_end")
    return [] if start is None and end is None else [EpochFunctions(start, end)]


class EpochFunctions:
    """The functions as a callback.

    They are called before and after the training part of an epoch, with dataset_name 'train', and each evaluation at its end.
    """

    def __init__(self, start: Callable[..., Any] | None, end: Callable[..., Any] | None) -> None:
        self._start = start
        self._end = end
        self._is_training = False

    def on_epoch_begin(self, training: Training) -> None:
        self._is_training = True
        self._call(self._start, training, "train")

    def on_evaluation_begin(self, training: Training) -> None:
        self._end_training(training)
        self._call(self._start, training, training.dataset)

    def on_evaluation_end(self, training: Training) -> None:
        self._call(self._end, training, training.dataset)

    def on_epoch_end(self, training: Training) -> None:
        self._end_training(training)

    def _end_training(self, training: Training) -> None:
        if training.is_within_epoch:
            return
        if self._is_training:
            self._call(self._end, training, "train")
        self._is_training = False

    def _call(self, function: Callable[..., Any] | None, training: Training, dataset: str | None) -> None:
        if function is not None and not training.is_within_epoch:
            function(epoch=training.epoch, step=training.step, model=training.model, dataset_name=dataset)
