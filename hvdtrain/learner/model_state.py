"""The roles of a model's tensors, and the view that reducers have of a learner's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, Protocol

from hvdtrain.comm.base import Tensor

Role = Literal["parameters", "frozen", "statistics", "counters"]
"""What a tensor of a model is; these names are also in checkpoints.

- "parameters" are trained. They are averaged over ranks that train alone, and over time (in float32 or wider).
- "frozen" parameters are the same on all ranks from the beginning, and never change.
- "statistics" are the other tensors of numbers that are not whole, such as BatchNorm's running mean. Those that differ between
  ranks are averaged; a mask or a table of sines is the same on all ranks, and so stays as it is to the last bit.
- "counters" are the other tensors of integers. Where they differ, all ranks take those of rank 0.

What a model does not save (a buffer of PyTorch with persistent=False) has no role: each rank has its own, and none is sent.
"""

BUFFERS: tuple[Role, ...] = ("statistics", "counters")

ROLES: tuple[Role, ...] = ("parameters", "frozen", *BUFFERS)

StatePart = Role | Literal["optimizer", "kept"]
"""The parts of the state that can differ between ranks, so that each rank saves its own; "kept", a name in checkpoints, are the
tensors that a reducer keeps (`ModelState.own`)."""


class ModelState(Protocol):
    """The part of a learner's state that a reducer sees.

    Attributes:
        shared: tensors that the reducer keeps, by name, the same on all ranks; stored in the optimizer's file.
        own: tensors that the reducer keeps, by name, different on every rank; stored in the rank's file if there is one, and
            those of rank 0 in the optimizer's file.
    """

    shared: dict[str, list[Tensor]]
    own: dict[str, list[Tensor]]

    def tensors(self, role: Role) -> Mapping[str, Tensor]:
        """The model's present tensors of one role, by name in the model's order; in types that ranks can exchange. They may share
        memory with the model."""
        ...

    def set_tensors(self, role: Role, values: Mapping[str, Tensor]) -> None:
        """Set some tensors of one role, which are of these shapes."""
        ...

    def digests(self, role: Role) -> Sequence[bytes]:
        """Short hashes of the tensors of one role, in the model's order."""
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
