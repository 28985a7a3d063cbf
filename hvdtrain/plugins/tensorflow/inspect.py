"""Inspects a model: its layers, and a profile of its steps. Exports it as weights and a SavedModel."""

from __future__ import annotations

import functools
import gzip
import inspect
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.learner.base import Exported, Layer, Profiler
from hvdtrain.plugins.tensorflow.tensors import ModelVariables, array_of, layers_of
from hvdtrain.runtime import log


def describe_layers(variables: ModelVariables) -> Iterator[Layer]:
    """The model and its layers, each with the parameters it holds directly."""
    names_by_owner: dict[int, dict[str, str]] = {}  # by owner, the full name of each variable by its last part
    for name, owner in variables.owners.items():
        if variables.kinds[name] in ("parameters", "frozen"):
            names_by_owner.setdefault(id(owner), {})[name.rpartition(".")[2]] = name
    for path, layer in layers_of(variables.model):
        names = names_by_owner.get(id(layer), {})
        shapes = {short: tuple(variables.by_name[name].shape) for short, name in names.items()}
        trained = frozenset(short for short, name in names.items() if variables.kinds[name] == "parameters")
        yield Layer(path, type(layer).__name__, shapes, trained)


class _Profiler:
    def __init__(self) -> None:
        self._folder = TemporaryDirectory()

    def start(self) -> None:
        tf.profiler.experimental.start(self._folder.name)

    def stop(self, file: Path) -> None:
        tf.profiler.experimental.stop()
        with self._folder as folder, gzip.open(file, "wt", encoding="utf-8") as out:
            recording = next(Path(folder).rglob("*.xplane.pb"))
            json.dump({"traceEvents": list(_trace_events(recording.read_bytes()))}, out)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return tf.profiler.experimental.Trace(name)  # type: ignore[no-any-return]


def profiler(on_gpu: bool) -> Profiler:
    """TensorFlow's profiler: CPU operations, and GPU kernels if there is a GPU."""
    return _Profiler()


def _trace_events(recorded: bytes) -> Iterator[dict[str, Any]]:
    """Convert the recording of TensorFlow's profiler to events of Chrome's trace format, in microseconds."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace.FromString(recorded)
    for process, plane in enumerate(space.planes):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": plane.name}}
        for thread, line in enumerate(plane.lines):  # their ids are too large for Perfetto
            place = {"pid": process, "tid": thread}
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": line.display_name or line.name}}
            for event in line.events:
                began = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                name = plane.event_metadata[event.metadata_id].name
                yield {"ph": "X", **place, "name": name, "ts": began, "dur": event.duration_ps / 1e6}


WEIGHTS = "weights.npz"
SAVED_MODEL = "saved_model"
"""The formats in which a model is exported."""


def export_model(variables: ModelVariables, evaluate: Callable[[], None], folder: Path) -> list[Exported]:
    """Write a model into a folder: its weights, and a SavedModel, if it is a Keras model.

    Args:
        evaluate: traces train_step for an evaluation: the SavedModel has the same inputs as the model's first call there.
    """
    arrays: dict[str, Any] = {name: array_of(variable) for name, variable in variables.by_name.items()}
    numpy.savez(folder / WEIGHTS, **arrays)
    load = f'weights = numpy.load("{WEIGHTS}")  # by the names of the attributes that lead to them'
    weights = Exported(WEIGHTS, None, f"import numpy\n\n{load}")
    model = variables.model
    if not isinstance(model, keras.Model):
        return [
            weights,
            Exported(SAVED_MODEL, f"expected a Keras model, got {type(model).__name__} (tf.saved_model.save saves it)"),
        ]
    args, kwargs = _first_call(model, evaluate)
    values = [*args, *kwargs.values()]
    parameters = [*inspect.signature(model.call).parameters, *(f"input_{number}" for number in range(len(args)))]
    names = [*parameters[: len(args)], *kwargs]
    specs = [
        tf.TensorSpec(leaf.shape, leaf.dtype, name="_".join(map(str, (name, *path))))
        for name, value in zip(names, values, strict=True)
        for path, leaf in keras.tree.flatten_with_path(value)
        if tf.is_tensor(leaf)
    ]
    if not specs:
        return [weights, Exported(SAVED_MODEL, "train_step does not call the model itself with a tensor")]

    def serve(*inputs: Any) -> Any:
        given = iter(inputs)
        filled = keras.tree.map_structure(lambda leaf: next(given) if tf.is_tensor(leaf) else leaf, values)
        return model(*filled[: len(args)], **dict(zip(kwargs, filled[len(args) :], strict=True)) | {"training": False})

    log.info(f"Writing {folder / SAVED_MODEL} ...")
    try:
        with warnings.catch_warnings(action="ignore"):
            archive = keras.export.ExportArchive()
            archive.track(model)
            archive.add_endpoint("serve", serve, input_signature=specs)
            archive.write_out(str(folder / SAVED_MODEL), verbose=False)
    except Exception as error:  # TensorFlow can raise anything for the config's model
        return [weights, Exported(SAVED_MODEL, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")]
    run = f'model = tf.saved_model.load("{SAVED_MODEL}")\noutputs = model.serve({", ".join(spec.name for spec in specs)})'
    return [weights, Exported(SAVED_MODEL, None, f"import tensorflow as tf\n\n{run}", _describe_inputs(specs))]


def _first_call(model: keras.Model, evaluate: Callable[[], None]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    call = model.call

    @functools.wraps(call)
    def record_call(*args: Any, **kwargs: Any) -> Any:
        calls.append((args, kwargs))
        return call(*args, **kwargs)

    model.call = record_call
    try:
        evaluate()
    finally:
        model.call = call
    return calls[0] if calls else ((), {})


def _describe_inputs(specs: Sequence[tf.TensorSpec]) -> str:
    shapes = [", ".join("any" if size is None else str(size) for size in spec.shape) for spec in specs]
    inputs = [f"{spec.name} {spec.dtype.name} ({shape})" for spec, shape in zip(specs, shapes, strict=True)]
    fixed = [
        f"axis {axis} of {spec.name} at {size}" for spec in specs for axis, size in enumerate(spec.shape) if size is not None
    ]
    return ", ".join(inputs) + (f"; fixed: {', '.join(fixed)}" if fixed else "")
