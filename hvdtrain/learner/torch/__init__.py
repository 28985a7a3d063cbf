"""The learner for PyTorch."""
