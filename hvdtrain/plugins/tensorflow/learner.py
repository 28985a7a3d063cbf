"""The learner for TensorFlow, for Keras 3 models and tf.Module: a rank's device and threads, steps, and how it is built."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy
import tensorflow as tf

from hvdtrain.config.references import as_function
from hvdtrain.data.randomness import StepSeeds, mix_seed, noise_seeds
from hvdtrain.data.types import Array, Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.attributes import kinds_of
from hvdtrain.learner.base import Exported, Layer, Learner, Total
from hvdtrain.learner.frameworks import BuildOptions, gpu_of
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.meter import MAX_PENDING, BatchOutputs, Meter, Transfer
from hvdtrain.learner.optimizer import change_gradients
from hvdtrain.learner.precision import Dtype, GradientCheck, LossScale, Precision
from hvdtrain.learner.reducer import GradientExchange
from hvdtrain.plugins.tensorflow import tensors
from hvdtrain.plugins.tensorflow.gradients import Accumulated, GraphGradients, as_array
from hvdtrain.plugins.tensorflow.graph import StepGraphs
from hvdtrain.plugins.tensorflow.inspect import describe_layers, export_model
from hvdtrain.plugins.tensorflow.optimizer import UpdateGraph, make_optimizer
from hvdtrain.plugins.tensorflow.state import TensorFlowState, WeightAverage
from hvdtrain.runtime import log
from hvdtrain.runtime.timer import CpuClock


def prepare(device: str | None, local_rank: int, threads: int) -> None:
    """Restrict this process to its device, and set its number of threads.

    Raises:
        ConfigError: there is no such device, Keras uses another framework, or TensorFlow has already computed something.
    """
    if keras.backend.backend() != "tensorflow":
        backend = keras.backend.backend()
        raise ConfigError.of(
            "conflict", f"backend: expected Keras to compute with TensorFlow, got {backend} (export KERAS_BACKEND=tensorflow)"
        )
    gpus = tf.config.list_physical_devices("GPU")
    number = gpu_of(device, len(gpus), local_rank)
    visible = [] if number is None else [gpus[number]]
    threading = tf.config.threading
    try:
        if tf.config.get_visible_devices("GPU") != visible:
            tf.config.set_visible_devices(visible, "GPU")
        for gpu in visible:
            tf.config.experimental.set_memory_growth(gpu, True)
        if threading.get_intra_op_parallelism_threads() != threads:
            threading.set_intra_op_parallelism_threads(threads)
        if threading.get_inter_op_parallelism_threads() != threads:
            threading.set_inter_op_parallelism_threads(threads)
    except RuntimeError:
        raise ConfigError.of(
            "wrong-call",
            "config: expected TensorFlow not to compute before its threads and devices are set, got a config that "
            "makes tensors while it is read (make them in get_model or train_step)",
        ) from None


def device_name() -> str:
    """The GPU's name, or "CPU"."""
    gpus = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")) if gpus else "CPU"


def peak_memory() -> int | None:
    """The peak use of the GPU's memory so far, in bytes; None on a CPU."""
    return None if device_name() == "CPU" else int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


class TensorFlowMeter(Meter):
    """Reads the pending scores before the clock, as this waits for a GPU, whose steps return before they are finished."""

    def take_step_seconds(self) -> float:
        with self.clock.span():
            self.fetch()
        return self.clock.take()


@contextmanager
def keras_dtype_policy(dtype: Dtype) -> Iterator[None]:
    """Keras layers that are created inside the `with` block compute in a type, with parameters in float32."""
    before = keras.config.dtype_policy()
    if dtype != "float32":  # otherwise the config may have set a policy itself
        keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def loss_scale_of(precision: Precision, variables: tensors.ModelVariables, optimizer: Any) -> LossScale | None:
    """The loss scale for a model of a precision; warns if the precision does not apply to the model."""
    model = variables.model
    layers = [owner for owner in variables.owners.values() if isinstance(owner, keras.layers.Layer)]
    if precision.dtype != "float32" and not layers:
        kind = type(model).__name__
        log.warning(
            f"mixed_precision: applies to Keras layers, of which {kind} has none: it computes in float32 unless it casts itself"
        )
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # the config made it itself
        return None
    policy = getattr(getattr(model, "dtype_policy", None), "name", "")
    return precision.loss_scale("float16" if policy == "mixed_float16" else precision.dtype)


class TensorFlowLearner(Learner):
    """A Keras model or tf.Module, its optimizer and its losses.

    Args:
        graphs: from batches to losses, outputs and reduced gradients.
        update: from reduced gradients to new parameters.
    """

    _may_freeze = False  # the graphs are made for those that are trained in get_model

    def __init__(
        self,
        variables: tensors.ModelVariables,
        graphs: StepGraphs,
        update: UpdateGraph,
        state: TensorFlowState,
        meter: Meter,
        seed: tuple[int, int],
    ) -> None:
        self.model = variables.model
        super().__init__(state, meter, seed)
        self.optimizer = update.optimizer
        counted = [*variables.of_kind("parameters"), *variables.of_kind("frozen")]
        self.num_parameters = sum(int(numpy.prod(variable.shape)) for variable in counted)
        self.device_name = device_name()
        self.variables = variables
        self.graphs = graphs
        self._updater = update
        self._seeds = StepSeeds(len(self.variables.generators), *seed)
        self._reduced: Any = None  # the gradients of the next update
        self._accumulated: Accumulated | None = None  # of the batches since the last update, if more will follow

    def backward(self, batch: Batch | None, completes_update: bool = True) -> None:
        if batch is not None or self._accumulated is not None or self.graphs.are_exchanged:
            with self.meter.clock.span():
                self._add_batch(batch, completes_update)
                if completes_update and self._reduced is None:
                    self._reduced = self.graphs.send(self._accumulated)
                    self._accumulated = None
        self._step += 1

    def _update(self, learning_rate: float) -> None:
        if self._reduced is not None:
            with self.meter.clock.span():
                rank = None if self.graphs.are_exchanged else self._seed[1]  # reduced gradients get the same noise on all ranks
                gradients, divisor, traffic = self._reduced
                if self.observer is not None:
                    self.observer(self._applied_gradients(gradients, divisor))
                seeds = partial(noise_seeds, self._seed[0], rank, self._step - 1)
                self._updater.apply(gradients, divisor, self.graphs.exchange, learning_rate, seeds, self._step - 1)
                self.graphs.count(traffic)
        self._reduced = None

    def evaluate(self, batch: Batch) -> None:
        self.meter.add(*self.graphs.evaluate(batch, self._epoch, self._step), self._step, batch.indices, train=False)

    def try_batch(self, batch: Batch) -> bool:
        try:
            self.graphs.collect(batch, self._epoch, self._step, self._seeds[self._step], None)
        except (tf.errors.ResourceExhaustedError, MemoryError):
            return False
        return True

    def fresh_statistics(self, batches: Iterable[Batch | None], total: Total) -> list[str]:
        kind = keras.layers.BatchNormalization
        norms = {name: layer for name, layer in self.modules() if isinstance(layer, kind) and layer.built}
        variables = [variable for norm in norms.values() for variable in (norm.moving_mean, norm.moving_variance)]
        sums = [numpy.zeros(variable.shape) for variable in variables]
        count = 0
        momenta = [norm.momentum for norm in norms.values()]
        try:
            for norm in norms.values():
                norm.momentum = 0.0  # the statistics become those of the last batch
            for number, batch in enumerate(batches):
                if batch is not None and norms:
                    step = self._step + number
                    self.graphs.observe(batch, self._epoch, step, self._seeds[step])
                    sums = [values + tensors.array_of(variable) for values, variable in zip(sums, variables, strict=True)]
                    count += 1
        finally:
            for norm, momentum in zip(norms.values(), momenta, strict=True):
                norm.momentum = momentum
        if norms:
            *totals, batch_count = total([tf.constant(values, tf.float64) for values in [*sums, [count]]])
            for variable, values in zip(variables, totals, strict=True):
                variable.assign(tf.cast(values / batch_count[0], variable.dtype))
        return list(norms)

    def forward(self, batch: Batch) -> BatchOutputs:
        outputs = self.graphs.forward(batch, self._epoch, self._step)
        arrays = {
            name: (values.numpy(), None if seq_lens is None else seq_lens.numpy().tolist())
            for name, (values, seq_lens) in outputs.items()
        }
        vectors = (
            name
            for name, (values, seq_lens) in outputs.items()
            if seq_lens is None and values.ndim == 2 and values.dtype.is_floating
        )
        return BatchOutputs(arrays, tuple(vectors))

    def modules(self) -> Iterator[tuple[str, Any]]:
        return tensors.layers_of(self.model)

    def kinds_of_modules(self) -> Iterator[tuple[str, str]]:
        return kinds_of(self.modules(), tensors.settings_of_keras)

    def trained_now(self) -> dict[str, str]:
        return {name: str(variable.trainable) for name, variable in self.variables.by_name.items()}

    def layers(self) -> Iterator[Layer]:
        return describe_layers(self.variables)

    def export(self, batch: Batch, folder: Path) -> list[Exported]:
        return export_model(self.variables, lambda: self.evaluate(batch), folder)

    def numbers(self, values: Sequence[float]) -> tf.Tensor:
        return tf.constant(values, tf.float64)

    def _trainable(self) -> Iterable[tuple[str, Any]]:
        return tensors.variables_of(self.model).named_of_kind("parameters")

    def _applied_gradients(self, gradients: list[Any], divisor: tf.Tensor) -> Iterator[tuple[str, Array]]:
        """The reduced gradients as applied, by parameter name. Those sent as rows become dense."""
        losses = self.graphs.exchange.losses
        scale = (self.meter.loss_scale or 1.0) * (float(divisor) if losses.is_only_loss and losses.names else 1.0)
        for (name, variable), gradient in zip(self.variables.named_of_kind("parameters"), gradients, strict=True):
            yield name, as_array(gradient, variable.shape) / scale

    def _add_batch(self, batch: Batch | None, completes_update: bool) -> None:
        """Collective, if an update follows and this batch is its only one."""
        if batch is None:
            self.graphs.agree()
            return
        place = self._epoch, self._step, self._seeds[self._step]
        if completes_update and self._accumulated is None:
            names, numbers, self._reduced = self.graphs.train(batch, *place)
        else:
            names, numbers, self._accumulated = self.graphs.collect(batch, *place, self._accumulated)
        self.meter.add(names, numbers, self._step, batch.indices, train=True)


MAX_SKIPPED = "num_allowed_consec_invalid_gradient_steps"


def build_learner(keys: LearnerKeys, gradient_exchange: GradientExchange, options: BuildOptions) -> TensorFlowLearner:
    """Build a config's model, optimizer and learner, with the same seed on all ranks. The caller broadcasts rank 0's weights.

    Raises:
        ConfigError: get_model returns no Keras model or tf.Module, or one without variables, or the optimizer cannot be made.
    """
    prepare(keys.device, options.local_rank, options.threads)
    if keys.deterministic:
        tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(mix_seed(options.seed, 0, 0))  # of TensorFlow, Python and numpy
    variables = _model(keys, options)
    optimizer = make_optimizer(keys.optimizer, variables)
    scale = loss_scale_of(options.precision, variables, optimizer)
    max_skipped = keys.num_allowed_consec_invalid_gradient_steps
    if max_skipped is not None and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigError.of(
            "conflict",
            f"{MAX_SKIPPED}: expected None with a LossScaleOptimizer, which skips updates itself, got {max_skipped}",
        )
    tf.random.set_seed(mix_seed(options.seed, options.rank, 0))  # for operations of tf.random, which keep their seed when traced
    train_step = as_function(keys.train_step, "train_step")
    forward_step = as_function(keys.forward_step, "forward_step")
    trained = [tensors.tensorflow_variable(variable) for variable in variables.of_kind("parameters")]
    gradients = GraphGradients(trained, gradient_exchange, options.bucket_bytes(device_name() != "CPU"))
    check = GradientCheck(max_skipped, scale, same_on_all_ranks=lambda: gradient_exchange.reaches_all)
    average = None if keys.ema_decay is None else WeightAverage(dict(variables.named_of_kind("parameters")), keys.ema_decay)
    update = UpdateGraph(optimizer, variables, gradients, partial(change_gradients, keys), bool(keys.gradient_noise), check)
    state = TensorFlowState(variables, optimizer, average, check, options.model_format)
    meter = TensorFlowMeter(
        Transfer(_read, max_pending=1 if device_name() == "CPU" else MAX_PENDING),
        state.named_parameters,
        CpuClock(),
        check,
        peak_memory=peak_memory,
        gradient_norm=update.gradient_norm,
    )
    graphs = StepGraphs(variables, train_step, forward_step, optimizer, gradients, gradient_exchange, check)
    options.scoring.prepare(None)
    return TensorFlowLearner(variables, graphs, update, state, meter, (options.seed, options.rank))


def _read(pending: list[tf.Tensor]) -> list[float]:
    """The numbers of several tensors. (To concatenate one takes as long as a small step's forward.)"""
    numbers: list[float] = (pending[0] if len(pending) == 1 else tf.concat(pending, 0)).numpy().tolist()
    return numbers


def _model(keys: LearnerKeys, options: BuildOptions) -> tensors.ModelVariables:
    device = "cuda" if tf.config.get_visible_devices("GPU") else "cpu"
    epoch, step = options.position
    with keras_dtype_policy(options.precision.dtype):
        model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=device)
    if not isinstance(model, (keras.layers.Layer, tf.Module)):
        raise ConfigError.of(
            "wrong-result", f"get_model: expected it to return a Keras model or a tf.Module, got {type(model).__name__}"
        )
    variables = tensors.variables_of(model)
    if not variables.of_kind("parameters"):
        raise ConfigError.of(
            "wrong-result",
            "get_model: expected a model that has trainable variables, got none (Keras layers get theirs when they are first "
            "called: call the model once in get_model)",
        )
    return variables
