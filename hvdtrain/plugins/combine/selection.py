"""Datasets that select some of their sequences for an epoch (`sampling_sizes`), where that would not count."""

from __future__ import annotations

from hvdtrain.data.dataset import Dataset
from hvdtrain.errors import DataError


def refuse_selection(where: str, dataset: Dataset, reason: str) -> None:
    """Raises: DataError, if a dataset selects some of its sequences for an epoch, where that would not count.

    Args:
        where: its config key.
    """
    if dataset.selected(1) is not None:
        raise DataError(f"{where}: expected a dataset without sampling_sizes, got them ({reason})")
