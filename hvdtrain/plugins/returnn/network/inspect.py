"""The profiler of a network's steps, which is TensorFlow's."""

from hvdtrain.plugins.tensorflow.inspect import profiler

__all__ = ["profiler"]
