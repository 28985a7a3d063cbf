"""A checkpoint as a value: what its files hold. The entries have the same names in all frameworks; `FileFormat` stores them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

OPTIMIZER, OPTIMIZER_CLASS, OPTIONS = "optimizer", "optimizer_class", "optimizer_options"
"""Entries with the optimizer's state, the name of its class, and its options as text. RETURNN's files have only the first, and so
have those of hvdtrain 0.1; TensorFlow's have the class in the names of the tensors."""

LOSS_SCALE = "loss_scale"

TRAINED, AVERAGED = "trained", "averaged_updates"
"""Entries if a moving average is kept, which then is the model: the trained weights by name, and the number of updates that the
average has followed."""

SHARED, OWN = "reducer_shared", "reducer_own"
"""Entries with lists of tensors by name that the reducer keeps: `ModelState.shared` and `ModelState.own`."""


Marks = Mapping[str, str]
"""Texts by name that say which checkpoint a rank's own file belongs to."""

NO_MARKS: Marks = {}


class FileFormat(Protocol):
    """How a framework stores tensors and plain values. Writing raises OSError or RuntimeError, reading CheckpointError; code in
    a file is never run."""

    def write_model(self, file: Path, model: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        """Write tensors by name, and the progress."""
        ...

    def write_optimizer(self, file: Path, entries: Mapping[str, Any]) -> None:
        """Write the file that accompanies a model's."""
        ...

    def write_rank(self, file: Path, entries: Mapping[str, Any]) -> None:
        """Write the file of one rank."""
        ...

    def read_model(self, file: Path) -> dict[str, Any]:
        """The progress, and the tensors by name under "model"."""
        ...

    def read(self, file: Path) -> dict[str, Any]:
        """What `write_optimizer` or `write_rank` wrote."""
        ...


@dataclass(frozen=True)
class CheckpointContents:
    """What rank 0 writes of a checkpoint.

    Attributes:
        model: the model's tensors by name.
        optimizer: entries of the optimizer's file: the rest of the state.
        progress: plain numbers and texts, for both files.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    progress: Mapping[str, Any]
    format: FileFormat

    def write(self, model_file: Path, optimizer_file: Path) -> None:
        """Write both files. Raises: OSError, RuntimeError, if the disk is full."""
        self.format.write_optimizer(optimizer_file, {**self.optimizer, **self.progress})
        self.format.write_model(model_file, self.model, self.progress)


@dataclass(frozen=True)
class RankContents:
    """What one rank writes of a checkpoint: in what it differs from the other ranks."""

    entries: Mapping[str, Any]
    format: FileFormat

    def write(self, file: Path) -> None:
        """Raises: OSError, RuntimeError, if the disk is full."""
        self.format.write_rank(file, self.entries)
