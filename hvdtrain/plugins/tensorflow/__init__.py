"""TensorFlow, with models of Keras: the backend 'tensorflow'."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    backends={"tensorflow": f"{__name__}.backend:TENSORFLOW"},
    templates={"tensorflow": ("PyTorch's default config with TensorFlow and Keras", __name__, "")},
)
