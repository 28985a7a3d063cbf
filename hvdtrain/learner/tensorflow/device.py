"""A rank's device and threads, its meter, and computing in half precision."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Profiler
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


class _Profiler:
    """TensorFlow's profiler: operations on the CPU, and on a GPU its kernels, too."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory()

    def start(self) -> None:
        tf.profiler.experimental.start(self._folder.name)

    def stop(self, file: Path) -> None:
        tf.profiler.experimental.stop()
        with self._folder as folder, gzip.open(file, "wt", encoding="utf-8") as out:
            found = next(Path(folder).rglob("*.xplane.pb"))
            json.dump({"traceEvents": list(_trace_events(found.read_bytes()))}, out)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return tf.profiler.experimental.Trace(name)  # type: ignore[no-any-return]


def profiler(on_gpu: bool) -> Profiler:
    """TensorFlow's profiler."""
    return _Profiler()


def _trace_events(recorded: bytes) -> Iterator[dict[str, Any]]:
    """The events of Chrome's trace format for what TensorFlow's profiler recorded, in microseconds."""
    from tensorflow.tsl.profiler.protobuf.xplane_pb2 import XSpace

    space = XSpace.FromString(recorded)
    for process, plane in enumerate(space.planes):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": plane.name}}
        for thread, line in enumerate(plane.lines):  # their ids are too large for Perfetto
            place = {"pid": process, "tid": thread}
            yield {"ph": "M", **place, "name": "thread_name", "args": {"name": line.display_name or line.name}}
            for event in line.events:
                began = line.timestamp_ns / 1e3 + event.offset_ps / 1e6
                name = plane.event_metadata[event.metadata_id].name
                yield {"ph": "X", **place, "name": name, "ts": began, "dur": event.duration_ps / 1e6}
