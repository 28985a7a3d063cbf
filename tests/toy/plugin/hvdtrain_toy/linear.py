"""What a config needs no more if it says `linear_inputs`: the model and its training step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def keys_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from the number of inputs."""
    inputs = int(values["linear_inputs"])
    return {"get_model": lambda **_: Linear(inputs), "train_step": train_step, "num_epochs": 7}


class Linear:
    def __init__(self, inputs: int) -> None:
        import numpy

        self.parameters = {"weight": numpy.zeros((inputs, 1), "float32"), "bias": numpy.zeros(1, "float32")}
        self.gradients: dict[str, Any] = {}


def train_step(*, model: Linear, extern_data: Any, **_: Any) -> None:
    import numpy

    import hvdtrain

    data, target = extern_data["data"], extern_data["target"]
    frames = numpy.arange(data.values.shape[1]) < data.seq_lens[:, None]
    inputs, wanted = data.values[frames], target.values[frames]
    error = inputs @ model.parameters["weight"] + model.parameters["bias"] - wanted
    model.gradients = {"weight": 2 * inputs.T @ error, "bias": 2 * error.sum(axis=0)}
    hvdtrain.get_run_ctx().mark_as_loss(error[:, 0] ** 2, "square")
