"""RETURNN's networks for TensorFlow in the table of frameworks."""

from hvdtrain.learner.frameworks import Framework

NETWORKS = Framework(
    "hvdtrain.plugins.returnn.network",
    "returnn.npz",
    ("returnn", "tensorflow", "tensorflow-cpu"),
    has_prepare=True,
    library="tensorflow",
    model_suffix="index",
    model_parts=(r"data-\d{5}-of-\d{5}", "meta", "progress"),
    model_marker="progress",
)
