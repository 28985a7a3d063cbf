"""The modules of RETURNN that a config can import, with the names in each."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hvdtrain.config.source import ConfigAccess
from hvdtrain.returnn_layer.missing import not_in_layer

ROOT = "returnn"

_VOCABULARIES = ("Vocabulary", "BytePairEncoding", "CharacterTargets", "Utf8ByteTargets")

_TENSOR = ("Tensor", "Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "returnn": {},
    "returnn.frontend": {"frontend": ()},
    "returnn.frontend.run_ctx": {"run_ctx": ("RunCtx", "get_run_ctx")},
    "returnn.tensor": {"tensors": _TENSOR, "templates": ("TensorDict",)},
    "returnn.tensor.tensor": {"tensors": ("Tensor",)},
    "returnn.tensor.tensor_dict": {"templates": ("TensorDict",)},
    "returnn.tensor.dim": {"tensors": ("Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")},
    "returnn.torch": {},
    "returnn.torch.context": {"run_ctx": ("RunCtx", "get_run_ctx")},
    "returnn.torch.engine": {"run_ctx": ("TrainCtx",), "basic": ("ForwardCallbackIface",)},
    "returnn.util": {},
    "returnn.util.basic": {"basic": ()},
    "returnn.util.file_cache": {"basic": ("CachedFile",)},
    "returnn.forward_iface": {"basic": ("ForwardCallbackIface",)},
    "returnn.log": {"basic": ("log",)},
    "returnn.config": {},
    "returnn.datasets": {},
    "returnn.datasets.hdf": {"hdf": ("SimpleHDFWriter",)},
    "returnn.datasets.generating": {"vocabulary": _VOCABULARIES},
    "returnn.datasets.util": {},
    "returnn.datasets.util.hdf": {"hdf": ("SimpleHDFWriter",)},
    "returnn.datasets.util.vocabulary": {"vocabulary": _VOCABULARIES},
}
"""By module of RETURNN: its names, by the file in this folder that defines them; () stands for the file's `__all__`.

Today's RETURNN does not have `returnn.torch.context` and `TrainCtx` any more, and never had `returnn.datasets.util.hdf`, but
recipes import them.
"""


class StandIn(ModuleType):
    """A module with the name of one of RETURNN's and hvdtrain's implementations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = [other.rpartition(".")[2] for other in NAMES if other.rpartition(".")[0] == self.__name__]
        raise not_in_layer(f"{self.__name__}.{name}", [*vars(self), *inside])


def stand_in(name: str, config: Callable[[], ConfigAccess]) -> StandIn:
    """Create the module.

    Args:
        name: a key of `NAMES`.
        config: returns the result of `returnn.config.get_global_config()`.
    """
    module = StandIn(name, f"The part of {name} that hvdtrain provides.")
    for file, wanted in NAMES[name].items():
        ours = importlib.import_module(f"hvdtrain.returnn_layer.{file}")
        for attribute in wanted or ours.__all__:
            setattr(module, attribute, getattr(ours, attribute))
    if name == "returnn.config":
        names: Mapping[str, Any] = {"Config": ConfigAccess, "get_global_config": lambda **_: config()}
        vars(module).update(names)
    module.__path__ = []  # marks it as a package, which can have submodules
    return module
