"""An average of checkpoints, with its scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Average:
    """An average that `average_checkpoints` asks for (docs/training.md).

    Attributes:
        name: such as 'best-5'; with `ema_decay`, there is also one called 'trained weights', without the moving average.
        scores: by name, such as 'dev_loss_ce'.
        checkpoint: the file with the model; None: it has none.
    """

    name: str
    scores: Mapping[str, float]
    checkpoint: Path | None
