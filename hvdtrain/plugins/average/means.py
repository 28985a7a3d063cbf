"""Means of the models in several files. Sums are formed in float64.

`model_file.py` in the framework's folder reads and writes the files, so the code here sees numpy arrays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.contents import BASE
from hvdtrain.learner.frameworks import FRAMEWORKS, Framework
from hvdtrain.learner.model_format import FORMAT, is_safetensors, verified_read


def framework_of(file: Path) -> Framework:
    """The framework that wrote a model's file. Raises: CheckpointError."""
    if is_safetensors(file):
        with verified_read(file):
            from safetensors import safe_open

            with safe_open(file, framework="numpy") as stored:
                name = (stored.metadata() or {}).get(FORMAT)
        frameworks = [framework for framework in FRAMEWORKS.values() if framework.header == name]
        return frameworks[0] if frameworks else next(iter(FRAMEWORKS.values()))
    frameworks = [framework for framework in FRAMEWORKS.values() if file.suffix == f".{framework.suffix}"]
    if not frameworks:
        suffixes = ", ".join(f".{framework.suffix}" for framework in FRAMEWORKS.values())
        raise CheckpointError(f"{file}: expected a model's file, whose name ends in {suffixes} or .safetensors, got another")
    return frameworks[0]


def mean_of_files(files: Sequence[Path], framework: Framework) -> dict[str, Any]:
    """The mean of the models in files, in the form of `read_model`.

    Integers and booleans, such as BatchNorm's number of batches, and all that is not a tensor, are those of the newest model: the
    one with the highest step, of equals the last in the list. Floating-point numbers keep their types. What is the
    same in all files stays as it is, also infinite values, such as those of a mask.

    Raises:
        CheckpointError: a file cannot be read, the models differ in names or shapes, or values are not finite.
    """
    io = framework.model_files
    sums: dict[str, Array] = {}
    newest: dict[str, Any] = {}
    same: dict[str, Any] = {}  # tensors that have been the same so far
    infinite: dict[str, Array] = {}  # the infinite values of the first file, among zeros
    for file in files:
        contents = io.read_model(file)
        model = contents["model"]
        if differing := sorted(set(model) ^ set(newest.get("model", model))):
            raise CheckpointError(f"{file}: expected the tensors of {files[0]}, got others: {', '.join(differing[:5])}")
        if contents.get(BASE) != newest.get(BASE, contents.get(BASE)):
            raise CheckpointError(f"{file}: expected parameters trained with the base model of {files[0]}, got another base")
        for name, tensor in model.items():
            values = io.widen(tensor)
            if (values is None) != (name not in sums) and newest:
                raise CheckpointError(f"{file}: {name}: expected the type that it has in {files[0]}, got another")
            if values is None:
                continue
            if name in sums and sums[name].shape != values.shape:
                raise CheckpointError(f"{file}: {name}: expected shape {sums[name].shape}, got {values.shape}")
            if not newest:
                same[name] = tensor
            elif name in same and not numpy.array_equal(io.widen(same[name]), values):
                del same[name]
            if not (is_finite := numpy.isfinite(values)).all() or name in infinite:
                others = numpy.where(is_finite, 0, values)
                infinite_before = infinite.get(name) if newest else infinite.setdefault(name, others)
                if infinite_before is None or not numpy.array_equal(infinite_before, others):  # NaN does not equal itself
                    raise CheckpointError(f"{file}: {name}: expected finite numbers, got others (leave this checkpoint out)")
            sums[name] = sums[name] + values if name in sums else values
        if not newest or _step(contents) >= _step(newest):
            newest = contents
    return _replace(newest, {name: total / len(files) for name, total in sums.items() if name not in same}, io)


def with_parameters(file: Path, values: Mapping[str, Array], framework: Framework) -> dict[str, Any]:
    """The model in a file with other values of some parameters, also under the other names of a shared one.

    Raises:
        CheckpointError: the file cannot be read, or its model has no such parameters.
    """
    io = framework.model_files
    contents = io.read_model(file)
    model = contents["model"]
    for name, array in values.items():
        if name not in model or tuple(model[name].shape) != array.shape:
            raise CheckpointError(f"{file}: expected the parameter {name} with shape {array.shape}, got none or another")
    by_place = {io.place_of(model[name]): array for name, array in values.items()}
    return _replace(contents, {name: by_place[place] for name in model if (place := io.place_of(model[name])) in by_place}, io)


def _replace(contents: Mapping[str, Any], values: Mapping[str, Array], io: Any) -> dict[str, Any]:
    """Contents of a model's file with other values of some tensors. Tensors that shared their memory do so again."""
    model = contents["model"]
    narrowed: dict[Any, Any] = {}
    tensors = dict(model)
    for name, array in values.items():
        place = io.place_of(model[name])
        if place not in narrowed or not array.size:
            narrowed[place] = io.narrow(array, model[name])
        tensors[name] = narrowed[place]
    return {**contents, "model": tensors}


def _step(contents: Mapping[str, Any]) -> int:
    return int(contents.get("step") or 0)
