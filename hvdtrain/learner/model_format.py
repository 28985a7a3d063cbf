"""Safetensors as the format of a model's file: the header, which is the same in every framework.

The header's metadata maps names to strings: `format`, the framework as Hugging Face's libraries name it; `hvdtrain`, the progress
as JSON; `hvdtrain_checksum`, of the whole file; and for each tensor that shares memory with another one, the name that both are
stored under, as in `safetensors.torch.save_model`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError, DamagedCheckpoint, Problem, problem
from hvdtrain.learner.integrity import BLANK, CHECKSUM, check_while_reading, is_of_process, is_proven, write_checksum

SAFETENSORS = "safetensors"
"""The value of `checkpoint_format`, and the suffix of the files."""

INSTALL = "pip install safetensors"

FORMAT = "format"
PROGRESS = "hvdtrain"
"""Entries of the header that are not names of tensors."""


def is_safetensors(file: str | Path) -> bool:
    return Path(file).suffix == f".{SAFETENSORS}"


def missing_package(where: str) -> list[Problem]:
    """The problem with a key that needs the package when it is not installed."""
    if find_spec(SAFETENSORS) is not None:
        return []
    return problem("missing-package", f"{where}: expected the package safetensors, got none ({INSTALL})")


def header(framework: str, progress: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a model's file.

    Args:
        framework: "pt" or "tf".
    """
    return {FORMAT: framework, PROGRESS: json.dumps(progress), CHECKSUM: BLANK}


def progress_of(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The progress in a header; empty in files of other programs."""
    progress = json.loads((metadata or {}).get(PROGRESS, "{}"))
    if not isinstance(progress, dict):
        raise ValueError(f"the entry {PROGRESS!r} of its header is not a dict")
    return progress


@contextmanager
def verified_read(file: Path) -> Iterator[None]:
    """Check a file while the code in the `with` block reads it, and translate errors into CheckpointError."""
    with unreadable(file), check_while_reading(file):
        yield


@contextmanager
def unreadable(file: Path) -> Iterator[None]:
    """Translate errors of code in the `with` block, which reads a file, into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == SAFETENSORS:
            raise CheckpointError(f"{file}: expected the package safetensors to read it, got none ({INSTALL})") from None
        raise unreadable_error(file, error) from None


def unreadable_error(file: Path, error: Exception) -> CheckpointError:
    text = str(error)
    if "weights_only" in text or "WeightsUnpickler" in text:  # PyTorch advises to load it nevertheless
        match = re.search(r"(?:GLOBAL|Unsupported class) (\S+)", text)
        reason = f"needs code to be loaded: {match.group(1)}" if match else "contains more than that"
        return DamagedCheckpoint(
            f"{file}: expected tensors and plain values, got a file that {reason}; hvdtrain never runs code from a file (and "
            "neither should you, with weights_only=False, unless you trust its author; a model's tensors alone are saved by "
            "torch.save({'model': model.state_dict()}, ...))"
        )
    lines = text.splitlines() or [type(error).__name__]
    if is_of_process(error) or is_proven(file):
        return CheckpointError(
            f"{file}: expected to read it, got: {lines[0]} (an error of this process: the file is not damaged)"
        )
    return DamagedCheckpoint(f"{file}: expected a whole checkpoint, got one that cannot be read: {lines[0]}")


@contextmanager
def atomic_write(file: Path) -> Iterator[Path]:
    """Yield a temporary path for the package to write to, then move the file into place. Its errors become OSErrors.

    The package writes to a randomly named file, which a kill would leave behind forever, and with permissions for the owner only.
    Here, a kill leaves a folder that the next save recognizes by its name, and permissions are the usual ones.
    """
    from safetensors import SafetensorError

    folder = file.with_name(f"{file.stem}.folder{file.suffix}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder / file.name
        file.touch()
        os.chmod(folder / file.name, file.stat().st_mode)
        write_checksum(folder / file.name)
        os.replace(folder / file.name, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
