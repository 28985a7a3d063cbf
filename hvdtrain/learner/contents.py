"""The contents of a checkpoint as a value. Entry names are the same in all frameworks; `FileFormat` stores them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hvdtrain.errors import CheckpointError, DamagedCheckpoint
from hvdtrain.learner.integrity import SAVE_ID, shapes_of
from hvdtrain.learner.model_state import ROLES

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

WITH_TENSORS = ("optimizer", TRAINED, EXACT, SHARED, OWN, *ROLES)
"""Entries that hold tensors, by their names or numbers."""

UNSUITABLE = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""What frameworks raise of values that do not belong to a model or an optimizer."""


Marks = Mapping[str, str]
"""Texts by name that identify the checkpoint to which a rank's file belongs."""

NO_MARKS: Marks = {}


Reader = Callable[[Path], Mapping[str, Any] | None]
"""Returns what `FileFormat.read_model` returns, for a checkpoint of another program; None: it is hvdtrain's."""


def read_foreign(read: Reader, file: Path) -> Mapping[str, Any] | None:
    """What the key checkpoint_reader makes of a file. Raises: CheckpointError, if that is no model."""
    foreign = read(file)
    if foreign is not None and not (isinstance(foreign, Mapping) and "model" in foreign):
        got = ", ".join(map(str, [*foreign][:5])) if isinstance(foreign, Mapping) else type(foreign).__name__
        raise CheckpointError(f"checkpoint_reader: expected a dict with 'model', or None, got {got}")
    return foreign


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


class Sums(Protocol):
    """Sums over updates, of a plug-in."""

    def copy(self) -> Sums:
        """The same, which no update changes."""
        ...

    def write(self, file: Path, marks: Mapping[str, Any]) -> None:
        """Write a file, with marks that identify the checkpoint. Raises: OSError."""
        ...


class Running(Protocol):
    """What a plug-in adds up after updates, on rank 0, where all ranks have the same parameters when it is called."""

    @property
    def state(self) -> Sums: ...

    def follow(self, updates: int) -> None:
        """Take N more updates into account."""
        ...

    def load(self, file: Path, model_file: Path, entries: Mapping[str, Any]) -> None:
        """Continue with the sums in a file, if it exists. Raises: CheckpointError.

        Args:
            model_file: that of the same checkpoint.
            entries: those in it.
        """
        ...


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
    running: Sums | None = None

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


class BackgroundSaver(Protocol):
    """Writes copies of what checkpoints hold, while training goes on. One copy exists at a time."""

    def copy(self, contents: CheckpointContents) -> CheckpointContents:
        """A copy, which any thread may write; valid until the next call."""
        ...

    def close(self) -> None: ...


def entries_with_tensors(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that hold tensors. Of an optimizer in the form of PyTorch's, these are in its state, not in its groups."""
    tensors = {name: entries[name] for name in WITH_TENSORS if name in entries}
    optimizer = tensors.get("optimizer")
    return tensors | (
        {"optimizer": {"state": optimizer["state"]}} if isinstance(optimizer, dict) and "state" in optimizer else {}
    )


def tensor_shapes(entries: Mapping[str, Any]) -> dict[str, str]:
    """The shapes of the tensors in entries, as `shapes_of` returns them."""
    return shapes_of(entries_with_tensors(entries))


def tensor_lists(entries: Mapping[str, Any], entry: str, file: Path) -> dict[str, list[Any]]:
    """An entry with lists of tensors by name; none without the entry. Raises: DamagedCheckpoint."""
    lists = entries.get(entry, {})
    if not isinstance(lists, dict) or not all(
        isinstance(tensors, list) and all(hasattr(tensor, "shape") for tensor in tensors) for tensors in lists.values()
    ):
        raise DamagedCheckpoint(f"{file}: expected lists of tensors in its entry {entry!r}, got others")
    return lists
