"""The modules of RETURNN that a config may import, and what is in each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hvdtrain.config.source import ConfigAccess
from hvdtrain.returnn_layer.missing import not_in_layer

ROOT = "returnn"

_TENSOR = ("Tensor", "Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "returnn": {},
    "returnn.frontend": {"frontend": ()},
    "returnn.frontend.run_ctx": {"run_ctx": ("RunCtx", "get_run_ctx")},
    "returnn.tensor": {"tensors": _TENSOR, "templates": ("TensorDict",)},
    "returnn.tensor.tensor": {"tensors": ("Tensor",)},
    "returnn.tensor.tensor_dict": {"templates": ("TensorDict",)},
    "returnn.tensor.dim": {"tensors": ("Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")},
    "returnn.util": {},
    "returnn.util.basic": {"basic": ()},
    "returnn.forward_iface": {"basic": ("ForwardCallbackIface",)},
    "returnn.log": {"basic": ("log",)},
    "returnn.config": {},
    "returnn.datasets": {},
    "returnn.datasets.hdf": {"hdf": ("SimpleHDFWriter",)},
    "returnn.datasets.util": {},
    "returnn.datasets.util.vocabulary": {"vocabulary": ("Vocabulary",)},
}
"""By RETURNN's module: in which of our files which names are; (): all of its `__all__`."""


class StandIn(ModuleType):
    """A module of RETURNN's name with names of ours."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = [other.rpartition(".")[2] for other in NAMES if other.rpartition(".")[0] == self.__name__]
        raise not_in_layer(f"{self.__name__}.{name}", [*vars(self), *inside])


def stand_in(name: str, config: Callable[[], ConfigAccess]) -> StandIn:
    """The module.

    Args:
        name: one of `NAMES`.
        config: what `returnn.config.get_global_config()` returns.
    """
    module = StandIn(name, f"{name}, as far as hvdtrain has it")
    for file, wanted in NAMES[name].items():
        ours = importlib.import_module(f"hvdtrain.returnn_layer.{file}")
        for own in wanted or ours.__all__:
            setattr(module, own, getattr(ours, own))
    if name == "returnn.config":
        names: Mapping[str, Any] = {"Config": ConfigAccess, "get_global_config": lambda **_: config()}
        vars(module).update(names)
    module.__path__ = []  # it may have modules inside
    return module
