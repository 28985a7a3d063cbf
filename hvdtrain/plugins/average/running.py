"""The running average of the trained parameters: sums in every checkpoint, from which the mean between any two follows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from hvdtrain.checkpoint.hooks import CheckpointHooks
from hvdtrain.checkpoint.loader import Loader
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.data.types import Array
from hvdtrain.errors import DamagedCheckpoint
from hvdtrain.learner.integrity import SAVE_ID, new_save_id
from hvdtrain.learner.model_format import verified_read
from hvdtrain.learner.state_base import StateBase
from hvdtrain.plugins.average.keys import AverageKeys
from hvdtrain.runtime import log

if TYPE_CHECKING:
    from hvdtrain.settings import Settings

META = "running_average"
"""The name of the array with the numbers in a file of running sums, as JSON."""


@dataclass
class RunningSums:
    """The sum of the trained parameters after every N-th update since some step, in float64.

    The mean over the updates between two checkpoints follows from the sums in both.

    Attributes:
        sums: by name.
        samples: the number of terms in each sum.
        updates: the number of updates since the last term.
        begin_step: the number of steps of the training before the first update that counts.
        series: a unique name; sums of the same series belong together.
    """

    sums: dict[str, Array] = field(default_factory=dict)
    samples: int = 0
    updates: int = 0
    begin_step: int = 0
    series: str = ""

    def copy(self) -> RunningSums:
        """The same with sums that no update changes."""
        return replace(self, sums={name: total.copy() for name, total in self.sums.items()})

    def write(self, file: Path, marks: Mapping[str, Any]) -> None:
        """Write a file, with marks that identify the checkpoint. Raises: OSError."""
        numbers = {"samples": self.samples, "updates": self.updates, "begin_step": self.begin_step, "series": self.series}
        array = numpy.frombuffer(json.dumps({**marks, **numbers}).encode(), numpy.uint8)
        with open(file, "wb") as stream:  # numpy adds a suffix to a path, but not to an open file
            numpy.savez(
                stream, allow_pickle=False, **{META: array, **{f"sums/{name}": total for name, total in self.sums.items()}}
            )

    @staticmethod
    def read(file: Path) -> tuple[RunningSums, dict[str, Any]]:
        """What a file contains, and its marks. Raises: CheckpointError."""
        with verified_read(file), numpy.load(file, allow_pickle=False) as stored:  # which checks the CRC of each array
            arrays = {name: stored[name] for name in stored.files}
        try:
            numbers = json.loads(arrays.pop(META).tobytes())
            sums = {name.removeprefix("sums/"): array for name, array in arrays.items()}
            samples, updates, step = (int(numbers[name]) for name in ("samples", "updates", "begin_step"))
            return RunningSums(sums, samples, updates, step, str(numbers["series"])), numbers
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedCheckpoint(f"{file}: expected the sums of a running average, got others: {error!r}") from None


class RunningAverage:
    """Adds the trained parameters to the sums after every N-th update.

    Only rank 0 has one: when it is called, all ranks have the same parameters.

    Args:
        every: N.
        state: with the parameters.
        series: a new series' name.
    """

    def __init__(self, every: int, state: StateBase, series: str) -> None:
        self._every = every
        self._model = state
        self._is_restored = False
        self.state = RunningSums(series=series)

    def load(self, file: Path, model_file: Path, entries: Mapping[str, Any]) -> None:
        if not file.exists():
            log.info(f"running_average: {model_file.name} has no sums; they begin here")
            return
        sums, marks = RunningSums.read(file)
        if marks.get(SAVE_ID) != entries.get(SAVE_ID):
            raise DamagedCheckpoint(f"{file}: expected the sums saved with {model_file.name}, got others")
        self.state = sums
        self._is_restored = True

    def begin(self, step: int) -> None:
        """Training begins or continues after `step` steps of it; unless the sums were restored, a new series begins here."""
        if not self._is_restored:
            self.state.begin_step = step

    def follow(self, updates: int) -> None:
        """Take N more updates into account. If ranks have the same parameters after several updates only, those after the last of
        them count for each that is due."""
        self.state.updates += updates
        due, self.state.updates = divmod(self.state.updates, self._every)
        if not due:
            return
        for name, tensor in self._model.tensors("parameters").items():
            values = self._model.wide(tensor)
            if due > 1:
                values *= due
            if name in self.state.sums:
                self.state.sums[name] += values
            else:
                self.state.sums[name] = values
        self.state.samples += due


class SumsInCheckpoints(CheckpointHooks):
    """Has checkpoints contain the sums.

    Args:
        every: as of `RunningAverage`.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._average: RunningAverage | None = None

    def built(self, loader: Loader) -> None:
        if loader.comm.rank == 0:
            self._average = RunningAverage(self._every, loader.state, new_save_id())
            loader.state.running = self._average

    def restored(self, progress: Progress) -> None:
        if self._average is not None:
            self._average.begin(progress.step)


def sums_of(settings: Settings) -> SumsInCheckpoints | None:
    every = settings.of(AverageKeys).running_average
    return None if every is None else SumsInCheckpoints(every)
