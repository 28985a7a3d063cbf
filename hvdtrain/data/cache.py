"""Sequences that stay in memory once they are read, which a plug-in sees to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hvdtrain.config.plugins import Registry
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.keys import DatasetSpec


class Cache:
    """The memory for the sequences of a dataset, and of those inside it. This one keeps none."""

    def shared_by(self, processes: int) -> Cache:
        """That of each of some processes which are forked later, and read what is inside the dataset."""
        return self

    def keep(self, dataset: Dataset) -> Dataset:
        """A dataset without others inside it, or one around it that keeps what it reads."""
        return dataset

    def lines(self, local_size: int) -> list[str]:
        """How much it may keep, for the log.

        Args:
            local_size: the number of ranks on this host.
        """
        return []

    def summary(self) -> str:
        """The same in a few words; '': it keeps nothing."""
        return ""


NO_CACHE = Cache()

CACHES: Registry[Callable[[Any, Sequence[DatasetSpec], int], Sequence[Cache]]] = Registry("caches")
"""Those of plug-ins; the last one is used. Functions of the settings, of datasets that are opened together, and of the number of
ranks on this host, which return the cache of each dataset."""
