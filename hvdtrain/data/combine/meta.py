"""MetaDataset: the data keys of several datasets of the same sequences, joined by tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy

from hvdtrain.config.keys import REQUIRED, key
from hvdtrain.data.combine.tags import TagIndex
from hvdtrain.data.dataset import Dataset, DatasetKeys
from hvdtrain.data.types import Array, Padded
from hvdtrain.errors import DataError


@dataclass(frozen=True, kw_only=True)
class MetaDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "MetaDataset"`: data keys of several datasets, joined by tag."""

    datasets: dict[str, Any] = key(REQUIRED, "the datasets by name, each a dataset dict or HDF files")
    data_map: dict[str, Any] = key(REQUIRED, "by data key: (name of the dataset, data key there)")
    seq_order_control_dataset: str | None = key(
        None, "the dataset whose sequences, and whose order keys, are used; None: the first one in `datasets`"
    )

    @property
    def control(self) -> str:
        """The name of the dataset that determines which sequences there are."""
        return self.seq_order_control_dataset or next(iter(self.datasets))

    def problems(self) -> list[str]:
        problems = [] if self.datasets else ["datasets: expected at least one dataset, got none"]
        if not self.data_map:
            problems.append("data_map: expected at least one data key, got none")
        names = ", ".join(map(str, self.datasets))
        for data_key, source in self.data_map.items():
            pair = isinstance(source, (tuple, list)) and len(source) == 2 and all(isinstance(part, str) for part in source)
            if not pair:
                problems.append(f"data_map.{data_key}: expected (name of a dataset, data key there), got {source!r}")
            elif source[0] not in self.datasets:
                problems.append(f"data_map.{data_key}: expected a dataset of {names}, got {source[0]!r}")
        if self.seq_order_control_dataset not in (None, *self.datasets):
            problems.append(f"seq_order_control_dataset: expected one of {names}, got {self.seq_order_control_dataset!r}")
        return problems


class MetaDataset(Dataset):
    """Sequence i of the control dataset, with data keys from all datasets.

    Args:
        sources: by data key: the name of a dataset and the data key there.
        positions: by name of a dataset, the index of its sequence that belongs to sequence i; None: i itself.
    """

    def __init__(
        self,
        datasets: Mapping[str, Dataset],
        sources: Mapping[str, tuple[str, str]],
        control: str,
        positions: Mapping[str, Array | None],
    ) -> None:
        self._datasets = datasets
        self._control = datasets[control]
        self._positions = positions
        self._keys: dict[str, dict[str, str]] = {}
        self.streams = {key: datasets[name].streams[there] for key, (name, there) in sources.items()}
        for data_key, (name, there) in sources.items():
            self._keys.setdefault(name, {})[data_key] = there
        self._sources = sources
        self.lengths = self._joined_lengths()
        self.mapped = frozenset(data_key for data_key, (name, there) in sources.items() if there in datasets[name].mapped)
        self.varies = any(dataset.varies for dataset in datasets.values())

    def at_epoch(self, epoch: int) -> MetaDataset:
        changed = copy(self)
        changed._datasets = {name: dataset.at_epoch(epoch) for name, dataset in self._datasets.items()}
        if any(dataset.lengths is not self._datasets[name].lengths for name, dataset in changed._datasets.items()):
            changed.lengths = changed._joined_lengths()
        return changed

    @property
    def num_sequences(self) -> int:
        return self._control.num_sequences

    def file_bounds(self) -> Array:
        return self._control.file_bounds()

    def drawn(self, full_epoch: int) -> Array | None:
        return self._control.drawn(full_epoch)

    def sequence(self, index: int) -> dict[str, Array]:
        result = {}
        for name, keys in self._keys.items():
            places = self._positions[name]
            arrays = self._datasets[name].sequence(index if places is None else int(places[index]))
            result.update({data_key: arrays[there] for data_key, there in keys.items()})
        return {data_key: result[data_key] for data_key in self.streams}

    def sequences(self, indices: Sequence[int]) -> list[dict[str, Array]]:
        """Each dataset reads its data keys of all the sequences at once."""
        result: list[dict[str, Array]] = [{} for _ in indices]
        for name, keys in self._keys.items():
            places = self._positions[name]
            there = indices if places is None else places[numpy.asarray(indices)].tolist()
            for made, arrays in zip(result, self._datasets[name].sequences(there), strict=True):
                made.update({data_key: arrays[source] for data_key, source in keys.items()})
        return [{data_key: made[data_key] for data_key in self.streams} for made in result]

    def padded(self, indices: Array) -> dict[str, Padded]:
        """Each dataset reads its data keys of the batch at once."""
        result = {}
        for name, keys in self._keys.items():
            places = self._positions[name]
            batch = self._datasets[name].padded(indices if places is None else places[indices])
            result.update({data_key: batch[there] for data_key, there in keys.items()})
        return {data_key: result[data_key] for data_key in self.streams}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return self._control.tags(indices)

    def tag_bytes(self, start: int, stop: int) -> Array:
        return self._control.tag_bytes(start, stop)

    def _joined_lengths(self) -> dict[str, Array]:
        """By data key, the lengths in the order of the control dataset."""
        lengths = {}
        for data_key, (name, there) in self._sources.items():
            column, places = self._datasets[name].lengths[there], self._positions[name]
            lengths[data_key] = column if places is None else column[places]
        return lengths

    def close(self) -> None:
        for dataset in self._datasets.values():
            dataset.close()

    def how_read(self) -> str:
        joined = [name for name, places in self._positions.items() if places is not None]
        parts = [f"{name}: {how}" for name, dataset in self._datasets.items() if (how := dataset.how_read())]
        return "; ".join(parts + ([f"{', '.join(joined)} joined by tag"] if joined else []))


def open_meta(where: str, keys: MetaDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Join datasets by tag.

    Args:
        where: the config key of the dataset, for messages.

    Raises:
        DataError: a data key or a tag is missing, or a tag is there twice.
    """
    sources = {data_key: (str(name), str(there)) for data_key, (name, there) in keys.data_map.items()}
    for data_key, (name, there) in sources.items():
        if there not in datasets[name].streams:
            raise DataError(
                f"{where}.data_map.{data_key}: expected a data key of {name} ({', '.join(datasets[name].streams)}), got {there!r}"
            )
    needed = {keys.control, *(name for name, _ in sources.values())}
    used = {name: dataset for name, dataset in datasets.items() if name in needed}
    positions: dict[str, Array | None] = {keys.control: None}
    others = [name for name in used if name != keys.control]
    if others:
        index = TagIndex(f"{where}.datasets.{keys.control}", used[keys.control])
        positions |= {name: index.positions_in(f"{where}.datasets.{name}", used[name]) for name in others}
    for name, dataset in datasets.items():
        if name not in used:
            dataset.close()
    return MetaDataset(used, sources, keys.control, positions)
