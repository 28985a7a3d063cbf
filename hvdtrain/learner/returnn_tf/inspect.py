"""The profiler of a network's steps, which is TensorFlow's."""

from hvdtrain.learner.tensorflow.inspect import profiler

__all__ = ["profiler"]
