"""The variables of a network and of its optimizers, as checkpoints and other ranks take them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import tensorflow as tf

from hvdtrain.data.types import Array
from hvdtrain.learner.contents import CheckpointContents
from hvdtrain.learner.model_state import Role
from hvdtrain.learner.precision import GradientCheck
from hvdtrain.learner.preload import PreloadRequest, preload_values
from hvdtrain.learner.state_base import StateBase
from hvdtrain.plugins.returnn.network.model_file import StoredNetwork, network_format, read_arrays
from hvdtrain.plugins.returnn.network.networks import Networks
from hvdtrain.plugins.returnn.networks import our_name

RANDOM = "random_positions"
"""An entry of the optimizer's state: the positions of random operations, int64 of shape (operations, 3)."""

STEP = "global_step"
"""The name of RETURNN's variable with the number of training steps."""


class NetworkState(StateBase):
    def __init__(self, networks: Networks, check: GradientCheck | None) -> None:
        super().__init__(network_format(lambda: networks.graph.meta), None, check)
        self._networks = networks

    @property
    def num_pretrain_epochs(self) -> int:  # type: ignore[override]  # it is known once there is a config
        return self._networks.num_pretrain_epochs

    def score_name(self, name: str) -> str:
        return our_name(name)

    def tensors(self, role: Role) -> dict[str, tf.Tensor]:
        graph = self._networks.graph
        names = [name for name in graph.variables if graph.kind(name) == role]
        return {name: tf.constant(array) for name, array in graph.arrays(names).items()}

    def preload(self, request: PreloadRequest) -> tuple[list[str], list[str]]:
        graph = self._networks.graph
        ours = {name: tuple(variable.shape.as_list()) for name, variable in graph.variables.items()}
        values = preload_values(request, ours, read_arrays(request.file))
        graph.assign({name: numpy.asarray(value) for name, value in values.items()})
        return list(ours), list(values)

    def contents(self, progress: Mapping[str, Any], *, model_only: bool = False) -> CheckpointContents:
        _ = self._networks.graph.meta  # here: another thread may write the contents
        return super().contents(progress, model_only=model_only)

    def reset_optimizer(self) -> None:
        super().reset_optimizer()
        self._networks.graph.reset_optimizer()

    def model_tensors(self) -> dict[str, Any]:
        graph = self._networks.graph
        return {**graph.arrays(list(graph.variables)), STEP: numpy.array(graph.step, numpy.int64)}

    def set_model(self, tensors: Mapping[str, Any]) -> None:
        stored: StoredNetwork = tensors["stored"]
        self._networks.load(stored.prefix, stored.epoch)

    def set_tensors(self, role: Role, values: Mapping[str, Any]) -> None:
        self._networks.graph.assign({name: numpy.asarray(value) for name, value in values.items()})

    def _stored(self, tensor: tf.Tensor) -> Array:
        return numpy.asarray(tensor)

    def _optimizer_name(self) -> str:
        updater = self._networks.graph.updater
        return "" if updater is None else " ".join(type(optimizer).__name__ for optimizer in updater.optimizers.values())

    def _optimizer_entries(self) -> dict[str, Any]:
        graph = self._networks.graph
        arrays: dict[str, Array] = graph.arrays(list(graph.optimizer_variables))
        return {"optimizer": {**arrays, RANDOM: graph.random_positions()}}

    def _set_optimizer(self, entries: Mapping[str, Any]) -> list[str]:
        graph = self._networks.graph
        arrays = dict(entries["optimizer"])
        positions = arrays.pop(RANDOM, None)
        ours = set(graph.optimizer_variables)
        if ours != arrays.keys():
            raise ValueError(f"missing {sorted(ours - arrays.keys())}, unknown {sorted(arrays.keys() - ours)}")
        graph.assign(arrays)
        if positions is not None:
            graph.set_random_positions(positions)
        return []
