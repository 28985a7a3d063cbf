"""The keys of datasets that are made of other datasets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdtrain.config.keys import REQUIRED, key, positive
from hvdtrain.data.keys import DatasetKeys, FileDatasetKeys
from hvdtrain.errors import Problem, problem


@dataclass(frozen=True, kw_only=True)
class CombinedDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "CombinedDataset"`: the sequences of datasets with different data keys."""

    opener: ClassVar[str] = "hvdtrain.data.combine.union:open_combined"

    datasets: dict[str, Any] = key(REQUIRED, "the datasets by name, each a dataset dict or HDF files")
    sampling_sizes: int | dict[str, int] | None = key(
        None,
        "the number of sequences to take of each dataset in a full epoch instead of all, continuing where the last one "
        "ended; by name, or the same number for all",
        positive,
    )
    data_map: dict[Any, str] = key(
        REQUIRED, "by (name of the dataset, data key there): the data key here; it is empty for sequences of other datasets"
    )

    def problems(self) -> list[Problem]:
        problems = [] if self.datasets else problem("missing", "datasets: expected at least one dataset, got none")
        if not self.data_map:
            problems += problem("missing", "data_map: expected at least one data key, got none")
        names = ", ".join(map(str, self.datasets))
        for source in self.data_map:
            if not (isinstance(source, tuple) and len(source) == 2 and all(isinstance(name, str) for name in source)):
                problems += problem(
                    "wrong-type", f"data_map: expected (name of a dataset, data key there): data key here, got {source!r}"
                )
            elif source[0] not in self.datasets:
                problems += problem("unknown-value", f"data_map: expected a dataset of {names}, got {source[0]!r} in {source!r}")
        pairs = [(source[0], here) for source, here in self.data_map.items() if isinstance(source, tuple) and source]
        for name, here in sorted({pair for pair in pairs if pairs.count(pair) > 1}, key=str):
            problems += problem("duplicate", f"data_map: expected {here!r} once for dataset {name}, got it several times")
        if isinstance(self.sampling_sizes, dict):
            if self.sampling_sizes.keys() != self.datasets.keys():
                problems += problem(
                    "wrong-type", f"sampling_sizes: expected a number for each of {names}, got {self.sampling_sizes}"
                )
            elif any(not isinstance(size, int) or size < 1 for size in self.sampling_sizes.values()):
                problems += problem(
                    "out-of-range", f"sampling_sizes: expected a positive integer for each, got {self.sampling_sizes}"
                )
        mapped = {name for name, _ in pairs}
        for name in self.datasets:
            if pairs and name not in mapped:
                problems += problem("missing", f"data_map: expected a data key of every dataset, got none of {name}")
        return problems


@dataclass(frozen=True, kw_only=True)
class ConcatDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "ConcatDataset"`: corpora with the same data keys, one after the other."""

    opener: ClassVar[str] = "hvdtrain.data.combine.union:open_concat"

    datasets: list[Any] = key(REQUIRED, "the datasets, each a dataset dict or HDF files, with the data keys of the first one")

    def problems(self) -> list[Problem]:
        return [] if self.datasets else problem("missing", "datasets: expected at least one dataset, got none")


@dataclass(frozen=True, kw_only=True)
class MixingDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "MixingDataset"`: corpora with the same data keys, mixed in given proportions."""

    opener: ClassVar[str] = "hvdtrain.data.combine.union:open_mixing"

    datasets: dict[str, Any] = key(
        REQUIRED, "the datasets by name, each a dataset dict or HDF files, with the data keys of the first one"
    )
    weights: dict[str, float] | None = key(
        None, "by name, the share of a dataset in an epoch; only ratios matter; None: in proportion to the sizes of the datasets"
    )
    temperature: float = key(
        1.0, "raise the weights to the power of 1 / temperature: larger numbers make the shares more equal", positive
    )
    by: Literal["sequences", "frames"] = key(
        "sequences", "what the weights are shares of; frames are those of the data key by which sequences are sorted"
    )
    stop: Literal["first", "all"] | int = key(
        "all",
        "the end of an epoch: 'first', when a dataset was used once; 'all', when each was used at least once, so that smaller "
        "ones are repeated; or after this many sequences (or frames)",
        positive,
    )

    def problems(self) -> list[Problem]:
        problems = [] if self.datasets else problem("missing", "datasets: expected at least one dataset, got none")
        for name in self.datasets:
            if not name.isidentifier():
                problems += problem(
                    "wrong-format", f"datasets: expected names of letters, digits and _, as scores get them, got {name!r}"
                )
        if self.weights is not None:
            if self.weights.keys() != self.datasets.keys():
                names = ", ".join(map(str, self.datasets))
                problems += problem("wrong-type", f"weights: expected a number for each of {names}, got {self.weights}")
            elif not all(0 < weight < float("inf") for weight in self.weights.values()):
                problems += problem("out-of-range", f"weights: expected a positive number for each, got {self.weights}")
        return problems


@dataclass(frozen=True, kw_only=True)
class FilesDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "FilesDataset"`: thousands of HDF files, opened when they are needed."""

    opener: ClassVar[str] = "hvdtrain.data.hdf.dataset:open_files_dataset"

    files: list[str] = key(REQUIRED, "the HDF files")
    max_open_files: int = key(32, "the number of files that are open at a time", positive)
