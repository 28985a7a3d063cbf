"""The contents of a checkpoint as a value. Entry names are the same in all frameworks; `FileFormat` stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.learner.integrity import SAVE_ID

if TYPE_CHECKING:
    from hvdtrain.learner.running_average import RunningSums

OPTIMIZER_CLASS, OPTIONS = "optimizer_class", "optimizer_options"
"""Entries next to the optimizer's state: its class (in TensorFlow's files part of the tensor names) and its options as text.
Files of RETURNN and of hvdtrain 0.1 have neither."""

TRAINED, AVERAGED, EXACT = "trained", "averaged_updates", "averages"
"""Entries with a moving average, which is then the model: the trained weights by name; the number of updates that the average has
followed; and the averages of weights in 16 bits, which are in float32."""

SHAPES = "shapes"
"""An entry with the shapes of the tensors in the others, as `shapes_of` returns them. Files of hvdtrain 1.0 and of RETURNN have
none."""

BASE = "base"
"""An entry of a model's file without the frozen parameters: the hash of their values, their number, and the model's class."""

SHARED, OWN, ORDER = "reducer_shared", "reducer_own", "reducer_order"
"""Entries with lists of tensors by name that the reducer keeps: `ModelState.shared` and `ModelState.own`; and the names of the
trained parameters, in whose order these lists are. Files of hvdtrain 1.1 have no order."""


Marks = Mapping[str, str]
"""Texts by name that identify the checkpoint to which a rank's file belongs."""

NO_MARKS: Marks = {}


Reader = Callable[[Path], Mapping[str, Any] | None]
"""Returns what `FileFormat.read_model` returns, for a checkpoint of another program; None: it is hvdtrain's."""


@dataclass(frozen=True)
class FileFormat:
    """How a framework stores tensors and plain values. Writing raises OSError or RuntimeError, reading CheckpointError.

    Attributes:
        write_model: writes tensors by name, and the progress.
        write: writes the entries of another file: the one that accompanies a model's, or one rank's.
        read_model: returns the progress, and the tensors by name under "model".
        read: returns the entries of such a file. Like `read_model`, it never runs code in the file.
    """

    write_model: Callable[[Path, Mapping[str, Any], Mapping[str, Any]], None]
    write: Callable[[Path, Mapping[str, Any]], None]
    read_model: Callable[[Path], dict[str, Any]]
    read: Callable[[Path], dict[str, Any]]


@dataclass(frozen=True)
class CheckpointContents:
    """The part of a checkpoint that rank 0 writes.

    Attributes:
        model: the model's tensors by name.
        optimizer: entries of the optimizer's file: all other state.
        progress: plain numbers and texts, for both files.
        running: the sums of a running average; None: there is none.
    """

    model: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    progress: Mapping[str, Any]
    format: FileFormat
    running: RunningSums | None = None

    def write(self, model_file: Path, optimizer_file: Path) -> None:
        """Write both files. Raises: OSError, RuntimeError, if the disk is full."""
        self.format.write(optimizer_file, {**self.optimizer, **self.progress})
        self.write_model(model_file)

    def write_model(self, model_file: Path) -> None:
        """Write only the model. Raises: OSError, RuntimeError, if the disk is full."""
        self.format.write_model(model_file, self.model, self.progress)

    def write_running(self, file: Path) -> bool:
        """Write the sums of a running average, and return True; False: there are none. Raises: OSError, if the disk is full."""
        if self.running is None:
            return False
        self.running.write(file, {SAVE_ID: self.progress.get(SAVE_ID)})
        return True
