"""TensorFlow's threads and devices: settled before it computes anything, the exchange with other ranks included."""

from __future__ import annotations

import keras
import tensorflow as tf

from hvdtrain.errors import ConfigError


def prepare_tensorflow(device: str | None, local_rank: int, threads: int) -> None:
    """Let this process see its own device only, and compute with so many threads.

    Raises:
        ConfigError: there is no such device, Keras computes with another framework, or it is too late.
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
                "config: expected TensorFlow not to compute before its threads and devices are settled, got a config that "
                "makes tensors while it is read (make them in get_model or train_step)"
            ]
        ) from None


def device_name() -> str:
    """What the model is on: the GPU's name, or CPU."""
    gpus = tf.config.get_visible_devices("GPU")
    return str(tf.config.experimental.get_device_details(gpus[0]).get("device_name", "GPU")) if gpus else "CPU"


def _visible(wanted: str | None, local_rank: int) -> list[tf.config.PhysicalDevice]:
    """The GPUs this rank may see: its own, or none."""
    gpus = tf.config.list_physical_devices("GPU")
    if wanted == "cpu" or (wanted is None and not gpus):
        return []
    name, _, number = (wanted or "cuda").partition(":")
    if name not in ("cuda", "gpu") or (number and not number.isdigit()):
        raise ConfigError([f"device: expected cpu, cuda or cuda:N, got {wanted!r}"])
    if not gpus or (number and int(number) >= len(gpus)):
        raise ConfigError([f"device: expected a CUDA device for {wanted!r}, got {len(gpus) or 'none'} on this host"])
    return [gpus[int(number) if number else local_rank % len(gpus)]]
