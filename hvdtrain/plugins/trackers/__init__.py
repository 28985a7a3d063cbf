"""Experiment trackers: Weights & Biases, MLflow, TensorBoard, Prometheus's files, and classes of the config."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    trackers={"wandb": f"{__name__}.services:Wandb", "mlflow": f"{__name__}.services:MLflow"},
    reporters={"trackers": f"{__name__}.begin:open_trackers"},
    keys={"trackers": f"{__name__}.keys:TrackerKeys"},
)
