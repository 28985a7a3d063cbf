"""Some sequences of any dataset as a batch."""

from __future__ import annotations

from hvdtrain.data.batches import pad
from hvdtrain.data.types import Array, Dataset, Padded


def padded(dataset: Dataset, indices: Array) -> dict[str, Padded]:
    """The batch of some sequences, by the dataset's own way of making one where it has any. Raises: DataError."""
    at_once = getattr(dataset, "padded", None)
    if at_once is not None:
        return at_once(indices)  # type: ignore[no-any-return]  # the contract says so
    sequences = [dataset.sequence(index) for index in indices.tolist()]
    return {key: pad([sequence[key] for sequence in sequences]) for key in dataset.streams}
