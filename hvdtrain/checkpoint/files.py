"""The files of one checkpoint, and why they cannot be written."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.data.files import size_text
from hvdtrain.disk.atomic import UNFINISHED
from hvdtrain.errors import CheckpointError


@dataclass(frozen=True)
class Checkpoint:
    """The files of one checkpoint.

    Attributes:
        epoch: the finished epoch, or the one under way.
        start: the folder and the common prefix of the files' names.
        suffix: the framework's file suffix.
        step: the number of training steps done, if the epoch is under way.
        model_suffix: the suffix of the model's file, if it differs.
    """

    epoch: int
    start: Path
    suffix: str
    step: int | None = None
    model_suffix: str | None = None

    @property
    def model_file(self) -> Path:
        return self.model_file_as(self.model_suffix or self.suffix)

    def model_file_as(self, suffix: str) -> Path:
        return self.start.with_name(f"{self.start.name}.{suffix}")

    @property
    def optimizer_file(self) -> Path:
        return self._file(".opt")

    @property
    def running_file(self) -> Path:
        """The file with the sums of a running average."""
        return self.start.with_name(f"{self.start.name}.running.npz")

    def describe(self) -> str:
        """Where training stands, in words."""
        return f"after epoch {self.epoch}" if self.step is None else f"in epoch {self.epoch}, after step {self.step} of all"

    def rank_file(self, rank: int, size: int) -> Path:
        return self._file(f".rank-{rank}-of-{size}")

    def is_part(self, name: str) -> bool:
        """Whether this is the name of the optimizer file or of a rank's file of this checkpoint."""
        pattern = rf"{re.escape(self.start.name)}\.(opt|rank-\d+-of-\d+)\.{re.escape(self.suffix)}"
        return re.fullmatch(pattern, name) is not None

    def _file(self, part: str) -> Path:
        return self.start.with_name(f"{self.start.name}{part}.{self.suffix}")

    @property
    def age(self) -> tuple[int, float]:
        """A sort key: later checkpoints compare larger."""
        return self.epoch, float("inf") if self.step is None else self.step


def unfinished_path(file: Path) -> Path:
    return file.with_name(file.name + UNFINISHED)


@contextmanager
def checkpoint_error(file: Path, unfinished: Sequence[Path] = ()) -> Iterator[None]:
    """Translate errors while writing a checkpoint into CheckpointError, with the file and the cause.

    Args:
        unfinished: the files written under temporary names.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{file}: expected to write a checkpoint, got: {error}{_free_text(file, error.errno)}") from error
    except RuntimeError as error:
        cause = _write_error([*unfinished, file.with_name(f"{file.name}.probe{UNFINISHED}")])
        why = error if cause is None else f"{cause}{_free_text(file, cause.errno)}"
        raise CheckpointError(f"{file}: expected to write a checkpoint, got: {why}") from error


def _free_text(file: Path, number: int | None) -> str:
    """For an error that says that the disk is full, how much is free on it, and what to do."""
    with suppress(OSError):
        free = size_text(shutil.disk_usage(file.parent).free)
        advice = "with more, the same command continues; cleanup_old_models keeps fewer models"
        return f" ({free} free there; {advice})" if number == errno.ENOSPC else ""
    return ""


PROBE = 4 << 20
"""The number of bytes to write to find out why writing failed: more than is free on a full disk."""


def _write_error(files: Sequence[Path]) -> OSError | None:
    """Why files cannot be written; None: they can. On a full disk, torch's writer only reports an unexpected position, so this
    appends to the existing files, and writes a new one.
    """
    for path in files:
        is_new = not path.exists()
        try:
            with path.open("ab") as probe:
                probe.write(bytes(PROBE))
                probe.flush()
                os.fsync(probe.fileno())
        except OSError as error:
            return error
        finally:
            with suppress(OSError):
                if is_new:
                    path.unlink(missing_ok=True)
    return None
