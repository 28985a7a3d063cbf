"""Files with a TensorFlow model: numpy's .npz, and safetensors.

An .npz file holds arrays by name, and plain values as JSON. The names of arrays begin with their entry, but for those of the
model and, in its own file, of the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.errors import DamagedCheckpoint
from hvdtrain.learner.contents import AVERAGED, OPTIMIZER, OWN, SHARED, TRAINED
from hvdtrain.learner.model_format import SAFETENSORS, header, is_safetensors, progress_of, reading, unreadable, writing

TENSORS = (OPTIMIZER, TRAINED, "parameters", "frozen", "statistics", "counters")
"""Entries with arrays by name."""

PROGRESS = "progress"
"""The name of the array with plain values, as JSON."""


class ArrayFormat:
    """`FileFormat` for TensorFlow."""

    def __init__(self, model_format: str) -> None:
        self._model_format = model_format

    def write_model(self, file: Path, model: Mapping[str, Any], progress: Mapping[str, Any]) -> None:
        if self._model_format == SAFETENSORS:
            _write_safetensors(file, model, progress)
        else:
            _write_arrays(file, model, progress)

    def write_optimizer(self, file: Path, entries: Mapping[str, Any]) -> None:
        arrays, values = _flatten(entries)
        _write_arrays(file, {name.removeprefix(f"{OPTIMIZER}/"): array for name, array in arrays.items()}, values)

    def write_rank(self, file: Path, entries: Mapping[str, Any]) -> None:
        _write_arrays(file, *_flatten(entries))

    def read_model(self, file: Path) -> dict[str, Any]:
        arrays, progress = _read_safetensors(file) if is_safetensors(file) else _read_arrays(file)
        return {**progress, "model": arrays}

    def read(self, file: Path) -> dict[str, Any]:
        arrays, entries = _read_arrays(file)
        for path, array in sorted(arrays.items()):
            entry, _, name = path.partition("/")
            if path == AVERAGED:
                entries[path] = array
            elif entry in (SHARED, OWN):
                lists = entries.setdefault(entry, {})
                lists.setdefault(name.rpartition("/")[0], []).append(tf.constant(array))
            elif entry in TENSORS:
                entries.setdefault(entry, {})[name] = array
            else:
                entries.setdefault(OPTIMIZER, {})[path] = array
        return entries


def _flatten(entries: Mapping[str, Any]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The arrays of entries under names such as trained/layers.0.kernel and reducer_own/velocity/000003; and the plain values."""
    arrays: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for entry, value in entries.items():
        if entry in TENSORS:
            arrays |= {f"{entry}/{name}": array for name, array in value.items()}
        elif entry in (SHARED, OWN):
            arrays |= {f"{entry}/{name}/{n:06d}": array for name, found in value.items() for n, array in enumerate(found)}
        elif entry == AVERAGED:
            arrays[entry] = numpy.array(value)
        else:
            values[entry] = value
    return arrays, values


def _write_arrays(path: Path, arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
    """Write arrays by name, and plain values. Raises: OSError, if the disk is full."""
    named: dict[str, Any] = {PROGRESS: numpy.frombuffer(json.dumps(values).encode(), numpy.uint8), **arrays}
    with open(path, "wb") as file:  # numpy adds a suffix to a path, but not to an open file
        numpy.savez(file, **named)


def _write_safetensors(path: Path, arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
    """The same in this format. Raises: OSError, if the disk is full."""
    from safetensors.numpy import save_file

    in_order = {name: numpy.asarray(array, order="C") for name, array in arrays.items()}
    with writing(path) as unfinished:
        save_file(in_order, unfinished, header("tf", values))


def _read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    with reading(path):
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is no dict
            return arrays, progress_of(file.metadata())


def _read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read what `_write_arrays` wrote, or any .npz file. Raises: CheckpointError."""
    try:
        with numpy.load(path, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}  # reading checks each array's CRC
        values = json.loads(arrays.pop(PROGRESS).tobytes()) if PROGRESS in arrays else {}
        if not isinstance(values, dict):
            raise ValueError(f"its array {PROGRESS!r} is no dict")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path}: expected a checkpoint's file, got: no such file") from None
    except Exception as error:  # whatever numpy and zipfile make of other bytes
        raise unreadable(path, error) from None
    return arrays, values
