"""What a Keras model or tf.Module consists of: variables by name and kind, and generators of random numbers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator  # where keras.random draws from, if not told otherwise

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.base import Kind

NO_PARTS = frozenset(vars(keras.Model())) | {"_functional", "_operations", "_operations_by_depth"}
"""Attributes by which Keras itself keeps track of a layer's parts: each part has another, better name."""


@dataclass
class Parts:
    """What a model consists of.

    Attributes:
        variables: by the names of the attributes that lead to them, such as `blocks.0.norm.gamma`. keras.Variable, or
            tf.Variable.
        kinds: of every variable, by the same names.
        owners: the layer or module that each belongs to, by the same names.
        generators: keras.random.SeedGenerator and tf.random.Generator.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> list[Any]:
        """The variables of one kind, in the model's order."""
        return [variable for _, variable in self.named(kind)]

    def named(self, kind: str) -> list[tuple[str, Any]]:
        """The same with their names."""
        return [(name, variable) for name, variable in self.variables.items() if self.kinds[name] == kind]


def parts_of(model: Any) -> Parts:
    """Go through a keras.Model (or layer) or tf.Module, and through Keras layers inside of a tf.Module, which TensorFlow's own
    list of variables leaves out."""
    parts = Parts(generators=[global_seed_generator()])
    seen: set[int] = {id(parts.generators[0])}
    for path, part, owner in _walk(model, "", None, seen):
        if _is_generator(part):
            parts.generators.append(part)
            continue
        name = path if path not in parts.variables else f"{path}.{len(parts.variables)}"
        parts.variables[name] = part
        parts.kinds[name] = _kind(part, owner)
        parts.owners[name] = owner
    return parts


def tensorflow_variable(variable: Any) -> tf.Variable:
    """A Keras variable is no tf.Variable but has one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def _walk(part: Any, path: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Every variable and generator once: its path, itself, and the layer or module that it belongs to."""
    if id(part) in seen:
        return
    if isinstance(part, (keras.Variable, tf.Variable)) or _is_generator(part):
        seen.add(id(part))
        yield path, part, owner
    elif isinstance(part, (keras.layers.Layer, tf.Module)):
        seen.add(id(part))
        for name, value in _attributes(part):
            yield from _walk(value, f"{path}.{name}" if path else name, part, seen)
    elif isinstance(part, (list, tuple)):
        for number, value in enumerate(part):
            yield from _walk(value, f"{path}.{number}", owner, seen)
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from _walk(value, f"{path}.{key}", owner, seen)


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    """What a layer or module may have parts in: its author's attributes first, then what only Keras has a list of."""
    for name, value in list(vars(part).items()):
        if name not in NO_PARTS and not name.startswith("_self_"):
            yield name.lstrip("_"), value
    if isinstance(part, keras.layers.Layer):
        yield "layers", part.layers if isinstance(part, keras.Model) else part._layers
        for variable in [*part._trainable_variables, *part._non_trainable_variables]:
            yield variable.name, variable


def _is_generator(part: Any) -> bool:
    return isinstance(part, (keras.random.SeedGenerator, tf.random.Generator))


def _kind(variable: Any, owner: Any) -> Kind:
    if variable.trainable:
        return "parameters"
    if not tensorflow_variable(variable).dtype.is_floating:
        return "counters"
    # `layer.trainable = False` leaves a layer's weights in its list of what could be trained.
    could_be_trained = getattr(owner, "_trainable_variables", ())
    return "frozen" if any(variable is other for other in could_be_trained) else "statistics"


def set_generators(generators: list[Any], seeds: tf.Tensor) -> None:
    """Let every generator start anew from its seed; part of a graph.

    Args:
        seeds: uint32 of shape (generators,).
    """
    for number, generator in enumerate(generators):
        if isinstance(generator, keras.random.SeedGenerator):
            state = tensorflow_variable(generator.state)
            state.assign(tf.cast(tf.stack([seeds[number], 0]), state.dtype))
        else:
            generator.reset_from_seed(tf.cast(seeds[number], tf.int64))


def exchangeable(variable: tf.Variable) -> tf.Tensor:
    """A variable's value; half precision as single precision, which every transport and every sum can do with."""
    value = variable.value()
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def array_of(variable: Any) -> Array:
    """A copy of a variable's value."""
    return numpy.array(tensorflow_variable(variable).numpy())


def assign(variables: Iterable[tuple[str, Any]], arrays: Mapping[str, Array], wrong: str) -> None:
    """Give variables their stored values. Raises: CheckpointError, before the first is changed."""
    wanted = {name: tensorflow_variable(variable) for name, variable in variables}
    missing, unknown = sorted(wanted.keys() - arrays.keys()), sorted(arrays.keys() - wanted.keys())
    shapes = [
        f"{name} of shape {arrays[name].shape} instead of {tuple(variable.shape)}"
        for name, variable in wanted.items()
        if name in arrays and arrays[name].shape != tuple(variable.shape)
    ]
    if missing or unknown or shapes:
        raise CheckpointError(f"{wrong}: missing {missing}, unknown {unknown}, {shapes}")
    for name, variable in wanted.items():
        stored = arrays[name]
        if stored.dtype.kind == "V":  # bfloat16, which numpy's files know as bytes only
            stored = stored.view(variable.dtype.as_numpy_dtype)
        variable.assign(tf.constant(stored, variable.dtype))
