"""Checkpoints as numpy's .npz files: an array for every name, and JSON under the name `progress`. No code in them is run."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError

PROGRESS = "progress"


def write_arrays(path: Path, arrays: Mapping[str, Array], progress: Mapping[str, Any]) -> None:
    """Write arrays by name, and what JSON can hold. Raises: OSError, where the disk is full."""
    named: dict[str, Any] = {PROGRESS: numpy.frombuffer(json.dumps(progress).encode(), numpy.uint8), **arrays}
    with open(path, "wb") as file:  # handed over open, numpy adds no suffix of its own
        numpy.savez(file, **named)


def read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """What `write_arrays` wrote, or any .npz file. Raises: CheckpointError."""
    try:
        with numpy.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # reading checks each array's CRC
        progress = json.loads(arrays.pop(PROGRESS).tobytes()) if PROGRESS in arrays else {}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: expected a checkpoint's file, got: no such file") from None
    except (OSError, EOFError, ValueError, KeyError, AttributeError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{path}: expected a whole checkpoint, got one that cannot be read: {error}") from None
    return arrays, progress
