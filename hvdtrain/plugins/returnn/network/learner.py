"""The learner for RETURNN's TensorFlow networks: a rank's device and threads, steps, and how it is built.

RETURNN builds the network, its losses and its optimizers; hvdtrain runs the steps. A step is a call of a session: forward,
backward, the exchange of gradients and the update together, unless something has to happen in between.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Exported, Layer, Learner, Total
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.meter import TINY, BatchOutputs, Meter, Transfer
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.returnn.network import gradients as host
from hvdtrain.plugins.returnn.network.graph import GraphOptions, NetworkGraph, Score, numbers_of
from hvdtrain.plugins.returnn.network.native_ops import announce_compiling, choose_device
from hvdtrain.plugins.returnn.network.networks import Networks
from hvdtrain.plugins.returnn.network.random_numbers import position_of
from hvdtrain.plugins.returnn.network.state import NetworkState
from hvdtrain.plugins.returnn.networks import NetworkSource
from hvdtrain.plugins.tensorflow import learner as tensorflow_learner
from hvdtrain.plugins.tensorflow.gradients import as_array
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import CpuClock

v1 = tf.compat.v1


def prepare(device: str | None, local_rank: int, threads: int) -> None:
    """Restrict this process to its device, and set its number of threads. Raises: ConfigError."""
    import returnn.tf.compat  # noqa: F401  turns eager execution off

    if not tf.executing_eagerly():
        v1.reset_default_graph()  # what the config made while it was read
        v1.enable_eager_execution()  # RETURNN's graphs are entered explicitly; parameters travel outside of them
    tensorflow_learner.prepare(device, local_rank, threads)


class NetworkLearner(Learner):
    """A network of RETURNN, its optimizers and its losses."""

    state: NetworkState

    def __init__(
        self,
        networks: Networks,
        exchange: GradientExchange,
        state: NetworkState,
        check: GradientCheck,
        meter: Meter,
        seed: tuple[int, int],
    ) -> None:
        super().__init__(state, meter, seed)
        self.device_name = tensorflow_learner.device_name()
        self._networks = networks
        self._exchange = exchange
        self._check = check
        self._first_step = 0
        self._batch: Batch | None = None  # the last one of the next update
        self._sum: _Sum | None = None  # of the batches before it
        self._norm: float | None = None  # of the newest gradients
        meter.gradient_norm = lambda: self._norm
        self._has_warned = False
        self._layers = layers_of(networks.config)  # by the names of outputs, what `forward` returns; None: the output layer

    @property
    def _graph(self) -> NetworkGraph:
        return self._networks.graph

    @property
    def model(self) -> Any:
        """The TFNetwork."""
        return self._graph.network

    @property
    def optimizer(self) -> Any:
        """RETURNN's updater."""
        return self._graph.updater

    @property
    def num_parameters(self) -> int:  # type: ignore[override]
        return sum(int(numpy.prod(variable.shape.as_list())) for variable in self._graph.variables.values())

    @property
    def _is_exchanged(self) -> bool:
        return self._exchange.is_sent

    def keys_of_epoch(self, epoch: int) -> Mapping[str, Any]:
        """The keys that come with the network of an epoch, which is built."""
        return self._networks.keys(epoch)

    def begin_epoch(self, epoch: int, step: int) -> None:
        self._networks.begin_epoch(epoch)
        super().begin_epoch(epoch, step)
        self._first_step = step
        self._graph.set_step(step)

    def backward(self, batch: Batch | None, completes_update: bool = True) -> None:
        with self.meter.clock.span():
            if batch is not None and self._exchange.size > 1:
                self._graph.random.begin_at(self._graph.session, position_of((*self._seed, self._step)))
            if completes_update and self._sum is None:
                self._batch = batch  # the update computes forward and backward, too: together this is faster
            elif batch is not None:
                self._accumulate(batch)
        self._step += 1

    def _update(self, learning_rate: float) -> None:
        batch = self._batch
        total = self._sum
        graph = self._graph
        self._batch = self._sum = None
        if batch is None and total is None and not self._is_exchanged:
            graph.set_step(self._step)
            return
        with self.meter.clock.span():
            graph.set_learning_rate(learning_rate)
            if self._exchange.size > 1:
                rank = 0 if self._is_exchanged else 1 + self._seed[1]  # reduced gradients get the same noise on all ranks
                graph.noise.begin_at(graph.session, position_of((self._seed[0], rank, self._step, 1)))
            if total is not None:
                self._apply_total(total)
            elif batch is None:
                self._apply(self._local(host.zeros(graph.points.local)) | self._no_counts(), None)
            else:
                self._apply(self._feed(batch, train=True), batch)

    def evaluate(self, batch: Batch) -> None:
        graph = self._graph
        fetched = graph.run(graph.eval_fetches, self._feed(batch, train=False))
        self._add_scores(graph.evaluation_names, fetched, batch, self._step, train=False)

    def try_batch(self, batch: Batch) -> bool:
        graph = self._graph
        try:
            graph.run({**graph.train_fetches, "sets": graph.gradient_sets.sets}, graph.feed(batch, True, self._step, 0))
        except (tf.errors.ResourceExhaustedError, MemoryError):
            return False
        return True

    def fresh_statistics(self, batches: Iterable[Batch | None], total: Total) -> list[str]:
        if not self.state.tensors("statistics"):
            return []
        raise ConfigError.of(
            "unsupported",
            "recompute_statistics: expected a model of PyTorch or Keras, got a network of RETURNN, whose layers update the "
            "statistics of BatchNorm by themselves",
        )

    def forward(self, batch: Batch) -> BatchOutputs:
        graph = self._graph
        outputs = graph.outputs(self._layers)
        feed = graph.feed(batch, False, self._step, 0, needs_all=False)
        scores = {} if self._misses(batch) else graph.eval_fetches
        fetched = graph.run({**scores, "outputs": {name: output.fetches for name, output in outputs.items()}}, feed)
        if scores:
            self._add_scores(graph.evaluation_names, fetched, batch, self._step, train=False)
        rows: dict[str, Any] = {}
        for name, output in outputs.items():
            rows |= output.arrays(name, fetched["outputs"][name])
        vectors = (name for name, output in outputs.items() if output.sizes is None and output.values.dtype.is_floating)
        return BatchOutputs(rows, tuple(vectors))

    def modules(self) -> Iterator[tuple[str, Any]]:
        yield "", self.model
        yield from ((layer.get_absolute_name(), layer) for layer, _ in self._graph.layers)

    def layers(self) -> Iterator[Layer]:
        seen: set[str] = set()
        yield Layer("", "TFNetwork", {}, frozenset())
        for layer, names in self._graph.layers:
            new_names = {short: name for short, name in names.items() if name not in seen}
            seen.update(new_names.values())
            shapes = {short: tuple(self._graph.variables[name].shape.as_list()) for short, name in new_names.items()}
            trained = frozenset(short for short, name in new_names.items() if self._graph.kind(name) == "parameters")
            yield Layer(layer.get_absolute_name(), str(layer.layer_class), shapes, trained)

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        problem = "RETURNN's tools compile its networks: tools/compile_tf_graph.py reads the config and a checkpoint"
        return [Exported("network", problem)]

    def numbers(self, values: Sequence[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    # Steps

    def _feed(self, batch: Batch, train: bool) -> dict[Any, Any]:
        step = self._step - 1 if train else self._step
        return self._graph.feed(batch, train, step, step - self._first_step)

    def _misses(self, batch: Batch) -> bool:
        """Whether data keys are missing without which there are no scores; a warning names them once."""
        missing = self._graph.missing_keys(batch) if self._graph.evaluation_names else []
        if missing and not self._has_warned:
            self._has_warned = True
            log.warning(f"the data has no {', '.join(missing)}: there are no scores (search_do_eval = False: none are wanted)")
        return bool(missing)

    def _no_counts(self) -> dict[Any, Any]:
        counts = self._graph.points.counts
        return {} if counts is None else {counts: numpy.zeros(counts.shape.as_list(), numpy.float64)}

    def _add_scores(
        self, names: Mapping[str, Score], fetched: Mapping[str, Any], batch: Batch, step: int, train: bool = True
    ) -> None:
        scales = {name: score.scale if train else 0.0 for name, score in names.items()}
        self.meter.add(scales, numbers_of(names, fetched), step, batch.indices, train)

    def _apply(self, feed: dict[Any, Any], batch: Batch | None, exchanges_counts: bool = True) -> None:
        """Collective, if gradients are exchanged. One update from a batch, or from gradients that are fed."""
        graph = self._graph
        points = graph.points
        fetches: dict[str, Any] = {} if batch is None else dict(graph.train_fetches)
        is_stopped = self._exchange.is_shared and not self._exchange.is_active  # the ranks do not exchange gradients any more
        if self._is_exchanged:
            fetches["traffic"] = points.traffic
            if exchanges_counts and points.totals is not None:
                fetches |= {"totals": points.totals, "waited": points.waited}
            if points.scale is not None:
                feed = {**feed, points.scale: self._check.factor}
        if is_stopped or self._check.is_needed or self.observer is not None:
            graph.set_step(self._step - 1)
            reduced = graph.whole if is_stopped else host.fetchable(points.reduced)
            fetched = graph.run({**fetches, "reduced": reduced}, feed)
        else:
            fetched = graph.update(fetches | self._norm_fetches, feed, self._step - 1)
        self._count(fetched)
        if batch is not None:
            self._add_scores(graph.training_names, fetched, batch, self._step - 1)
        if "reduced" in fetched:
            self._apply_reduced(fetched["reduced"])

    def _apply_reduced(self, reduced: list[Any]) -> None:
        """Apply gradients that have been reduced, unless one of them is not finite. Raises: TrainingError."""
        graph = self._graph
        names = [variable.name.removesuffix(":0") for variable in graph.points.variables]
        if self.observer is not None:
            self.observer(self._dense(names, reduced))
        if self._check.is_needed:
            invalid = [name for name, gradient in zip(names, reduced, strict=True) if not host.is_finite(gradient)]
            if not self._check.decide(not invalid, self._step - 1, lambda: invalid):
                graph.set_step(self._step)
                return
        self._count(graph.update(self._norm_fetches, host.feed_of(graph.points.reduced, reduced), self._step - 1))

    @property
    def _norm_fetches(self) -> dict[str, Any]:
        return {} if self._graph.norm is None else {"norm": self._graph.norm}

    def _count(self, fetched: Mapping[str, Any]) -> None:
        if "norm" in fetched:
            self._norm = float(fetched["norm"])
        if "traffic" in fetched:
            seconds, float32, other_types = fetched["traffic"].tolist()
            self._exchange.count_graph(seconds + float(fetched.get("waited", 0.0)), int(float32), int(other_types))

    def _dense(self, names: Sequence[str], reduced: Sequence[Any]) -> Iterator[tuple[str, Array]]:
        """Gradients by parameter name; rows become dense."""
        for name, variable, gradient in zip(names, self._graph.points.variables, reduced, strict=True):
            yield name, as_array(gradient, variable.shape.as_list())

    # Updates of several batches

    def _accumulate(self, batch: Batch) -> None:
        graph = self._graph
        sets = graph.gradient_sets
        graph.set_step(self._step)
        fetches = {**graph.train_fetches, "sets": sets.sets, "counts": sets.counts}
        feed = graph.feed(batch, True, self._step, self._step - self._first_step)
        fetched = graph.run(fetches, feed)
        self._add_scores(graph.training_names, fetched, batch, self._step)
        counts = numpy.array(fetched["counts"], numpy.float64)
        self._sum = _Sum(fetched["sets"], counts) if self._sum is None else self._sum.plus(fetched["sets"], counts)

    def _apply_total(self, total: _Sum) -> None:
        """Collective, if gradients are exchanged. The update of several batches."""
        graph = self._graph
        points = graph.points
        constraints = graph.gradient_sets.constraints
        if not self._is_exchanged:
            summed = total.combine(total.counts)
            self._apply_reduced(summed if constraints is None else host.add(summed, graph.run(constraints, {})))
        elif points.totals is None or points.divides_afterwards:
            feed = {} if points.totals is None else {points.counts: total.counts}
            self._apply(feed | self._local(total.combine(numpy.ones_like(total.counts))), None)
        else:
            totals, waited = graph.run([points.totals, points.waited], {points.counts: total.counts})
            self._exchange.count_graph(float(waited), 0, 0)
            self._apply(self._local(total.combine(totals)), None, exchanges_counts=False)

    def _local(self, gradients: list[Any]) -> dict[Any, Any]:
        """What the session is fed for a rank's gradients before the exchange."""
        if self._check.scale is not None:
            gradients = [host.multiply(gradient, self._check.factor) for gradient in gradients]
        return host.feed_of(self._graph.points.local, gradients)


class _Sum:
    """The gradients of several batches in sets, as `GradientSets` has them, and the counts of normalized losses."""

    def __init__(self, sets: list[list[Any]], counts: Array) -> None:
        self.sets = sets
        self.counts = counts

    def plus(self, sets: list[list[Any]], counts: Array) -> _Sum:
        added = [host.add(before, added_set) for before, added_set in zip(self.sets, sets, strict=True)]
        return _Sum(added, self.counts + counts)

    def combine(self, counts: Array) -> list[Any]:
        """All sets together, those of normalized losses divided by these counts."""
        total = self.sets[0]
        for gradients, count in zip(self.sets[1:], counts, strict=True):
            total = host.add(total, host.divide(gradients, max(float(count), TINY)))
        return total


def build_learner(keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> NetworkLearner:
    """Build a config's network, its updater and the learner, with the same seed on all ranks.

    Raises:
        ConfigError: RETURNN cannot build the network.
    """
    prepare(keys.device, options.local_rank, options.threads)
    if keys.deterministic:
        tf.config.experimental.enable_op_determinism()
    if not isinstance(keys.get_model, NetworkSource):
        raise ConfigError.of("missing", "network: expected a network of RETURNN for this backend, got none")
    choose_device()
    announce_compiling()
    scale = options.precision.loss_scale("float32")
    max_skipped = keys.num_allowed_consec_invalid_gradient_steps
    networks = Networks(
        keys.get_model,
        partial(
            GraphOptions,
            texts=keys.get_model.texts,
            exchange=gradient_exchange,
            bucket_bytes=options.bucket_bytes(tensorflow_learner.device_name() != "CPU"),
            per_rank=keys.objective_per_rank,
            scaled=scale is not None,
            trains=keys.get_model.values.get("task") not in ("forward", "search"),
            search=searches(keys.get_model.values),
        ),
        threads=options.threads,
        is_shared=gradient_exchange.is_shared,
    )
    check = GradientCheck(max_skipped, scale, same_on_all_ranks=lambda: gradient_exchange.reaches_all)
    state = NetworkState(networks, check)
    transfer = Transfer(lambda arrays: numpy.concatenate(arrays).tolist())
    meter = Meter(transfer, state.named_parameters, CpuClock(), check, peak_memory=tensorflow_learner.peak_memory)
    return NetworkLearner(networks, gradient_exchange, state, check, meter, (options.seed, options.rank))


def searches(values: Mapping[str, Any]) -> bool:
    """Whether the task of a config searches hypotheses."""
    return values.get("task") == "search" or bool(values.get("task") == "forward" and values.get("forward_use_search"))


def layers_of(config: Any) -> dict[str, str | None]:
    """By the names of outputs, the layers that a config's task forward or search writes."""
    if config.typed_value("task") != "search":
        return {"output": config.typed_value("forward_output_layer")}
    wanted = config.typed_value("search_output_layer") or "output"
    return {name: name for name in ([wanted] if isinstance(wanted, str) else wanted)}
