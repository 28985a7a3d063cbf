"""RETURNN's datasets as a source of sequences, to convert with hvdtrain dump as they come, or to train on in
RETURNN's order (`plugins/streams/streamed.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource
from hvdtrain.data.formats.found import fingerprint_of
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.returnn.reading import INSTALL, OpenedDataset, Reading, is_installed
from hvdtrain.plugins.streams.streamed import open_streamed

ALWAYS_FROM_THE_BEGINNING = "PostprocessingDataset"
"""It returns any later sequence, but reads those before it to do so."""


class ReturnnDataset(SequenceSource):
    """A dataset that the installed RETURNN opens and reads.

    Args:
        dataset: the dict of a RETURNN config. RETURNN handles its order keys (seq_ordering, partition_epoch, ...) and its files.
        num_workers: the number of processes that read for a training, if RETURNN's dataset can be read from anywhere.

    Raises:
        ConfigError: it is not such a dict.
    """

    def __init__(self, dataset: Mapping[str, Any], num_workers: int = 1) -> None:
        if not isinstance(dataset, Mapping) or "class" not in dataset:
            raise ConfigError.of(
                "wrong-type", f"dataset: expected a dataset dict of RETURNN with 'class', got {dataset!r} in the ReturnnDataset"
            )
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ConfigError.of(
                "out-of-range", f"num_workers: expected a positive integer, got {num_workers!r} in the ReturnnDataset"
            )
        self._options = dataset
        self._num_workers = num_workers
        self._opened: OpenedDataset | None = None
        self._epoch = 1
        self.labels: dict[str, list[str]] = {}
        self.dims: dict[str, int] = {}

    def begin_epoch(self, epoch: int) -> int | None:
        """Open the dataset if necessary, and begin an epoch. Raises: DataError, also if RETURNN is not installed."""
        if self._opened is None:
            self._opened = OpenedDataset(self._options)
        self._epoch = epoch
        self._opened.begin(epoch)
        self.labels, self.dims = self._opened.labels_and_dims()
        return self._opened.num_sequences()

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        """RETURNN reads an epoch from its beginning: the sequences before `start` are read and dropped."""
        opened = self._opened
        if opened is None:
            raise RuntimeError("read before begin_epoch")
        opened.begin(self._epoch)
        for number in count() if stop is None else range(stop):
            item = opened.item(number)
            if item is None:
                return
            if number >= start:
                yield item

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        if not is_installed():
            raise DataError(f"{where}: expected the package returnn for {self._options['class']}, got none {INSTALL}")
        can_skip = not _contains(self._options, ALWAYS_FROM_THE_BEGINNING)
        fingerprint = fingerprint_of(self._options) if scanning.folder is not None else ""
        return open_streamed(Reading(where, self._options, can_skip), fingerprint, scanning, self._num_workers)


def _contains(value: Any, name: str) -> bool:
    if isinstance(value, Mapping):
        return value.get("class") == name or any(_contains(inside, name) for inside in value.values())
    return isinstance(value, (list, tuple)) and any(_contains(inside, name) for inside in value)
