"""Keys that change with the epoch (`keys_of_epoch`, or what a framework's model asks for)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import Section, key
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class PerEpochKeys(Section):
    """Keys that change with the epoch."""

    keys_of_epoch: Callable[..., Any] | str | None = key(
        None,
        "function {signature} that returns a dict of the keys that have another value in this epoch: those of batches, chunks "
        "and accumulation, learning_rate, and train, dev, eval and eval_datasets (docs/training.md)",
        signature="*, epoch, **_",
    )


PLUGIN = Plugin(keys={"keys_of_epoch": PerEpochKeys}, epochs={"keys_of_epoch": f"{__name__}.changing:open_changing"})
