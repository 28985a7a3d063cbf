"""Safetensors as the format of a model's file: what its header says, which is the same with every framework.

The header's metadata has strings by name: `format`, the framework as Hugging Face's libraries name it; `hvdtrain`, the progress
as JSON; and for each tensor that shares its memory with another one, the name under which both are stored, as
`safetensors.torch.save_model` writes it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.errors import CheckpointError

SAFETENSORS = "safetensors"
"""The value of `checkpoint_format`, and the suffix of the files."""

INSTALL = "pip install hvdtrain[safetensors]"

FORMAT, PROGRESS = "format", "hvdtrain"
"""Entries of the header that are not names of tensors."""


def is_safetensors(file: str | Path) -> bool:
    """Whether a file is in this format, by its suffix."""
    return Path(file).suffix == f".{SAFETENSORS}"


def missing_package(where: str) -> list[str]:
    """The problem with a key that needs the package, if it is not installed."""
    if find_spec(SAFETENSORS) is not None:
        return []
    return [f"{where}: expected the package safetensors, got none ({INSTALL})"]


def header(framework: str, progress: Mapping[str, Any]) -> dict[str, str]:
    """The metadata of a model's file.

    Args:
        framework: "pt" or "tf".
    """
    return {FORMAT: framework, PROGRESS: json.dumps(progress)}


def progress_of(metadata: Mapping[str, str] | None) -> dict[str, Any]:
    """The progress in a header; empty if another program wrote the file."""
    progress: dict[str, Any] = json.loads((metadata or {}).get(PROGRESS, "{}"))
    return progress


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Translate errors while reading a file into CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise CheckpointError(f"{file}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:
        if isinstance(error, ModuleNotFoundError) and error.name == SAFETENSORS:
            raise CheckpointError(f"{file}: expected the package safetensors to read it, got none ({INSTALL})") from None
        raise CheckpointError(f"{file}: expected a whole checkpoint, got one that cannot be read: {error}") from None


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
        os.replace(folder / file.name, file)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
