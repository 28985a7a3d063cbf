"""Conversions between numpy and TensorFlow: batches to tensors, losses to sums and counts, variables to arrays.

Also finds the variables of a Keras model or tf.Module, by name and kind, and its random generators.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy
import tensorflow as tf
from keras.src.random.seed_generator import global_seed_generator  # the default generator of keras.random

from hvdtrain.context import Loss
from hvdtrain.data.types import Array
from hvdtrain.learner.meter import minimized_losses, nothing_to_minimize
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.precision import widen


def zeros(count: int, local_rank: int) -> Any:
    """N float32 zeros, on this rank's GPU if there is one."""
    gpus = tf.config.list_logical_devices("GPU")
    with tf.device(gpus[local_rank % len(gpus)].name if gpus else "CPU:0"):
        return tf.zeros([count])


def size(tensor: Any) -> int:
    """A tensor's bytes."""
    return int(tensor.dtype.size) * int(tf.size(tensor))


@contextmanager
def preserve_state() -> Iterator[None]:
    """Does nothing: TensorFlow's global seed, threads and devices, which a training sets, cannot be read or restored."""
    yield


def wait_for(tensor: Any) -> None:
    """Wait until a tensor has been computed: on a GPU, operations return before they are finished."""
    tf.reshape(tensor, [-1])[:1].numpy()


@dataclass(frozen=True)
class TensorFlowData:
    """One data key of a batch, as passed to `train_step`.

    Attributes:
        raw_tensor: shape (batch, time, ...). Strings are a tensor of type tf.string.
        seq_lens: int32 of shape (batch,).
        mask: True where a frame is not padding; shape (batch, time).
    """

    raw_tensor: tf.Tensor
    seq_lens: tf.Tensor
    mask: tf.Tensor


@dataclass(frozen=True)
class TensorFlowPackedData:
    """One data key of a batch without padding, as passed to `train_step`.

    Attributes:
        raw_tensor: shape (frames, ...), the frames of one sequence after the other.
        seq_lens: int32 of shape (batch,).
    """

    raw_tensor: tf.Tensor
    seq_lens: tf.Tensor

    @property
    def offsets(self) -> tf.Tensor:
        """Where each sequence begins, then the number of frames: int32 of shape (batch + 1,)."""
        return tf.concat([[0], tf.cumsum(self.seq_lens)], 0)

    @property
    def ragged(self) -> tf.RaggedTensor:
        """The same as a ragged tensor, of shape (batch, time of each sequence, ...)."""
        return self.as_ragged(self.raw_tensor)

    def as_ragged(self, values: tf.Tensor) -> tf.RaggedTensor:
        """Values with the same frames as a ragged tensor."""
        return tf.RaggedTensor.from_row_lengths(values, tf.cast(self.seq_lens, tf.int64))


def tensor_of(values: Array) -> tf.Tensor:
    """An array as a tensor, in a type that TensorFlow supports; strings as tf.string."""
    return tf.constant(values.tolist(), tf.string) if values.dtype == object else tf.constant(widen(values))


def specs_of(values: tf.Tensor, is_packed: bool) -> tuple[tf.TensorSpec, tf.TensorSpec]:
    """The signature of values and seq_lens, for any number of sequences of any length."""
    shape = [None, *values.shape[1:]] if is_packed else [None, None, *values.shape[2:]]
    return tf.TensorSpec(shape, values.dtype), tf.TensorSpec([None], tf.int32)


def extern_data_of(
    data: Mapping[str, tuple[tf.Tensor, tf.Tensor]], packed: Collection[str] = ()
) -> dict[str, TensorFlowData | TensorFlowPackedData]:
    """The tensors to pass to `train_step`, by data key.

    Args:
        packed: the data keys without padding.
    """
    return {
        key: TensorFlowPackedData(values, seq_lens)
        if key in packed
        else TensorFlowData(values, seq_lens, tf.sequence_mask(seq_lens, tf.shape(values)[1]))
        for key, (values, seq_lens) in data.items()
    }


def with_dataset_losses(
    losses: Mapping[str, Loss], numbers: tf.Tensor | None, names: Sequence[str], are_frames: bool
) -> dict[str, Loss]:
    """The losses, and if an epoch mixes datasets, those of the sequences of each dataset as errors, `loss.dataset`.

    Part of a graph. A loss without seq_lens is left out: it is unknown which of its elements belong to a sequence.

    Args:
        numbers: of every sequence, or of every frame of joined pieces, the number of its dataset; None: there is no mix.
        names: of the datasets.
        are_frames: whether the numbers are those of frames.
    """
    result = dict(losses)
    for name, loss in losses.items() if numbers is not None else ():
        if loss.seq_lens is None or loss.count is not None or (are_frames and isinstance(loss.seq_lens, int)):
            continue
        value, owners = _with_owners(name, loss, numbers, are_frames)
        for number, dataset in enumerate(names):
            result[f"{name}.{dataset}"] = Loss(tf.boolean_mask(value, owners == number), 0.0, True, False, None)
    return result


def _with_owners(name: str, loss: Loss, numbers: tf.Tensor, are_frames: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """A loss, and the number of the dataset of each element on its first axis. Part of a graph that fails if they do not fit."""
    value = tf.convert_to_tensor(loss.value)
    first = tf.shape(value)[0]
    count = tf.size(numbers)
    has_axes = value.shape.rank > 1
    if are_frames:
        owners = numbers
        if has_axes:  # the frames come first, or behind an axis for the only row
            value = tf.reshape(value, [tf.where(first == count, first, first * tf.shape(value)[1]), -1])
    else:
        lengths = tf.broadcast_to(tf.cast(loss.seq_lens, tf.int32), [count])
        owners = tf.repeat(numbers, tf.where(first == count, 1, lengths) if has_axes else lengths)  # 1: rows with padding
    fits = tf.debugging.assert_equal(
        tf.size(owners),
        tf.shape(value)[0],
        "train_step: expected a loss with the elements of all sequences, one after the other, for the seq_lens in "
        f"mark_as_loss(..., {name!r}), got another number of them",
    )
    with tf.control_dependencies([fits]):
        return tf.identity(value), owners


def numbers_of(losses: Mapping[str, Loss]) -> tf.Tensor:
    """The losses' sums, then their counts; float64 of shape (2 * losses,)."""
    sums = [tf.reduce_sum(tf.cast(loss.value, tf.float64)) for loss in losses.values()]
    return tf.stack(sums + [count_of(loss) for loss in losses.values()])


def count_of(loss: Loss) -> tf.Tensor:
    """The number of elements of a loss, as a scalar."""
    if loss.count is None:
        return tf.cast(tf.size(loss.value), tf.float64)
    return tf.reduce_sum(tf.cast(loss.count, tf.float64))


def counts_of(losses: Mapping[str, Loss], names: Sequence[str]) -> tf.Tensor:
    """The numbers of elements of some losses; float64 of shape (losses,), or a 0 if there are none."""
    return tf.stack([count_of(losses[name]) for name in names] or [tf.constant(0.0, tf.float64)])


def terms_of(losses: Mapping[str, Loss]) -> dict[str, tf.Tensor]:
    """The minimized losses: their sums times their scales."""
    terms = {}
    for name, loss in minimized_losses(losses).items():
        value = tf.convert_to_tensor(loss.value)
        terms[name] = tf.reduce_sum(tf.cast(value, tf.float32) if value.dtype.size < 4 else value) * loss.scale
    return terms


def total_of(losses: Mapping[str, Loss], divisors: Mapping[str, tf.Tensor]) -> tf.Tensor:
    """The scalar to differentiate. Raises: ConfigError, if no loss is minimized.

    Args:
        divisors: those of the normalized losses, by name.
    """
    terms = terms_of(losses)
    return _add_up([term / tf.cast(divisors[name], term.dtype) if name in divisors else term for name, term in terms.items()])


def totals_of(losses: Mapping[str, Loss], apart: Sequence[str]) -> list[tf.Tensor]:
    """The scalars to differentiate if the gradients of some losses are kept separate.

    Args:
        apart: the names of these losses.

    Returns: the sum of the other losses, or a constant if there are none; then each separate loss.

    Raises:
        ConfigError: no loss is minimized.
    """
    terms = terms_of(losses)
    together = [term for name, term in terms.items() if name not in apart]
    return [_add_up(together) if together or not apart else tf.zeros([]), *(terms[name] for name in apart)]


def _add_up(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    if not terms:
        raise nothing_to_minimize()
    return tf.add_n([tf.cast(term, terms[0].dtype) for term in terms])


KERAS_ATTRIBUTES = frozenset(vars(keras.Model())) | {"_functional", "_operations", "_operations_by_depth"}
"""Attributes in which Keras lists a layer's contents: everything in them has a better name elsewhere."""


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
    kinds: dict[str, Role] = field(default_factory=dict)
    owners: dict[str, Any] = field(default_factory=dict)
    generators: list[Any] = field(default_factory=list)

    def of_kind(self, kind: Role) -> list[Any]:
        """The variables of one kind, in the model's order."""
        return [variable for _, variable in self.named_of_kind(kind)]

    def named_of_kind(self, kind: str) -> list[tuple[str, Any]]:
        """The variables of one kind with their names, in the model's order."""
        return [(name, variable) for name, variable in self.by_name.items() if self.kinds[name] == kind]


def variables_of(model: Any) -> ModelVariables:
    """The variables of a keras.Model (or layer) or tf.Module, including those of Keras layers inside a tf.Module, which are
    missing from TensorFlow's list."""
    default = global_seed_generator()
    variables = ModelVariables(model, generators=[default])
    for path, member, owner in _walk(model, "", None, {id(default)}):
        if _is_generator(member):
            variables.generators.append(member)
        elif not isinstance(member, LAYERS):
            name = path if path not in variables.by_name else f"{path}.{len(variables.by_name)}"
            variables.by_name[name] = member
            variables.kinds[name] = _kind(member, owner)
            variables.owners[name] = owner
    return variables


def layers_of(model: Any) -> Iterator[tuple[str, Any]]:
    """Each Keras layer and tf.Module of a model once, with the names of the attributes that lead to it; the model first."""
    return ((path, member) for path, member, _ in _walk(model, "", None, set()) if isinstance(member, LAYERS))


LAYERS = (keras.layers.Layer, tf.Module)


def _walk(value: Any, path: str, owner: Any, seen: set[int]) -> Iterator[tuple[str, Any, Any]]:
    """Each layer, module, variable and generator once, with its path and the layer or module that it belongs to."""
    members: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, (keras.Variable, tf.Variable, *LAYERS)) or _is_generator(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        yield path, value, owner
        if isinstance(value, LAYERS):
            owner = value
            members = _attributes(value)
    elif isinstance(value, (list, tuple)):
        members = enumerate(value)
    elif isinstance(value, dict):
        members = value.items()
    for name, member in members:
        yield from _walk(member, f"{path}.{name}" if path else str(name), owner, seen)


def settings_of_keras(layer: Any) -> str | None:
    """The settings of a layer of Keras' own, as text, without those that are objects; None: it is somebody else's."""
    if not type(layer).__module__.startswith("keras."):
        return None
    if isinstance(layer, keras.Model):
        return ""
    simple = {name: value for name, value in layer.get_config().items() if isinstance(value, bool | int | float | str)}
    return ", ".join(f"{name}={value!r}" for name, value in sorted(simple.items()) if name != "name")


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes of a layer or module that may hold variables: first those of its author, then Keras' lists."""
    for name, value in list(vars(owner).items()):
        if name not in KERAS_ATTRIBUTES and not name.startswith("_self_"):
            yield name.lstrip("_"), value
    if isinstance(owner, keras.layers.Layer):
        yield "layers", owner.layers if isinstance(owner, keras.Model) else owner._layers
        for variable in [*owner._trainable_variables, *owner._non_trainable_variables]:
            yield variable.name, variable


def _is_generator(value: Any) -> bool:
    return isinstance(value, (keras.random.SeedGenerator, tf.random.Generator))


def _kind(variable: Any, owner: Any) -> Role:
    if variable.trainable:
        return "parameters"
    dtype = tensorflow_variable(variable).dtype
    if not (dtype.is_floating or dtype.is_complex):
        return "counters"
    # After `layer.trainable = False`, a layer's weights are still in its list of trainable variables.
    trainable = getattr(owner, "_trainable_variables", ())
    return "frozen" if any(variable is trained for trained in trainable) else "statistics"


def tensorflow_variable(variable: Any) -> tf.Variable:
    """The tf.Variable itself, or the one inside a Keras variable."""
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


def exchange_value(variable: tf.Variable) -> tf.Tensor:
    """A variable's value for the exchange: half precision becomes single precision, which every transport supports and which is
    precise enough for sums."""
    value = variable.value()
    return tf.cast(value, tf.float32) if value.dtype in (tf.float16, tf.bfloat16) else value


def array_of(variable: Any) -> Array:
    """A copy of a variable's value."""
    return numpy.asarray(tensorflow_variable(variable).numpy())


def value_of(variable: Any) -> Array:
    """A variable's value, read-only, without a copy if it is in main memory. It stays as it is, since TensorFlow's tensors are
    immutable: with an update, the variable gets other memory."""
    return numpy.asarray(tensorflow_variable(variable).value())


NO_OWNERS: Mapping[str, str] = {}


def assign(
    variables: Iterable[tuple[str, Any]], arrays: Mapping[str, Array | tf.Tensor], parameters: Mapping[str, str] = NO_OWNERS
) -> None:
    """Set variables to stored values, or to tensors, by name.

    Args:
        parameters: the parameters that variables belong to, for messages.

    Raises:
        ValueError: names or shapes differ. No variable has been changed.
    """
    wanted = {name: tensorflow_variable(variable) for name, variable in variables}
    described = {name: f"{name} (of {parameters[name]})" if name in parameters else name for name in wanted}
    missing = sorted(described[name] for name in wanted.keys() - arrays.keys())
    unknown = sorted(arrays.keys() - wanted.keys())
    shapes = [
        f"{described[name]} of shape {arrays[name].shape} instead of {tuple(variable.shape)}"
        for name, variable in wanted.items()
        if name in arrays and arrays[name].shape != tuple(variable.shape)
    ]
    if missing or unknown or shapes:
        raise ValueError(f"missing {missing}, unknown {unknown}, {shapes}")
    for name, variable in wanted.items():
        stored: Any = arrays[name]
        if isinstance(stored, tf.Tensor):
            variable.assign(tf.cast(stored, variable.dtype))
            continue
        if stored.dtype.kind == "V":  # bfloat16, which numpy stores as plain bytes
            stored = stored.view(variable.dtype.as_numpy_dtype)
        variable.assign(tf.constant(stored, variable.dtype))
