"""Files with a TensorFlow model: numpy's .npz, and safetensors.

An .npz file holds arrays by name, and plain values as JSON. The names of arrays begin with their entry, except for those of the
model and, until hvdtrain 1.1, those of the optimizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.types import Array
from hvdtrain.learner import model_format as formats
from hvdtrain.learner.contents import AVERAGED, EXACT, OWN, SHARED, TRAINED, FileFormat
from hvdtrain.learner.model_state import ROLES

TENSORS = ("optimizer", TRAINED, EXACT, *ROLES)
"""Entries with arrays by name."""

PROGRESS = "progress"
"""The name of the array with plain values, as JSON."""


def file_format(model_format: str) -> FileFormat:
    """TensorFlow's files.

    Args:
        model_format: the format of the model's file: "npz" or "safetensors".
    """
    return FileFormat(partial(write_model, model_format=model_format), _write, read_model, _read)


def write_model(path: Path, model: Mapping[str, Array], progress: Mapping[str, Any], model_format: str) -> None:
    """Write a model's arrays by name, and the progress. Raises: OSError, if the disk is full."""
    (_write_safetensors if model_format == formats.SAFETENSORS else _write_arrays)(path, model, progress)


def widen(array: Array) -> Array | None:
    """The values as float64 or complex128; None if they are integers, booleans or text."""
    if array.dtype.kind == "V" and array.dtype.itemsize == 2:
        array = array.view(_bfloat16()).astype(numpy.float32)
    if array.dtype.kind not in "fc":
        return None
    return array.astype(numpy.float64 if array.dtype.kind == "f" else numpy.complex128)


def narrow(values: Array, like: Array) -> Array:
    """Values of `widen` in the type of another array."""
    return numpy.asarray(values).astype(_bfloat16() if like.dtype.kind == "V" else like.dtype)


def _bfloat16() -> Any:
    """TensorFlow's type, which numpy stores as plain bytes."""
    import ml_dtypes  # comes with TensorFlow, but is faster to import

    return ml_dtypes.bfloat16


def place_of(array: Array) -> int:
    """Different for every array: files of TensorFlow store none under two names."""
    return id(array)


def _write(file: Path, entries: Mapping[str, Any]) -> None:
    """Write arrays, named such as trained/layers.0.kernel and reducer_own/velocity/000003, and plain values."""
    arrays: dict[str, Array] = {}
    values: dict[str, Any] = {}
    for entry, value in entries.items():
        if entry in TENSORS:
            arrays |= {f"{entry}/{name}": array for name, array in value.items()}
        elif entry in (SHARED, OWN):
            arrays |= {f"{entry}/{name}/{n:06d}": array for name, tensors in value.items() for n, array in enumerate(tensors)}
        elif entry == AVERAGED:
            arrays[entry] = numpy.array(value)
        else:
            values[entry] = value
    _write_arrays(file, arrays, values)


def read_progress(file: Path) -> dict[str, Any]:
    """The plain values in a model's file, without reading its arrays or checking them. Raises: CheckpointError."""
    with formats.unreadable(file):
        if formats.is_safetensors(file):
            from safetensors import safe_open

            with safe_open(file, framework="numpy") as opened:
                return formats.progress_of(opened.metadata())
        with numpy.load(file, allow_pickle=False) as stored:
            return _values(stored[PROGRESS]) if PROGRESS in stored.files else {}


def read_model(file: Path) -> dict[str, Any]:
    """The progress, and the arrays by name under "model". Raises: CheckpointError."""
    arrays, progress = _read_safetensors(file) if formats.is_safetensors(file) else _read_arrays(file)
    return {**progress, "model": arrays}


def _read(file: Path) -> dict[str, Any]:
    """The inverse of writing entries."""
    import tensorflow as tf  # here, as importing it takes seconds, which reading a model does not need

    arrays, entries = _read_arrays(file)
    for path, array in sorted(arrays.items()):
        entry, _, name = path.partition("/")
        if entry in (SHARED, OWN):
            entries.setdefault(entry, {}).setdefault(name.rpartition("/")[0], []).append(tf.constant(array))
        elif entry in TENSORS:
            entries.setdefault(entry, {})[name] = array
        elif path == AVERAGED:
            entries[path] = array
        else:
            entries.setdefault("optimizer", {})[path] = array
    return entries


def _write_arrays(path: Path, arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
    """Write arrays by name, and plain values. Raises: OSError, if the disk is full."""
    named: dict[str, Any] = {PROGRESS: numpy.frombuffer(json.dumps(values).encode(), numpy.uint8), **arrays}
    with open(path, "wb") as file:  # numpy adds a suffix to a path, but not to an open file
        numpy.savez(file, **named)


def _write_safetensors(path: Path, arrays: Mapping[str, Array], values: Mapping[str, Any]) -> None:
    """As `_write_arrays`, in the safetensors format. Raises: OSError, if the disk is full."""
    from safetensors.numpy import save_file

    in_order = {name: numpy.asarray(array, order="C") for name, array in arrays.items()}
    with formats.atomic_write(path) as unfinished:
        save_file(in_order, unfinished, formats.header("tf", values))


def _read_safetensors(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    with formats.verified_read(path):
        from safetensors import safe_open

        with safe_open(path, framework="numpy") as file:
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 it is not a dict
            return arrays, formats.progress_of(file.metadata())


def _read_arrays(path: Path) -> tuple[dict[str, Array], dict[str, Any]]:
    """Read what `_write_arrays` wrote, or any .npz file. Raises: CheckpointError."""
    with formats.unreadable(path), numpy.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}  # reading checks each array's CRC
        return arrays, _values(arrays.pop(PROGRESS)) if PROGRESS in arrays else {}


def _values(array: Array) -> dict[str, Any]:
    values = json.loads(array.tobytes())
    if not isinstance(values, dict):
        raise ValueError(f"its array {PROGRESS!r} is not a dict")
    return values
