"""What the plan needs to know of a dataset of which an epoch mixes the parts."""

from __future__ import annotations

from typing import Protocol

from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Array


class Mix(Protocol):
    """The parts of a dataset, and how an epoch mixes them: a function of the lengths, the keys and the number of the epoch."""

    @property
    def where(self) -> str:
        """The config key of the dataset, for messages."""
        ...

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts."""
        ...

    @property
    def needs_lengths(self) -> bool:
        """Whether the lengths say which sequences an epoch has, so that they must be the same in every epoch."""
        ...

    def parts_of(self, indices: Array) -> Array:
        """The number of the part of every sequence; int64 of the shape of `indices`."""
        ...

    def text(self) -> str:
        """What determines the epochs, on one line."""
        ...

    def order(self, lengths: Array, keys: OrderKeys, epoch: int, subset: Array) -> Array:
        """The indices of the sequences of an epoch, of those in `subset`, in order; int64. Raises: DataError."""
        ...

    def shares(self, lengths: Array, subset: Array) -> str:
        """What a full epoch takes of every part, for the log. Raises: DataError, if it cannot be mixed."""
        ...
