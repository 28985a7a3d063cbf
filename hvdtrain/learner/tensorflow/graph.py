"""A config's train_step and the optimizer's update as TensorFlow graphs, the exchange with other ranks inside of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from hvdtrain.context import Loss, RunContext, running
from hvdtrain.data.types import Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.loss_scale import LossScale
from hvdtrain.learner.marked import TINY, check_marked, check_outputs, check_same, minimized, normalized, nothing_to_minimize
from hvdtrain.learner.reduce import Reducer
from hvdtrain.learner.tensorflow.gradients import (
    Exchange,
    Gradient,
    GraphGradients,
    Pending,
    PendingGradients,
    are_finite,
    clipped,
    combined,
    divided,
    for_optimizer,
    noisy,
    of_any_set,
    packed,
    unpacked,
)
from hvdtrain.learner.tensorflow.tensors import count_of, extern_data_of, numbers_of, specs_of, tensor_of, total_of, totals_of
from hvdtrain.learner.tensorflow.variables import Parts, parts_of, set_generators, tensorflow_variable


@dataclass(frozen=True)
class Traced:
    """A graph, and what it returns: numbers of losses by name, with whether each is minimized; or outputs by name.

    Attributes:
        names: True for a loss that is minimized.
    """

    function: Callable[..., Any]
    names: dict[str, bool]


Reduced = Any
"""What `train` hands to `apply`: gradients that have been through the reducer, the count they are to be divided by, and the
seconds spent waiting for other ranks."""


class StepGraphs:
    """The graphs of a model's steps, each traced when it is first needed.

    A train_step is traced once for training and once for evaluation, and again only where a data key comes with another type
    or number of axes: batches of any length and any number of sequences share a graph. AutoGraph is not applied, as in Keras.

    Args:
        noise: the standard deviation of what is added to gradients.
        may_leave_out: do not apply an update of which a gradient is no finite number.
        scale: of the loss; None: it is left as it is.

    Attributes:
        traces: how often train_step was traced.
    """

    def __init__(
        self,
        model: Any,
        train_step: Callable[..., None],
        optimizer: Any,
        reducer: Reducer,
        parts: Parts,
        *,
        clip_global_norm: float | None = None,
        clip_value: float | None = None,
        noise: float = 0.0,
        forward_step: Callable[..., None] | None = None,
        may_leave_out: bool = False,
        scale: LossScale | None = None,
    ) -> None:
        self.traces = 0
        self._forward_step = forward_step
        self._may_leave_out = may_leave_out
        self._scale = scale
        self._model = model
        self._train_step = train_step
        self._optimizer = optimizer
        self._reducer = reducer
        self._parts = parts
        self._clip_global_norm = clip_global_norm
        self._clip_value = clip_value
        self._noise = noise
        self._trained = parts.of_kind("parameters")
        self._variables = [tensorflow_variable(variable) for variable in self._trained]
        self._gradients = GraphGradients(self._variables, reducer)
        self._exchange: Exchange | None = None
        self._steps: dict[Any, Traced] = {}
        self._pending = PendingGradients(self._gradients)
        self._sends: dict[int, Callable[..., Reduced]] = {}
        self._update: Callable[..., tf.Tensor] | None = None

    def train(self, batch: Batch, epoch: int, step: int, seeds: Any) -> tuple[dict[str, bool], tf.Tensor, Reduced]:
        """Collective. Forward, backward, and the exchange of gradients.

        Args:
            seeds: of the model's generators of random numbers; uint32 of shape (generators,).

        Returns:
            The losses' names with whether each is minimized, their sums and counts of shape (2 * losses,), and what `apply`
            takes.
        """
        traced, arguments = self._graph(batch, self._train, epoch, step, tf.constant(seeds, tf.uint32), self._scale_now())
        numbers, reduced = traced.function(*arguments)
        return traced.names, numbers, reduced

    def collect(
        self, batch: Batch, epoch: int, step: int, seeds: Any, pending: Pending | None
    ) -> tuple[dict[str, bool], tf.Tensor, Pending]:
        """Forward and backward of a batch that is one of several for an update; the gradients stay here.

        Args:
            pending: what was collected since the last update.
        """
        traced, arguments = self._graph(batch, self._collect, epoch, step, tf.constant(seeds, tf.uint32), self._scale_now())
        numbers, collected = traced.function(*arguments)
        both = collected if pending is None else self._pending.merged(pending, collected, self._agreed())
        return traced.names, numbers, both

    def agree(self) -> None:
        """Collective, on a rank that has no batch in the first step: be told what there is to exchange."""
        if self._exchange is None:
            self._exchange = self._reducer.agree(None)

    def send(self, pending: Pending | None) -> Reduced:
        """Collective. The exchange of what was collected, or of zeros where nothing was: by a rank without a batch."""
        if pending is None:
            self.agree()
            pending = self._pending.zeros(self._agreed())
        sets = len(pending[0])
        if sets not in self._sends:
            graph = tf.function(self._send, autograph=False)
            self._sends[sets] = graph.get_concrete_function(*self._pending.specs(sets, self._agreed()))
        return self._sends[sets](*pending)

    def evaluate(self, batch: Batch, epoch: int, step: int) -> tuple[dict[str, bool], tf.Tensor]:
        """The losses' names, their sums and counts."""
        traced, arguments = self._graph(batch, self._evaluate, epoch, step)
        return traced.names, traced.function(*arguments)

    def forward(self, batch: Batch, epoch: int, step: int) -> dict[str, tuple[tf.Tensor, tf.Tensor | None]]:
        """The outputs by name, shape (batch, ...), and how much of each row belongs to a sequence, where that was marked."""
        traced, arguments = self._graph(batch, self._forward, epoch, step)
        outputs: dict[str, tuple[tf.Tensor, tf.Tensor | None]] = traced.function(*arguments)
        return outputs

    def apply(self, reduced: Reduced, learning_rate: float, noise_seeds: Any) -> tf.Tensor:
        """Let the optimizer update the parameters.

        Args:
            noise_seeds: of what `noise` adds to the gradients; uint32 of shape (2,).

        Returns:
            For every parameter whether its gradient is finite numbers only; where updates may be left out, this one was
            if one is not. Otherwise it is not looked for, and nothing is returned: shape (0,).
        """
        if self._update is None:
            specs = [self._gradients.specs(self._agreed()), tf.TensorSpec([], tf.float64)]
            specs += [tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.float32), tf.TensorSpec([2], tf.int32)]
            self._update = tf.function(self._apply, autograph=False).get_concrete_function(*specs)
        gradients, divisor, waited = reduced
        rate, seeds = tf.constant(learning_rate, tf.float32), tf.constant(noise_seeds.astype("int32"))
        finite = self._update(gradients, divisor, self._scale_now(), rate, seeds)
        self._reducer.waited(float(waited))
        return finite

    def _graph(
        self, batch: Batch, function: Callable[..., Any], epoch: int, step: int, *more: tf.Tensor
    ) -> tuple[Traced, list[Any]]:
        """The graph that computes `function` for a batch like this one, and its arguments."""
        data = {key: (tensor_of(padded.values), tf.constant(padded.seq_lens)) for key, padded in batch.data.items()}
        arguments = [data, tf.constant(epoch, tf.int64), tf.constant(step, tf.int64), *more]
        kinds = tuple((key, values.dtype, tuple(values.shape[2:])) for key, (values, _) in data.items())
        traced = self._steps.get((function.__name__, kinds))
        if traced is None:
            names: dict[str, bool] = {}
            specs = [{key: specs_of(values) for key, (values, _) in data.items()}]
            specs += [tf.TensorSpec(argument.shape, argument.dtype) for argument in arguments[1:]]
            graph = tf.function(lambda *inputs: function(names, *inputs), autograph=False).get_concrete_function(*specs)
            traced = self._steps[function.__name__, kinds] = Traced(graph, names)
        return traced, arguments

    def _scale_now(self) -> tf.Tensor:
        return tf.constant(1.0 if self._scale is None else self._scale.scale, tf.float32)

    def _scaled(self, total: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
        """What is differentiated; the config's optimizer may have a scale of its own."""
        scaled = self._optimizer.scale_loss(total)
        return scaled * tf.cast(scale, scaled.dtype)

    def _train(
        self, names: dict[str, bool], data: Any, epoch: tf.Tensor, step: tf.Tensor, seeds: tf.Tensor, scale: tf.Tensor
    ) -> Any:
        """What `train` does, while it is traced."""
        set_generators(self._parts.generators, seeds)
        with tf.GradientTape() as tape:
            losses = self._losses(names, data, epoch, step, train=True)
            own = normalized(losses)
            counts = tf.stack([tf.stop_gradient(count_of(losses[name])) for name in own.names] or [tf.constant(0.0, tf.float64)])
            waited = tf.zeros([], tf.float64)
            if own.names and not own.alone:
                counts, waited = _timed(self._gradients.exchange_counts, counts)
            divisors = {} if own.alone else {name: tf.maximum(counts[i], TINY) for i, name in enumerate(own.names)}
            total = self._scaled(total_of(losses, divisors), scale)
        found = tape.gradient(total, self._variables)
        if all(gradient is None for gradient in found):
            raise nothing_to_minimize()
        self._agree(Exchange(own, self._gradients.rows(found)))
        local = self._gradients.local(found, self._agreed())
        return numbers_of(losses), self._reduce(local, counts, waited)

    def _collect(
        self, names: dict[str, bool], data: Any, epoch: tf.Tensor, step: tf.Tensor, seeds: tf.Tensor, scale: tf.Tensor
    ) -> Any:
        """What `collect` does with one batch, while it is traced."""
        set_generators(self._parts.generators, seeds)
        with tf.GradientTape(persistent=True) as tape:
            losses = self._losses(names, data, epoch, step, train=True)
            own = normalized(losses)
            totals = [self._scaled(total, scale) for total in totals_of(losses, () if own.alone else own.names)]
        found = [tape.gradient(total, self._variables) for total in totals]
        if all(gradient is None for of_loss in found for gradient in of_loss):
            raise nothing_to_minimize()
        self._agree(Exchange(own, self._gradients.rows(of_any_set(found))))
        counts = tf.stack([count_of(losses[name]) for name in own.names] or [tf.constant(0.0, tf.float64)])
        return numbers_of(losses), ([packed(self._gradients.local(of_loss, self._agreed())) for of_loss in found], counts)

    def _send(self, sets: list[list[Any]], counts: tf.Tensor) -> Reduced:
        """What `send` does, while it is traced."""
        losses = self._agreed().losses
        waited = tf.zeros([], tf.float64)
        if losses.names and not losses.alone:
            counts, waited = _timed(self._gradients.exchange_counts, counts)
        return self._reduce(combined(sets, counts), counts, waited)

    def _evaluate(self, names: dict[str, bool], data: Any, epoch: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        """What `evaluate` does, while it is traced."""
        return numbers_of(self._losses(names, data, epoch, step, train=False))

    def _forward(self, names: dict[str, bool], data: Any, epoch: tf.Tensor, step: tf.Tensor) -> Any:
        """What `forward` does, while it is traced."""
        if self._forward_step is None:
            raise ConfigError(["forward_step: expected a function in the config, got nothing"])
        with running(RunContext(epoch, step, False)) as context:
            self._forward_step(model=self._model, extern_data=extern_data_of(data))
        check_outputs(context.outputs)
        return {name: (tf.convert_to_tensor(output.value), output.seq_lens) for name, output in context.outputs.items()}

    def _apply(
        self, reduced: list[Any], divisor: tf.Tensor, scale: tf.Tensor, learning_rate: tf.Tensor, noise_seeds: tf.Tensor
    ) -> tf.Tensor:
        """What `apply` does, while it is traced."""
        gradients = unpacked(reduced)
        if self._agreed().losses.alone and self._agreed().losses.names:
            gradients = divided(gradients, divisor)
        if self._scale is not None:
            gradients = divided(gradients, scale)
        finite = are_finite(gradients)
        own = self._optimizer.scale_loss(tf.ones([]))  # where the config's optimizer scales the loss itself
        if self._noise:
            gradients = noisy(gradients, self._noise * own, noise_seeds)
        by_value, global_norm = (None if limit is None else limit * own for limit in (self._clip_value, self._clip_global_norm))
        gradients = clipped(gradients, by_value, global_norm)
        self._optimizer.learning_rate = learning_rate
        updates = for_optimizer(gradients, self._variables)
        if not self._may_leave_out:
            self._optimizer.apply(updates, self._trained)
            return tf.zeros([0], tf.bool)
        tf.cond(tf.reduce_all(finite), lambda: self._update_and_tell(updates), lambda: False)
        return tf.stack(finite)

    def _update_and_tell(self, updates: list[Any]) -> bool:
        """The branch of a graph in which the optimizer updates the parameters."""
        self._optimizer.apply(updates, self._trained)
        return True

    def _losses(self, names: dict[str, bool], data: Any, epoch: tf.Tensor, step: tf.Tensor, train: bool) -> dict[str, Loss]:
        """Run the config's train_step."""
        self.traces += 1
        with running(RunContext(epoch, step, train)) as context:  # numbers of the graph
            self._train_step(model=self._model, extern_data=extern_data_of(data))
        check_marked(context.losses)
        before, after = len(self._parts.variables), len(parts_of(self._model).variables)
        if before != after:
            raise ConfigError(
                [f"get_model: expected a model that has all of its variables, got {after - before} more in train_step "
                 "(Keras layers get theirs when they are first called: call the model once in get_model)"]
            )  # fmt: skip
        names.update({name: train and name in minimized(context.losses) for name in context.losses})
        return context.losses

    def _reduce(self, gradients: list[Gradient], counts: tf.Tensor, waited: tf.Tensor) -> Reduced:
        """Collective, when the graph runs. Where a normalized loss is all there is, its count travels with the gradients."""
        exchange = self._agreed()
        count_too = exchange.losses.alone and bool(exchange.losses.names)

        def reduce(own: tuple[list[Any], tf.Tensor]) -> tuple[list[Any], tf.Tensor]:
            totals = self._gradients.exchange_counts(own[1]) if count_too else own[1]
            return packed(self._gradients.reduce(unpacked(own[0]), exchange)), totals

        (reduced, divisor), seconds = _timed(reduce, (packed(gradients), counts))
        return reduced, tf.maximum(divisor, TINY)[0], waited + seconds

    def _agree(self, own: Exchange) -> None:
        """Collective in the first step, outside of the graph that is being traced."""
        if self._exchange is None:
            with tf.init_scope():
                self._exchange = self._reducer.agree(own)
        check_same(self._exchange.losses, own.losses)
        if own.rows != self._exchange.rows:
            raise ConfigError(
                [f"train_step: expected sparse gradients as in the first step, parameters {self._exchange.rows}, got {own.rows}"]
            )

    def _agreed(self) -> Exchange:
        if self._exchange is None:
            raise RuntimeError("update() before the first backward()")
        return self._exchange


def _timed(exchange: Callable[[Any], Any], own: Any) -> tuple[Any, tf.Tensor]:
    """What `exchange` makes of a rank's own tensors, and the seconds from when all of these are there; part of a graph."""
    with tf.control_dependencies(tf.nest.flatten(own)):
        begin = tf.timestamp()
    result = exchange(own)
    with tf.control_dependencies([*tf.nest.flatten(result), begin]):
        return result, tf.timestamp() - begin
