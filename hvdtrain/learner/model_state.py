"""The view that reducers have of a learner's state: the model's tensors by kind, and the tensors that the reducer keeps."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Literal, Protocol

from hvdtrain.comm.base import Tensor

Kind = Literal["parameters", "frozen", "statistics", "counters"]
"""The kinds of tensors in a model: trained parameters, frozen parameters, floating-point buffers such as BatchNorm's running
mean, and integer buffers."""

StatePart = Kind | Literal["optimizer", "kept"]
"""The parts of the state that can differ between ranks, so that each rank saves its own; "kept" are the tensors that a reducer
keeps (`ModelState.own`)."""


class ModelState(Protocol):
    """The part of a learner's state that a reducer sees.

    Attributes:
        shared: tensors that the reducer keeps, by name, the same on all ranks; stored in the optimizer's file.
        own: tensors that the reducer keeps, by name, different on every rank; stored in the rank's file if there is one, and
            those of rank 0 in the optimizer's file.
    """

    shared: dict[str, list[Tensor]]
    own: dict[str, list[Tensor]]

    def map_tensors(self, kind: Kind, change: Callable[[list[Tensor]], list[Tensor]]) -> None:
        """Replace the values of the model's tensors of one kind by what `change` returns for them, in the model's order."""
        ...

    def frozen_now(self) -> Collection[int]:
        """The numbers of the trained parameters that have been frozen since the training began (`freeze_until_step`). All ranks
        have the same values of these, which an average would round."""
        ...

    def average_weights(self, updates: int) -> None:
        """Update the moving average of the weights (`ema_decay`), if there is one, for N updates.

        Called when all ranks have the same weights.
        """
        ...
