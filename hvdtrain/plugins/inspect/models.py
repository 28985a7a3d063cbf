"""Which code exports a model: ours for PyTorch's, or that of a framework whose learner can do it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hvdtrain.data.types import Batch
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Exported, Learner


@runtime_checkable
class WithExport(Protocol):
    """A learner that writes its model for use without hvdtrain, in every format of its framework."""

    def export(self, batch: Batch, folder: Path) -> list[Exported]: ...


def is_of_torch(model: Any) -> bool:
    """Whether a model is PyTorch's, which need not be imported."""
    return any(kind.__module__.startswith("torch.") for kind in type(model).__mro__)


def export_model(learner: Learner, batch: Batch, folder: Path) -> list[Exported]:
    """Write a learner's model, with the inputs of a batch. Raises: ConfigError, if its framework cannot."""
    if isinstance(learner, WithExport):
        return learner.export(batch, folder)
    if not is_of_torch(learner.model):
        raise ConfigError.of("needs-backend", f"backend: expected one that can export, got a {type(learner.model).__name__}")
    from hvdtrain.plugins.inspect.torch_models import export

    return export(learner, batch, folder)
