"""The variables of a Keras model or tf.Module by name and kind, its generators of random numbers, and its export."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator  # where keras.random draws from, if not told otherwise

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.base import Exported, Kind

KERAS_ATTRIBUTES = frozenset(vars(keras.Model())) | {"_functional", "_operations", "_operations_by_depth"}
"""Attributes in which Keras itself lists what a layer contains: everything in them has another, better name."""


@dataclass
class ModelVariables:
    """A model's variables and generators.

    Attributes:
        by_name: each keras.Variable or tf.Variable, by the names of the attributes that lead to it: `blocks.0.norm.gamma`.
        kinds: the variables' kinds, by the same names.
        owners: the layers or modules that the variables belong to, by the same names.
        generators: each keras.random.SeedGenerator and tf.random.Generator.
    """

    model: Any
    by_name: dict[str, Any] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> list[Any]:
        """The variables of one kind, in the model's order."""
        return [variable for _, variable in self.named(kind)]

    def named(self, kind: str) -> list[tuple[str, Any]]:
        """The variables of one kind with their names, in the model's order."""
        return [(name, variable) for name, variable in self.by_name.items() if self.kinds[name] == kind]


def variables_of(model: Any) -> ModelVariables:
    """The variables of a keras.Model (or layer) or tf.Module, including those of Keras layers inside of a tf.Module, which are
    missing from TensorFlow's own list."""
    variables = ModelVariables(model, generators=[global_seed_generator()])
    seen: set[int] = {id(variables.generators[0])}
    for path, found, owner in _walk(model, "", None, seen):
        if _is_generator(found):
            variables.generators.append(found)
            continue
        name = path if path not in variables.by_name else f"{path}.{len(variables.by_name)}"
        variables.by_name[name] = found
        variables.kinds[name] = _kind(found, owner)
        variables.owners[name] = owner
    return variables


def _walk(value: Any, path: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Each variable and generator once: its path, itself, and the layer or module that it belongs to."""
    if id(value) in seen:
        return
    if isinstance(value, (keras.Variable, tf.Variable)) or _is_generator(value):
        seen.add(id(value))
        yield path, value, owner
    elif isinstance(value, (keras.layers.Layer, tf.Module)):
        seen.add(id(value))
        for name, member in _attributes(value):
            yield from _walk(member, f"{path}.{name}" if path else name, value, seen)
    elif isinstance(value, (list, tuple)):
        for number, member in enumerate(value):
            yield from _walk(member, f"{path}.{number}", owner, seen)
    elif isinstance(value, dict):
        for key, member in value.items():
            yield from _walk(member, f"{path}.{key}", owner, seen)


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Each Keras layer and tf.Module of a model once, with the names of the attributes that lead to it; the model first."""
    seen: set[int] = set()

    def walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        members: list[tuple[Any, Any]] = []
        if isinstance(value, (keras.layers.Layer, tf.Module)) and id(value) not in seen:
            seen.add(id(value))
            yield path, value
            members = list(_attributes(value))
        elif isinstance(value, (list, tuple)):
            members = list(enumerate(value))
        elif isinstance(value, dict):
            members = list(value.items())
        for name, member in members:
            yield from walk(member, f"{path}.{name}" if path else str(name))

    return walk(model, "")


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a layer or module in which variables may be: those of its author first, then Keras' own lists."""
    for name, value in list(vars(owner).items()):
        if name not in KERAS_ATTRIBUTES and not name.startswith("_self_"):
            yield name.lstrip("_"), value
    if isinstance(owner, keras.layers.Layer):
        yield "layers", owner.layers if isinstance(owner, keras.Model) else owner._layers
        for variable in [*owner._trainable_variables, *owner._non_trainable_variables]:
            yield variable.name, variable


def _is_generator(value: Any) -> bool:
    return isinstance(value, (keras.random.SeedGenerator, tf.random.Generator))


def _kind(variable: Any, owner: Any) -> Kind:
    if variable.trainable:
        return "parameters"
    if not tensorflow_variable(variable).dtype.is_floating:
        return "counters"
    # After `layer.trainable = False`, a layer's weights still are in its list of trainable variables.
    trainable = getattr(owner, "_trainable_variables", ())
    return "frozen" if any(variable is other for other in trainable) else "statistics"


def tensorflow_variable(variable: Any) -> tf.Variable:
    """The tf.Variable itself, or the one inside of a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def set_generators(generators: list[Any], seeds: tf.Tensor) -> None:
    """Restart every generator from its seed. Part of a graph.

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
    """A variable's value; half precision as single precision, which every transport supports and in which sums are exact
    enough."""
    value = variable.value()
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def array_of(variable: Any) -> Array:
    """A copy of a variable's value."""
    return numpy.array(tensorflow_variable(variable).numpy())


def assign(variables: Iterable[tuple[str, Any]], arrays: Mapping[str, Array], wrong: str) -> None:
    """Set variables to stored values, by name.

    Args:
        wrong: the beginning of the message if names or shapes differ.

    Raises:
        CheckpointError: before the first variable is changed.
    """
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
        if stored.dtype.kind == "V":  # bfloat16, which numpy stores as plain bytes
            stored = stored.view(variable.dtype.as_numpy_dtype)
        variable.assign(tf.constant(stored, variable.dtype))


WEIGHTS, SAVED_MODEL = "weights.npz", "saved_model"
"""The forms in which a model is exported."""


def export_model(variables: ModelVariables, evaluate: Callable[[], None], folder: Path) -> list[Exported]:
    """Write a model into a folder: its weights, and a SavedModel, if it is a Keras model.

    Args:
        evaluate: traces train_step for an evaluation: the SavedModel takes what the model is called with there.
    """
    arrays: dict[str, Any] = {name: array_of(variable) for name, variable in variables.by_name.items()}
    numpy.savez(folder / WEIGHTS, **arrays)
    weights = Exported(WEIGHTS, None, f'weights = numpy.load("{WEIGHTS}")  # by the names of the attributes that lead to them')
    model = variables.model
    if not isinstance(model, keras.Model):
        return [
            weights,
            Exported(SAVED_MODEL, f"expected a Keras model, got {type(model).__name__} (tf.saved_model.save saves it)"),
        ]
    specs: list[tf.TensorSpec] = []
    call = model.call

    @functools.wraps(call)
    def noting(*args: Any, **kwargs: Any) -> Any:
        if not specs:
            specs.extend(tf.TensorSpec(one.shape, one.dtype) for one in args if tf.is_tensor(one))
        return call(*args, **kwargs)

    model.call = noting
    try:
        evaluate()
    finally:
        model.call = call
    if not specs:
        return [weights, Exported(SAVED_MODEL, "train_step does not call the model itself with a tensor")]
    try:
        archive = keras.export.ExportArchive()
        archive.track(model)
        archive.add_endpoint("serve", lambda *inputs: model(*inputs, training=False), input_signature=specs)
        archive.write_out(str(folder / SAVED_MODEL), verbose=False)
    except Exception as error:  # whatever TensorFlow has to say of the config's model
        return [weights, Exported(SAVED_MODEL, f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}")]
    inputs = ", ".join(f"<{spec.dtype.name}, {spec.shape}>" for spec in specs)
    return [weights, Exported(SAVED_MODEL, None, f'model = tf.saved_model.load("{SAVED_MODEL}")\nmodel.serve({inputs})')]
