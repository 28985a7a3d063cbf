"""A config's train_step and forward_step as TensorFlow graphs that include the exchange of gradients between ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.framework.config import is_op_determinism_enabled

from hvdtrain.context import Loss, RunContext, Running
from hvdtrain.data.types import Batch, Packed
from hvdtrain.errors import ConfigError
from hvdtrain.learner import meter
from hvdtrain.learner.epoch_scores import with_statistics
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.tensorflow import tensors
from hvdtrain.plugins.tensorflow.gradients import (
    Accumulated,
    AccumulatedGradients,
    Exchange,
    Gradient,
    GraphGradients,
    any_gradients,
    combine,
    scalar,
    tensors_in,
)

MIX = ""
"""Among the inputs of a graph, which are by data key: the number of the dataset of each sequence in a mix (`Batch.parts`), or of
each frame of joined pieces."""

Mixed = tuple[tuple[str, ...], bool]
"""The names of the datasets of a mix, and whether the batches that it makes are joined to a row."""


Reduced = tuple[list[Any], tf.Tensor, tf.Tensor]
"""The result of `train` and `send`: reduced gradients; their divisor if a normalized loss is the only loss; and a tensor
of shape (3,): the seconds of waiting for other ranks, and the bytes sent in float32 and in other types."""


class StepGraphs:
    """The graphs of a model's steps, each traced on first use.

    A train_step is traced once for training and once for evaluation, and again only if a data key changes its type or number of
    axes: batches of any length and any number of sequences share a graph. As in Keras, AutoGraph is not applied.

    Args:
        optimizer: the config's, which may scale the loss itself.
        check: has the loss scale.

    Attributes:
        traces: how often train_step was traced.
    """

    def __init__(
        self,
        variables: tensors.ModelVariables,
        train_step: Callable[..., None],
        forward_step: Callable[..., None] | None,
        optimizer: Any,
        gradients: GraphGradients,
        gradient_exchange: GradientExchange,
        check: GradientCheck,
    ) -> None:
        self.traces = 0
        self.optimizer = optimizer
        self._model_variables = variables
        self._variables = [tensors.tensorflow_variable(variable) for variable in variables.of_kind("parameters")]
        self._train_step = train_step
        self._forward_step = forward_step
        self._gradients = gradients
        self._accumulated = AccumulatedGradients(gradients)
        self._gradient_exchange = gradient_exchange
        self._check = check
        self._exchange: Exchange | None = None
        self._steps: dict[Any, tuple[dict[str, float], FlatCall]] = {}
        self._sends: dict[tuple[int, bool], Callable[..., Reduced]] = {}
        self._packed: frozenset[str] = frozenset()  # this and the next describe the batches of the graph that is traced last
        self._mix: Mixed = ((), False)

    # What the learner calls

    @property
    def are_exchanged(self) -> bool:
        """Whether gradients are exchanged for the next update. Graphs include the exchange, so a change traces them again."""
        return self._gradient_exchange.is_active

    @property
    def exchange(self) -> Exchange:
        """The tensors to exchange for an update."""
        if self._exchange is None:
            raise RuntimeError("update() before the first backward()")
        return self._exchange

    def train(self, batch: Batch, epoch: int, step: int, seeds: Any) -> tuple[dict[str, float], tf.Tensor, Reduced]:
        """Collective. Forward, backward, and the exchange of gradients.

        Args:
            seeds: for the model's generators of random numbers; uint32 of shape (generators,).

        Returns:
            The losses' names, each with the scale it is minimized with, or 0; their sums and counts of shape (2 * losses,); and
            the reduced gradients.
        """
        inputs = tf.constant(seeds, tf.uint32), scalar(self._check.factor, tf.float32)
        names, (numbers, reduced) = self._run(batch, self._train, epoch, step, *inputs)
        return names, numbers, reduced

    def collect(
        self, batch: Batch, epoch: int, step: int, seeds: Any, before: Accumulated | None
    ) -> tuple[dict[str, float], tf.Tensor, Accumulated]:
        """Forward and backward of one of several batches of an update. Does not send the gradients yet.

        Args:
            before: the gradients accumulated since the last update.
        """
        inputs = tf.constant(seeds, tf.uint32), scalar(self._check.factor, tf.float32)
        names, (numbers, collected) = self._run(batch, self._collect, epoch, step, *inputs)
        accumulated = collected if before is None else self._accumulated.add(before, collected, self.exchange)
        return names, numbers, accumulated

    def agree(self) -> None:
        """Collective. On a rank without a batch in the first step, learn from the others which tensors to exchange."""
        if self._exchange is None:
            self._exchange = self._gradient_exchange.agree(None)

    def send(self, accumulated: Accumulated | None) -> Reduced:
        """Collective. Reduce the accumulated gradients, or zeros on a rank that had no batch."""
        if accumulated is None:
            self.agree()
            accumulated = self._accumulated.zeros(self.exchange)
        sets = len(accumulated[0])
        kind = sets, self.are_exchanged
        if kind not in self._sends:
            graph = tf.function(self._send, autograph=False)
            self._sends[kind] = FlatCall(graph.get_concrete_function(*self._accumulated.specs(sets, self.exchange)))
        return self._sends[kind](*accumulated)

    def evaluate(self, batch: Batch, epoch: int, step: int) -> tuple[dict[str, float], tf.Tensor]:
        """The losses' names, sums and counts."""
        return self._run(batch, self._evaluate, epoch, step)

    def observe(self, batch: Batch, epoch: int, step: int, seeds: Any) -> None:
        """Run train_step in training mode, for the statistics of BatchNorm layers. The layers' momentum is part of the graph."""
        self._run(batch, self._observe, epoch, step, tf.constant(seeds, tf.uint32))

    def forward(self, batch: Batch, epoch: int, step: int) -> dict[str, tuple[tf.Tensor, tf.Tensor | None]]:
        """The outputs by name: values of shape (batch, ...), and seq_lens of shape (batch,) if they were given."""
        outputs: dict[str, tuple[tf.Tensor, tf.Tensor | None]] = self._run(batch, self._forward, epoch, step)[1]
        return outputs

    def count(self, traffic: tf.Tensor) -> None:
        """Count the seconds and bytes of a `Reduced`. Waits for the device."""
        seconds, float32, others = traffic.numpy().tolist()
        self._gradient_exchange.count_graph(seconds, int(float32), int(others))

    # Tracing

    def _run(
        self, batch: Batch, function: Callable[..., Any], epoch: int, step: int, *more: tf.Tensor
    ) -> tuple[dict[str, float], Any]:
        """The losses that `function` computes for a batch, each with the scale it is minimized with, or 0; and what its graph for
        batches of this kind returns."""
        data = {key: (tensors.tensor_of(padded.values), tf.constant(padded.seq_lens)) for key, padded in batch.data.items()}
        packed = frozenset(key for key, padded in batch.data.items() if isinstance(padded, Packed))
        kinds = tuple(
            (key, values.dtype, tuple(values.shape[1 if key in packed else 2 :]), key in packed)
            for key, (values, _) in data.items()
        )
        mix: Mixed = ((), False)
        if batch.parts is not None:
            numbers = batch.parts.numbers if batch.joined is None else batch.parts.numbers.repeat(batch.joined)
            data[MIX] = tf.constant(numbers, tf.int64)
            mix = batch.parts.names, batch.joined is not None
        arguments = [data, scalar(epoch, tf.int64), tf.constant(step, tf.int64), *more]
        reduced = function == self._train and self.are_exchanged
        kind = function.__name__, reduced, kinds, mix
        if kind not in self._steps:
            names: dict[str, float] = {}
            self._packed = packed
            self._mix = mix
            data_specs: dict[str, Any] = {key: tensors.specs_of(data[key][0], key in packed) for key in batch.data}
            if batch.parts is not None:
                data_specs[MIX] = tf.TensorSpec([None], tf.int64)
            specs = [data_specs, *(tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments[1:])]
            graph = tf.function(lambda *inputs: function(names, *inputs), autograph=False).get_concrete_function(*specs)
            self._steps[kind] = names, FlatCall(graph)
        names, call = self._steps[kind]
        return names, call(*arguments)

    def _scale_loss(self, total: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """The scalar to differentiate: multiplied by the loss scale, and by the optimizer's scale if it has one."""
        scaled = self.optimizer.scale_loss(total)
        return scaled * tf.cast(scale, scaled.dtype)

    def _train(
        self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor, seeds: tf.Tensor, scale: tf.Tensor
    ) -> Any:
        tensors.set_generators(self._model_variables.generators, seeds)
        with tf.GradientTape() as tape:
            losses = self._losses(names, data, epoch, step, train=True)
            normalized = meter.normalized_losses(losses)
            counts, waited = self._exchange_counts(normalized, tf.stop_gradient(tensors.counts_of(losses, normalized.names)))
            divided = () if normalized.is_only_loss else normalized.names
            divisors = {name: tf.maximum(counts[number], meter.TINY) for number, name in enumerate(divided)}
            total = self._scale_loss(tensors.total_of(losses, divisors), scale)
        gradients = tape.gradient(total, self._variables)
        if all(gradient is None for gradient in gradients):
            raise meter.nothing_to_minimize()
        self._agree(Exchange(normalized, self._gradients.rows(gradients)))
        local = self._gradients.local(gradients, self.exchange)
        return tensors.numbers_of(losses), self._reduce(local, counts, waited)

    def _collect(
        self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor, seeds: tf.Tensor, scale: tf.Tensor
    ) -> Any:
        tensors.set_generators(self._model_variables.generators, seeds)
        with tf.GradientTape(persistent=True) as tape:
            losses = self._losses(names, data, epoch, step, train=True)
            normalized = meter.normalized_losses(losses)
            apart = () if normalized.is_only_loss else normalized.names
            totals = [self._scale_loss(total, scale) for total in tensors.totals_of(losses, apart)]
        gradients = [tape.gradient(total, self._variables) for total in totals]
        if all(gradient is None for of_loss in gradients for gradient in of_loss):
            raise meter.nothing_to_minimize()
        self._agree(Exchange(normalized, self._gradients.rows(any_gradients(gradients))))
        local = [self._gradients.local(of_loss, self.exchange) for of_loss in gradients]
        return tensors.numbers_of(losses), (local, tensors.counts_of(losses, normalized.names))

    def _send(self, sets: list[list[Any]], counts: tf.Tensor) -> Reduced:
        counts, waited = self._exchange_counts(self.exchange.losses, counts)
        return self._reduce(combine(sets, counts), counts, waited)

    def _evaluate(self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        return tensors.numbers_of(self._losses(names, data, epoch, step, train=False))

    def _observe(self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor, seeds: tf.Tensor) -> tf.Tensor:
        tensors.set_generators(self._model_variables.generators, seeds)
        return tensors.numbers_of(self._losses(names, data, epoch, step, train=True))

    def _forward(self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        if self._forward_step is None:
            raise ConfigError.of("missing", "forward_step: expected a function in the config, got nothing")
        with Running(RunContext(epoch, step, False)) as context:
            self._forward_step(model=self._model_variables.model, extern_data=self._extern_data(data))
        meter.check_marked_outputs(context.outputs)
        return {name: (tf.convert_to_tensor(output.value), output.seq_lens) for name, output in context.outputs.items()}

    def _losses(self, names: dict[str, float], data: Any, epoch: tf.Tensor, step: tf.Tensor, train: bool) -> dict[str, Loss]:
        """Run the config's train_step."""
        self.traces += 1
        model = self._model_variables.model
        with Running(RunContext(epoch, step, train)) as context:  # epoch and step are tensors of the graph
            self._train_step(model=model, extern_data=self._extern_data(data))
        meter.check_marked_losses(context.losses, lambda value: True)  # any value: TensorFlow converts numbers to tensors
        if more := len(tensors.variables_of(model).by_name) - len(self._model_variables.by_name):
            raise ConfigError.of(
                "wrong-result",
                f"get_model: expected a model that has all of its variables, got {more} more in train_step "
                "(Keras layers get theirs when they are first called: call the model once in get_model)",
            )
        marked = with_statistics(context, lambda rows: tf.cast(rows, tf.float64))
        losses = tensors.with_dataset_losses(marked, data.get(MIX), *self._mix)
        names.update(meter.scales_of(losses, train))
        return losses

    def _extern_data(self, data: Any) -> Any:
        return tensors.extern_data_of({key: of_key for key, of_key in data.items() if key != MIX}, self._packed)

    def _exchange_counts(self, losses: meter.NormalizedLosses, counts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Collective, when the graph runs, unless `_reduce` exchanges them. Their totals, and the seconds of waiting."""
        if losses.names and not losses.is_only_loss:
            return time_exchange(self._gradients.exchange_counts, counts)
        return counts, tf.zeros([], tf.float64)

    def _reduce(self, gradients: list[Gradient], counts: tf.Tensor, waited: tf.Tensor) -> Reduced:
        """Collective, when the graph runs. Reduce gradients, and with them the count of a loss that is the only one."""
        exchange = self.exchange
        count_too = exchange.losses.is_only_loss and bool(exchange.losses.names)

        def reduce(exchanged: tuple[list[Any], tf.Tensor]) -> tuple[list[Any], tf.Tensor]:
            totals = self._gradients.exchange_counts(exchanged[1]) if count_too else exchanged[1]
            return self._gradients.reduce(exchanged[0], exchange), totals

        (reduced, divisor), seconds = time_exchange(reduce, (gradients, counts))
        traffic = tf.concat([[waited + seconds], self._gradients.num_bytes(gradients)], 0)
        return reduced, tf.maximum(divisor, meter.TINY)[0], traffic

    def _agree(self, exchange: Exchange) -> None:
        """Collective in the first step, outside of the traced graph. Check later steps against the first."""
        if self._exchange is None:
            with tf.init_scope():
                self._exchange = self._gradient_exchange.agree(exchange)
        meter.check_same_normalized(self._exchange.losses, exchange.losses, since="training")
        if exchange.rows != self._exchange.rows:
            raise ConfigError.of(
                "wrong-result",
                f"train_step: expected sparse gradients as in the first step, parameters {self._exchange.rows}, got "
                f"{exchange.rows}",
            )


def time_exchange(
    exchange: Callable[[Any], Any], values: Any, computed_with: Callable[[Any], list[Any]] = tensors_in
) -> tuple[Any, tf.Tensor]:
    """The result of `exchange` for a rank's tensors, and its seconds after all of these were computed. Part of a graph.

    With op determinism, a TensorFlow graph has no clock: zero seconds.

    Args:
        computed_with: returns operations or tensors that are computed once given tensors are.
    """
    if is_op_determinism_enabled():
        return exchange(values), tf.zeros([], tf.float64)
    with tf.control_dependencies(computed_with(values)):
        begin = tf.timestamp()
    result = exchange(values)
    with tf.control_dependencies([*computed_with(result), begin]):
        return result, tf.timestamp() - begin


class FlatCall:
    """A concrete function that is called with tensors of its types only, in lists and dicts of always the same form.

    TensorFlow compares each argument with its type twice in every call, which takes as long as a small step. The first call is
    left to it, and shows whether it takes the tensors in the order in which they are flattened: then later ones are passed so.
    """

    def __init__(self, graph: Any) -> None:
        self._graph = graph
        self._is_flat: bool | None = None  # None: there was no call yet

    def __call__(self, *arguments: Any) -> Any:
        if self._is_flat:
            return self._graph._call_flat(tf.nest.flatten(arguments), self._graph.captured_inputs)
        if self._is_flat is None:
            self._is_flat = self._takes_flat(arguments)
        return self._graph(*arguments)

    def _takes_flat(self, arguments: Any) -> bool:
        flat = tf.nest.flatten(arguments)
        try:
            taken = self._graph.function_type.unpack_inputs(self._graph.function_type.bind(*arguments))
        except Exception:  # another version's
            return False
        has_all = len(taken) == len(flat) and all(map(operator.is_, taken, flat))
        return has_all and all(hasattr(self._graph, name) for name in ("_call_flat", "captured_inputs"))
