"""Tensors outside of a network's graph, which are those of TensorFlow."""

from hvdtrain.plugins.tensorflow.tensors import preserve_state, size, wait_for, zeros

__all__ = ["preserve_state", "size", "wait_for", "zeros"]
