"""A rank's device and threads, its meter, and computing in half precision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.learner.meter import LearnerMeter
from hvdtrain.learner.precision import Dtype, LossScale, Precision
from hvdtrain.learner.tensorflow.variables import ModelVariables
from hvdtrain.runtime.log import say


def prepare(device: str | None, local_rank: int, threads: int) -> None:
    """Let this process use its own device only, and set its number of threads.

    Raises:
        ConfigError: there is no such device, Keras uses another framework, or TensorFlow has already computed something.
    """
    if keras.backend.backend() != "tensorflow":
        other = keras.backend.backend()
        raise ConfigError([f"backend: expected Keras to compute with TensorFlow, got {other} (export KERAS_BACKEND=tensorflow)"])
    visible = _visible(device, local_rank)
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
        raise ConfigError(
            [
                "config: expected TensorFlow not to compute before its threads and devices are set, got a config that "
                "makes tensors while it is read (make them in get_model or train_step)"
            ]
        ) from None


def device_name() -> str:
    """The GPU's name, or "CPU"."""
    gpus = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")) if gpus else "CPU"


def _visible(wanted: str | None, local_rank: int) -> list[tf.config.PhysicalDevice]:
    """The GPUs that this rank may use: its own, or none."""
    gpus = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted is None and not gpus):
        return []
    name, _, number = (wanted or "cuda").partition(":")
    if name not in ("cuda", "gpu") or (number and not number.isdigit()):
        raise ConfigError([f"device: expected cpu, cuda or cuda:N, got {wanted!r}"])
    if not gpus or (number and int(number) >= len(gpus)):
        raise ConfigError([f"device: expected a CUDA device for {wanted!r}, got {len(gpus) or 'none'} on this host"])
    return [gpus[int(number) if number else local_rank % len(gpus)]]


def peak_memory() -> int | None:
    """The largest number of bytes of a GPU's memory in use so far; None on a CPU."""
    return None if device_name() == "CPU" else int(tf.config.experimental.get_memory_info("GPU:0")["peak"])


class TensorFlowMeter(LearnerMeter):
    """Reads the pending scores before it reads the clock: this waits for a GPU, whose steps return before they are done."""

    def take_step_seconds(self) -> float:
        with self.clock.span():
            self.scores.fetch()
        return self.clock.take()


@contextmanager
def layers_in(dtype: Dtype) -> Iterator[None]:
    """Keras layers that are created inside of the `with` block compute in a type, with parameters in float32."""
    before = keras.config.dtype_policy()
    if dtype != "float32":  # otherwise the config may have set a policy itself
        keras.config.set_dtype_policy(f"mixed_{dtype}")
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def scale_of(precision: Precision, variables: ModelVariables, optimizer: Any) -> LossScale | None:
    """The loss scale for a model that was made in a precision; warns if the precision does not apply to the model."""
    model = variables.model
    layers = [owner for owner in variables.owners.values() if isinstance(owner, keras.layers.Layer)]
    if precision.dtype != "float32" and not layers:
        kind = type(model).__name__
        say(2, f"mixed_precision: {kind} has no Keras layers, to which it applies: it computes in float32 unless it casts itself")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # the config made it itself
        return None
    own = getattr(getattr(model, "dtype_policy", None), "name", "")
    return precision.loss_scale("float16" if own == "mixed_float16" else precision.dtype)
