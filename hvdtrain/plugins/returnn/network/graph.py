"""A network of RETURNN in a graph and a session of TensorFlow: its inputs, its losses, its update."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy
import tensorflow as tf
from returnn.tf.network import ExternData, TFNetwork
from returnn.tf.util.basic import CollectionKeys, get_global_train_flag_placeholder

from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.returnn.network import gradients
from hvdtrain.plugins.returnn.network.messages import building
from hvdtrain.plugins.returnn.network.objective import Objective, objective_of
from hvdtrain.plugins.returnn.network.random_numbers import RandomNumbers, random_of_tensorflow
from hvdtrain.plugins.returnn.sizes import size_name

v1 = tf.compat.v1

OF_EVERY_BATCH = ("seq_tag", "seq_idx")
"""Data keys that no dataset needs to have."""


@dataclass(frozen=True)
class GraphOptions:
    """What the graphs of all epochs have in common.

    Attributes:
        config: RETURNN's Config.
        texts: the text of each config file, by its path.
        session: options of a session, as a dict of RETURNN's key `tf_session_opts`.
        per_rank: whether every rank's objective is minimized as it is, as RETURNN does.
        scaled: whether gradients are multiplied by a scale while they are exchanged.
        trains: whether the updater is built; otherwise the network is that of RETURNN's tasks forward and search.
        search: whether the network searches hypotheses.
    """

    config: Any
    texts: Mapping[str, str]
    exchange: GradientExchange
    bucket_bytes: int
    session: Mapping[str, Any]
    per_rank: bool = False
    scaled: bool = False
    trains: bool = True
    search: bool = False

    @property
    def has_scores(self) -> bool:
        """Whether losses and errors are computed, in a search by the key `search_do_eval`."""
        is_search = self.config.value("task", "train") == "search"
        return self.trains or (is_search and bool(self.config.bool("search_do_eval", True)))


class NetworkGraph:
    """A network, its updater, and a session with the values of their variables.

    Attributes:
        description: the dict of layers.
        epoch: for which the network was built.
        points: the gradients of an update.
        train_fetches, eval_fetches: what RETURNN's engine fetches in a step.
        layers: the layers, each with the names of its variables by their last parts.
        step: the number of training steps done.
        random_of_tensorflow: the types of random operations whose positions TensorFlow keeps.
    """

    def __init__(self, options: GraphOptions, description: dict[str, Any], epoch: int) -> None:
        self.options = options
        self.description = description
        self.epoch = epoch
        self.graph = tf.Graph()
        self.session = v1.Session(graph=self.graph, config=v1.ConfigProto(**options.session))
        self.random = RandomNumbers()
        self.noise = RandomNumbers()
        self._outputs: dict[str, Output] | None = None
        self._assignments: dict[str, tuple[Any, Any]] = {}
        self._learning_rate: float | None = None
        self.step = 0
        with self.graph.as_default(), building(options.texts, description):
            self._build(epoch)
        self._used_keys = [key for key in self.extern_data.data if key in self.network.get_used_data_keys()]

    def _build(self, epoch: int) -> None:
        config = self.options.config
        seed, network_seed = _seeds(config, epoch)
        v1.set_random_seed(seed)
        trains = self.options.trains
        self.train_flag: Any = get_global_train_flag_placeholder() if trains else False
        self.extern_data = ExternData()
        self.extern_data.init_from_config(config=config, auto_create_placeholders=True)
        with self.random.replace():
            self.network = TFNetwork(
                name="",
                config=config,
                extern_data=self.extern_data,
                rnd_seed=network_seed,
                train_flag=self.train_flag,
                eval_flag=self.options.has_scores,
                search_flag=self.options.search,
            )
            self.network.construct_from_dict(self.description)
            if trains and (extra := config.list("search_train_network_layers")):
                self.network.construct_extra_net(
                    self.description,
                    layer_list=extra,
                    search_flag=True,
                    dep_layers_in_extra=True,
                    net_name="search train extra net",
                )
            if trains:
                objective = objective_of(self.network)
                self.objective: Objective = objective.undivided() if self.options.per_rank else objective
        if states := self.graph.get_collection(CollectionKeys.STATE_VARS):
            raise ConfigError.of(
                "unsupported",
                "network: expected layers that begin anew with every batch, got initial_state = 'keep_over_epoch', for which the "
                f"next batch has to go on with the same sequences ({', '.join(state.op.name for state in states)})",
            )
        self.variables = {variable.name.removesuffix(":0"): variable for variable in self.network.get_params_list()}
        names = {id(variable): name for name, variable in self.variables.items()}
        self.layers = [
            (layer, {short: names[id(parameter)] for short, parameter in sorted(layer.params.items())})
            for layer in self.network.get_all_layers_deep()
        ]
        self._changed_by_graph = _assigned_names(self.graph, self.variables.values())
        self.random.initialize(self.session)
        self.network.initialize_params(session=self.session)
        self._trainable: list[Any] = self.network.get_trainable_params()
        self.train_fetches: dict[str, Any] = {}
        self.updater: gradients.FeedableUpdater | None = None
        self.update_op: Any = None
        self.norm: Any = None
        if trains:
            self._build_updater()
        self.random_of_tensorflow = random_of_tensorflow(self.graph) if trains else []
        self.eval_fetches = self._fetches(train=False) if self.options.has_scores else {}
        self._initialize_rest()
        for name, variable in {**self.variables, **self.optimizer_variables}.items():
            place = v1.placeholder(variable.dtype.base_dtype, variable.shape)
            self._assignments[name] = place, variable.assign(place).op
        self.training_names = _score_names(self.train_fetches, self.network)
        self.evaluation_names = _score_names(self.eval_fetches, self.network)

    def _build_updater(self) -> None:
        config = self.options.config
        self.updater = gradients.FeedableUpdater(
            self._make_points, config=config, network=self.network, initial_learning_rate=config.float("learning_rate", 1.0)
        )
        self.train_fetches = self._fetches(train=True)
        if self._trainable:
            self.updater.set_trainable_vars(self._trainable)
            with self.noise.replace():
                self.update_op = self.updater.get_optim_op()
            self.noise.initialize(self.session)
            self.updater.init_optimizer_vars(session=self.session)
        self.train_fetches |= self.updater.optim_meta_losses_dict or {}
        self.norm = self.updater.log_grad_norm_tensor

    @property
    def points(self) -> gradients.GradientPoints:
        points = None if self.updater is None else self.updater.points
        return gradients.GradientPoints() if points is None else points

    @property
    def optimizer_variables(self) -> dict[str, Any]:
        """The optimizers' variables by name: the same on any number of ranks."""
        variables = [] if self.updater is None else self.updater.optimizer_vars
        return {variable.name.removesuffix(":0"): variable for variable in variables if variable is not self.points.helper}

    def kind(self, name: str) -> Role:
        """The kind of one of the model's variables."""
        variable = self.variables[name]
        if any(variable is trained for trained in self._trainable):
            return "parameters"
        if not (variable.dtype.is_floating or variable.dtype.is_complex):
            return "counters"
        return "statistics" if name in self._changed_by_graph else "frozen"

    def _make_points(self, compute: gradients.Compute, variables: list[Any]) -> gradients.GradientPoints:
        options = self.options
        if not options.exchange.is_shared:
            return gradients.points_alone(self.objective, compute, variables)
        return gradients.points_of_ranks(
            self.objective, compute, variables, options.exchange, options.bucket_bytes, options.scaled
        )

    def _fetches(self, train: bool) -> dict[str, Any]:
        fetches: dict[str, Any] = self.network.get_fetches_dict(config=self.options.config, should_train=train, should_eval=True)
        return fetches

    def _initialize_rest(self) -> None:
        """Variables that neither the network nor the optimizers initialize, such as those that accumulate gradients."""
        variables = v1.global_variables() + v1.local_variables()
        missing = set(self.session.run(v1.report_uninitialized_variables(variables)).tolist()) if variables else set()
        chosen = [variable for variable in variables if variable.op.name.encode() in missing]
        self.session.run([variable.initializer for variable in chosen])

    # Steps

    def feed(self, batch: Batch, train: bool, step: int, epoch_step: int, needs_all: bool = True) -> dict[Any, Any]:
        """What a session is fed for a batch. Raises: DataError, if a key is missing that the network uses.

        Args:
            needs_all: whether all keys are needed; otherwise those that are there are fed.
        """
        feed: dict[Any, Any] = {self.train_flag: train} if tf.is_tensor(self.train_flag) else {}
        if isinstance(self.network.epoch_step, tf.Tensor):
            feed[self.network.epoch_step] = epoch_step
        for key in self._used_keys:
            data = self.extern_data.data[key]
            if data.placeholder is None:
                continue
            if key in OF_EVERY_BATCH and key not in batch.data:
                tags = batch.seq_tags() if batch.seq_tags is not None else [""] * len(batch.indices)
                values = tags if key == "seq_tag" else batch.indices
                feed[data.placeholder] = values if batch.joined is None else values[-1:]  # RETURNN names the last piece of a row
                continue
            if key not in batch.data and not needs_all:
                continue
            if key not in batch.data:
                raise DataError(
                    f"network: expected the data key {key!r}, which its layers use, got the keys {', '.join(batch.data)}"
                )
            padded = batch.data[key]
            if not data.have_time_axis() and padded.values.ndim > data.batch_ndim and (padded.seq_lens != 1).any():
                raise DataError(
                    f"extern_data.{key}: expected one value for each sequence, as it has no time axis, got sequences of up to "
                    f"{padded.seq_lens.max()} frames"
                )
            feed[data.placeholder] = _values_of(padded.values, data)
            for axis, place in data.size_placeholder.items():
                if axis == 0:
                    feed[place] = padded.seq_lens
        size = self.extern_data.get_batch_info().dim
        if tf.is_tensor(size):
            feed[size] = len(batch.indices) if batch.joined is None else 1
        return feed

    def missing_keys(self, batch: Batch) -> list[str]:
        """The data keys that the network, its losses and errors use and a batch does not have."""
        return [key for key in self._used_keys if key not in batch.data and key not in OF_EVERY_BATCH]

    def outputs(self, layers: Mapping[str, str | None]) -> dict[str, Output]:
        """Outputs of layers by name. Raises: ConfigError, if there is no such layer.

        Args:
            layers: by the name of the output, the layer's; None: the network's own output layer.
        """
        if self._outputs is None:
            with self.graph.as_default():
                built = {name: self._layer(name, layer) for name, layer in layers.items()}
                self._outputs = {name: output_of(layer) for name, layer in built.items()}
        return self._outputs

    def _layer(self, name: str, wanted: str | None) -> Any:
        layer = self.network.get_default_output_layer() if wanted is None else self.network.layers.get(wanted)
        if layer is None:
            names = ", ".join(sorted(self.network.layers))
            raise ConfigError.of("unknown-value", f"{name}: expected a layer of the network ({names}), got {wanted!r}")
        return layer

    def run(self, fetches: Any, feed: Mapping[Any, Any]) -> Any:
        """The values of tensors of the graph."""
        return self.session.run(fetches, feed)

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        if rate != self._learning_rate and self.updater is not None:
            with self.graph.as_default():
                self.updater.set_learning_rate(rate, session=self.session)
            self._learning_rate = rate

    def set_step(self, step: int) -> None:
        """Set the number of training steps done, which layers, schedules and checkpoints of RETURNN read."""
        if step != self.step:
            with self.graph.as_default():
                self.network.set_global_train_step(step, session=self.session)
            self.step = step

    def update(self, fetches: Mapping[str, Any], feed: Mapping[Any, Any], step: int) -> dict[str, Any]:
        """Update the variables in the step with this number; return the values of some tensors."""
        self.set_step(step)
        fetched: dict[str, Any] = self.session.run({**fetches, "update": self.update_op}, feed)
        self.step = step + 1  # the update counts, too
        return fetched

    def random_positions(self) -> Array:
        """The positions of all random operations."""
        return numpy.concatenate([self.random.positions(self.session), self.noise.positions(self.session)])

    def set_random_positions(self, positions: Array) -> None:
        """Set what `random_positions` returned. Raises: ValueError, if it was of another network."""
        count = len(self.random.states)
        with self.graph.as_default():
            self.random.set_positions(self.session, positions[:count])
            self.noise.set_positions(self.session, positions[count:])

    def load(self, prefix: str) -> None:
        """Load a checkpoint of TensorFlow, as RETURNN does. Raises: tf.errors.OpError."""
        with self.graph.as_default():
            self.network.load_params_from_file(prefix, session=self.session)
            self.step = int(self.network.get_global_train_step(session=self.session))

    def reset_optimizer(self) -> None:
        """Set the optimizers' variables to their initial values."""
        if self.updater is not None and self.update_op is not None:
            with self.graph.as_default():
                self.updater.init_optimizer_vars(session=self.session)

    @cached_property
    def meta(self) -> bytes:
        """The graph in TensorFlow's format, which RETURNN's tools look for in a checkpoint."""
        with self.graph.as_default():
            if self.network.saver is None:
                self.network._create_saver()
            return self.network.saver.export_meta_graph().SerializeToString()  # type: ignore[no-any-return]

    @cached_property
    def gradient_sets(self) -> GradientSets:
        """The gradients for an update that takes several batches."""
        with self.graph.as_default():
            return GradientSets(self.objective, self.points.variables)

    @cached_property
    def whole(self) -> list[Any]:
        """The gradients of the whole objective of a batch, which stay on this rank."""
        with self.graph.as_default():
            return gradients.fetchable(tf.gradients(self.objective.whole, self.points.variables))

    # Variables

    def arrays(self, names: Sequence[str]) -> dict[str, Array]:
        """The values of some of the model's or the optimizers' variables."""
        variables = {**self.variables, **self.optimizer_variables}
        with self.graph.as_default():
            values = self.session.run([variables[name] for name in names])
        return dict(zip(names, values, strict=True))

    def assign(self, arrays: Mapping[str, Array]) -> None:
        """Set variables by name. Raises: KeyError, ValueError, if one does not exist or has another shape."""
        chosen = {name: self._assignments[name] for name in arrays}
        operations = [operation for _, operation in chosen.values()]
        self.session.run(operations, {place: arrays[name] for name, (place, _) in chosen.items()})

    def close(self) -> None:
        """End the session; layers that write files finish them."""
        with self.graph.as_default():
            self.network.call_graph_reset_callbacks()
        self.session.close()


class GradientSets:
    """The gradients of a batch in sets, so that those of several batches can be added up.

    Attributes:
        sets: the gradients of all losses that are not normalized, then those of each normalized one, not divided.
        constraints: the gradients of the constraints; None: there are none, or `sets` includes them.
        counts: of the normalized losses.
    """

    def __init__(self, objective: Objective, variables: Sequence[Any]) -> None:
        def compute(loss: Any) -> list[Any]:
            return list(tf.gradients(loss, variables)) if loss is not None else [None] * len(variables)

        unnormalized = [term.value for term in objective.terms if not term.is_normalized]
        losses = [tf.add_n(unnormalized) if unnormalized else None, *(term.value for term in objective.normalized_terms)]
        self.counts: list[Any] = [term.count for term in objective.normalized_terms]
        computed = [compute(loss) for loss in losses]
        constraints = None if objective.constraints is None else compute(objective.constraints)
        sets = [*computed, *([constraints] if constraints is not None else [])]
        alike = [_alike(variable, column) for variable, column in zip(variables, zip(*sets, strict=True), strict=True)]
        sets = [list(row) for row in zip(*alike, strict=True)]
        self.sets = [gradients.fetchable(row) for row in sets[: len(computed)]]
        self.constraints = gradients.fetchable(sets[-1]) if constraints is not None else None


def _alike(variable: Any, column: Sequence[Any]) -> list[Any]:
    """A variable's gradients of several losses in one form: rows if all are rows, else tensors; zeros for None."""
    present = [gradient for gradient in column if gradient is not None]
    if not present:
        return list(column)
    if all(isinstance(gradient, tf.IndexedSlices) for gradient in present):
        empty = tf.IndexedSlices(
            tf.zeros([0, *variable.shape[1:]], variable.dtype.base_dtype), tf.zeros([0], present[0].indices.dtype)
        )
        return [empty if gradient is None else gradient for gradient in column]
    return [
        tf.zeros(variable.shape, variable.dtype.base_dtype) if gradient is None else tf.convert_to_tensor(gradient)
        for gradient in column
    ]


def _seeds(config: Any, epoch: int) -> tuple[int, int]:
    """The seeds of the graph and of the network's initial values, as RETURNN's engine computes them."""
    if not config.opt_typed_value("random_seed", None):
        return 42, epoch
    network_seed = (epoch * 3 + config.int("random_seed", None) * 5 + 7) % 2**31
    return (network_seed * 2 + 3) % 2**31, network_seed


def _values_of(values: Array, data: Any) -> Any:
    """A padded array in the form of a placeholder of RETURNN."""
    if data.dtype == "string":
        return values.tolist()
    if values.ndim == data.batch_ndim + 1 and not data.have_time_axis():
        values = values[:, 0]  # one value for each sequence, which datasets return as one frame
    if values.ndim == data.batch_ndim + 1 and values.shape[-1] == 1:
        values = values[..., 0]
    if data.batch_dim_axis:
        values = numpy.moveaxis(values, 0, data.batch_dim_axis)
    return values


def _assigned_names(graph: Any, variables: Iterable[Any]) -> set[str]:
    """The names of the variables that a graph's operations change, such as the statistics of a batch normalization."""
    initializers = {variable.initializer for variable in variables}
    changed = set()
    for operation in graph.get_operations():
        if "Assign" not in operation.type or operation in initializers:
            continue
        source = operation.inputs[0].op
        while source.type in ("Switch", "Enter", "Identity", "RefSwitch", "RefEnter"):
            source = source.inputs[0].op
        changed.add(source.name)
    return changed


@dataclass(frozen=True)
class Score:
    """A loss or an error of a network.

    Attributes:
        value, norm: the names of its sum and of its norm factor among what is fetched.
        scale: with which it is minimized; 0: it is not.
    """

    value: str
    norm: str
    scale: float


def _score_names(fetches: Mapping[str, Any], network: Any) -> dict[str, Score]:
    """The scores that are fetched by their names: `score` and `error`, with the layer's name if there are several."""
    scores: dict[str, Score] = {}
    for prefix, name in (("cost:", "score"), ("error:", "error")):
        keys = [key for key in fetches if key.startswith(prefix)]
        for key in keys:
            layer = key.removeprefix(prefix)
            holder = network.losses_dict[layer]
            is_minimized = prefix == "cost:" and holder.get_loss_value_for_objective() is not None
            scale = float(holder.loss.scale) if is_minimized else 0.0
            scores[name if len(keys) == 1 else f"{name}_{layer}"] = Score(key, f"loss_norm_factor:{layer}", scale)
    return scores


def numbers_of(names: Mapping[str, Score], fetched: Mapping[str, Any]) -> Array:
    """The sums of the scores, then their counts; float64 of shape (2 * scores,)."""
    sums = [float(fetched[score.value]) for score in names.values()]
    counts = [1.0 / float(fetched[score.norm]) for score in names.values()]
    return numpy.array(sums + counts, numpy.float64)


@dataclass(frozen=True)
class Output:
    """The output of a layer, batch first.

    Attributes:
        values: shape (batch, time, ...), or (batch, ...) without a time axis; with a beam, (batch * beam, ...).
        sizes: the lengths of the sequences; None: there is no time axis whose length varies.
        beam: the number of hypotheses of a search; None: there is one output for each sequence.
        scores: of the hypotheses, shape (batch, beam).
    """

    values: Any
    sizes: Any
    beam: int | None = None
    scores: Any = None

    @property
    def fetches(self) -> list[Any]:
        return [tensor for tensor in (self.values, self.sizes, self.scores) if tensor is not None]

    def arrays(self, name: str, fetched: Sequence[Array]) -> dict[str, tuple[list[Array], list[int] | None]]:
        """What was fetched, as the outputs of sequences."""
        values, *further = fetched
        sizes = further.pop(0) if self.sizes is not None else None
        if self.beam is None:
            return {name: (list(values), None if sizes is None else sizes.tolist())}
        outputs = {name: (list(values.reshape(-1, self.beam, *values.shape[1:])), None)}
        if sizes is not None:
            outputs[size_name(name, 1)] = list(sizes.reshape(-1, self.beam)), None
        return {**outputs, f"beam_scores_{name}": (list(further[0]), None)}


def output_of(layer: Any) -> Output:
    """The output of a layer of RETURNN. Raises: ConfigError."""
    if not layer.output.have_batch_axis():
        raise ConfigError.of(
            "unsupported",
            "forward_output_layer: expected an output for each sequence, got the layer "
            f"{layer.get_absolute_name()!r}, whose output is the same for all sequences",
        )
    data = layer.output.copy_as_batch_major()
    if data.have_time_axis() and data.time_dim_axis != 1:
        data = data.copy_with_time_dim_axis(1)
    sizes = data.get_sequence_lengths() if data.have_time_axis() and data.is_time_axis_dynamic() else None
    if data.beam is None:
        return Output(data.placeholder, sizes)
    return Output(data.placeholder, sizes, int(data.beam.beam_size), layer.get_search_choices().beam_scores)
