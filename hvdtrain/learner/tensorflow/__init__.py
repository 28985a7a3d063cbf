"""The learner for TensorFlow."""
