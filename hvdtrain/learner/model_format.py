"""Safetensors as the format of a model's file: what its header says, which is the same with every framework.

The header's metadata has strings by name: `format`, the framework as Hugging Face's libraries name it; `hvdtrain`, the progress
as JSON; `hvdtrain_checksum`, of the whole file; and for each tensor that shares its memory with another one, the name under which
both are stored, as `safetensors.torch.save_model` writes it.
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
from hvdtrain.learner.integrity import BLANK, CHECKSUM, check_meanwhile, write_checksum

SAFETENSORS = "safetensors"
"""The value of `checkpoint_format`, and the suffix of the files."""

INSTALL = "pip install safetensors"

FORMAT, PROGRESS = "format", "hvdtrain"
"""Entries of the header that are not names of tensors."""


def is_safetensors(file: str | Path) -> bool:
    """Whether a file is in this format, by its suffix."""
    return Path(file).suffix == f".{SAFETENSORS}"


def missing_package(where: str) -> list[Problem]:
    """The problem with a key that needs the package, if it is not installed."""
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
    """The progress in a header; empty if another program wrote the file."""
    progress = json.loads((metadata or {}).get(PROGRESS, "{}"))
    if not isinstance(progress, dict):
        raise ValueError(f"the entry {PROGRESS!r} of its header is no dict")
    return progress


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Around the code that reads a file, which is checked meanwhile; translates errors into CheckpointError."""
    try:
        with check_meanwhile(file):
            yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{file}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == SAFETENSORS:
            raise CheckpointError(f"{file}: expected the package safetensors to read it, got none ({INSTALL})") from None
        raise unreadable(file, error) from None


def unreadable(file: Path, error: Exception) -> CheckpointError:
    """The error for a file that cannot be read."""
    text = str(error)
    if "weights_only" in text or "WeightsUnpickler" in text:  # PyTorch advises to load it nevertheless
        found = re.search(r"(?:GLOBAL|Unsupported class) (\S+)", text)
        what = f"needs code to be read: {found.group(1)}" if found else "has more than that"
        return DamagedCheckpoint(
            f"{file}: expected tensors and plain values, got a file that {what}; hvdtrain never runs code of a file (and neither "
            "should you, with weights_only=False, unless you trust who wrote it; a model's own tensors are saved by "
            "torch.save({'model': model.state_dict()}, ...))"
        )
    lines = text.splitlines() or [type(error).__name__]
    return DamagedCheckpoint(f"{file}: expected a whole checkpoint, got one that cannot be read: {lines[0]}")


@contextmanager
def writing(file: Path) -> Iterator[Path]:
    """Where to let the package write a file, which is then moved to its place; its errors, as on a full disk, become OSErrors.

    The package writes under a random name beside the one it is given, which a kill would leave behind for good, and with
    permissions for the owner only. Here, a kill leaves a folder whose name begins and ends like the file's, and permissions are
    the usual ones.
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
