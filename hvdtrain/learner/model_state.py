"""What reducers see of a learner's state: a model's tensors by kind, and those that a reducer keeps itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

from hvdtrain.comm.base import Tensor

Kind = Literal["parameters", "frozen", "statistics", "counters"]
"""The tensors of a model: trainable parameters, parameters that are not trained, floating-point buffers such as BatchNorm's
running mean, and integer buffers."""

StatePart = Kind | Literal["optimizer", "kept"]
"""What may differ between ranks, so that each of them has to save its own; "kept" is what a reducer keeps (`ModelState.own`)."""


class ModelState(Protocol):
    """The part of a learner's state that a reducer sees.

    Attributes:
        shared: tensors by name that the reducer keeps, the same on all ranks; the optimizer's file has them.
        own: tensors by name that the reducer keeps, others on every rank; the rank's own file has them, if it has one, and the
            optimizer's file those of rank 0.
    """

    shared: dict[str, list[Tensor]]
    own: dict[str, list[Tensor]]

    def map_tensors(self, kind: Kind, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace the values of the model's tensors of one kind by what `change` returns for them, in the model's order."""
        ...

    def average_weights(self, updates: int) -> None:
        """Let the moving average of the weights (`ema_decay`), if there is one, follow N updates.

        Called when all ranks have the same weights.
        """
        ...
