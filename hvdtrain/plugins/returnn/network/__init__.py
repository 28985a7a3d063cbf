"""RETURNN's TensorFlow networks: configs with `network` or `get_network`."""
