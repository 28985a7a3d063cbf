"""The keys of datasets that are made of others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from hvdtrain.config.absent import absent
from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import REQUIRED, key, not_negative, positive
from hvdtrain.config.references import is_reference
from hvdtrain.data.keys import DatasetKeys, FileDatasetKeys
from hvdtrain.data.kinds import STEPS
from hvdtrain.errors import Problem, problem


@dataclass(frozen=True, kw_only=True)
class MetaDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "MetaDataset"`: data keys of several datasets, joined by tag."""

    opener: ClassVar[str] = "hvdtrain.plugins.combine.meta:open_meta"

    datasets: dict[str, Any] = key(REQUIRED, "the datasets by name, each a dataset dict or HDF files")
    data_map: dict[str, Any] = key(REQUIRED, "by data key: (name of the dataset, data key there)")
    seq_order_control_dataset: str | None = key(
        None, "the dataset whose sequences, and whose order keys, are used; None: the first one in `datasets`"
    )

    @property
    def ordered_by(self) -> str:
        """The name of the dataset that determines the sequences."""
        return self.seq_order_control_dataset or next(iter(self.datasets))

    def problems(self) -> list[Problem]:
        problems = [] if self.datasets else problem("missing", "datasets: expected at least one dataset, got none")
        if not self.data_map:
            problems += problem("missing", "data_map: expected at least one data key, got none")
        names = ", ".join(map(str, self.datasets))
        for data_key, source in self.data_map.items():
            pair = isinstance(source, (tuple, list)) and len(source) == 2 and all(isinstance(name, str) for name in source)
            if not pair:
                problems += problem(
                    "wrong-type", f"data_map.{data_key}: expected (name of a dataset, data key there), got {source!r}"
                )
            elif source[0] not in self.datasets:
                problems += problem("unknown-value", f"data_map.{data_key}: expected a dataset of {names}, got {source[0]!r}")
        if self.seq_order_control_dataset not in (None, *self.datasets):
            problems += problem(
                "unknown-value", f"seq_order_control_dataset: expected one of {names}, got {self.seq_order_control_dataset!r}"
            )
        return problems


@dataclass(frozen=True, kw_only=True)
class OutputKeys:
    """An entry of `map_outputs`."""

    dim: int = key(REQUIRED, "features, or classes of sparse data", positive)
    sparse: bool = key(False, "whether a frame is a class index instead of a vector")
    dtype: str | None = key(None, "numpy's name of the type; None: int32 for sparse data, else float32")

    def problems(self) -> list[Problem]:
        import numpy  # not at the top: `--help` imports this file

        try:
            kind = numpy.dtype(self.dtype or "float32").kind
        except TypeError:
            return problem("unknown-value", f"dtype: expected numpy's name of a type, got {self.dtype!r}")
        if self.sparse and self.dtype is not None and kind not in "iu":
            return problem("unknown-value", f"dtype: expected an integer type for sparse data, got {self.dtype!r}")
        return []


@dataclass(frozen=True, kw_only=True)
class MapDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "MapDataset"`: a function applied to every sequence of a dataset."""

    opener: ClassVar[str] = "hvdtrain.plugins.combine.map:open_map"
    scans: ClassVar[bool] = True
    keeps_order: ClassVar[bool] = True

    dataset: Any = key(REQUIRED, "the dataset whose sequences are changed: a dataset dict or HDF files; its order keys apply")
    datasets: dict[str, Any] = key({}, "by name, other datasets that steps of map_seq read, such as noise")
    map_seq: Callable[..., Any] | str | list[Any] = key(
        REQUIRED,
        "function ({data key: array}, *, epoch, index, rng, **_) that returns such a dict; or 'module:name'. The arrays may be "
        "read-only; index is that of the sequence, rng a separate numpy.random.RandomState for every sequence and epoch; only "
        "the arguments that the function accepts are passed. Or a list of such functions and of steps, dicts with a class of "
        + ", ".join(STEPS),
    )
    map_outputs: dict[str, Any] | None = key(
        None, "by data key that map_seq returns: a dict with dim, sparse (default False), dtype; None: the same as before"
    )
    map_lengths: Callable[..., Any] | str | None = key(
        None,
        "function ({data key: lengths of all sequences}, *, epoch, **_) that returns the lengths after map_seq as such a dict; "
        "if it takes the epoch, it is called for each, else once; None: map_seq changes no length",
    )
    map_seed: int = key(0, "seed of the random numbers in rng", not_negative)
    num_workers: int = key(
        0, "worker processes that share the sequences of a batch; 0: none, map_seq runs in the process that reads", not_negative
    )

    def problems(self) -> list[Problem]:
        problems = []
        if isinstance(self.map_seq, list):
            problems += check_steps("map_seq", self.map_seq, self.datasets)[1]
            for name in [name for name in ("map_outputs", "map_lengths") if getattr(self, name) is not None]:
                problems += problem("conflict", f"{name}: expected none with a list of steps, which know it, got it")
        elif self.datasets:
            problems += problem("conflict", "datasets: expected none without a list of steps in map_seq, got some")
        for name, function in (("map_seq", self.map_seq), ("map_lengths", self.map_lengths)):
            if isinstance(function, str) and not is_reference(function):
                problems += problem(
                    "wrong-type", f"{name}: expected a function, 'module:name' or 'file.py:name', got {function!r}"
                )
        for name, entry in (self.map_outputs or {}).items():
            if not isinstance(entry, dict):
                problems += problem("wrong-type", f"map_outputs.{name}: expected a dict with dim, sparse, dtype, got {entry!r}")
                continue
            keys, more = build(OutputKeys, entry, f"map_outputs.{name}.", {})
            problems += more + unknown_options(f"map_outputs.{name}.", entry, OutputKeys, "an entry of map_outputs")
            problems += [problem.within(f"map_outputs.{name}.") for problem in (keys.problems() if keys is not None else [])]
        return problems

    @property
    def ordered_by(self) -> str:
        return "dataset"

    def num_readers(self) -> int:
        return max(1, self.num_workers)


@dataclass(frozen=True, kw_only=True)
class CombinedDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "CombinedDataset"`: the sequences of datasets with different data keys."""

    opener: ClassVar[str] = "hvdtrain.plugins.combine.union:open_combined"
    joins: ClassVar[bool] = True

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

    opener: ClassVar[str] = "hvdtrain.plugins.combine.union:open_concat"
    joins: ClassVar[bool] = True

    datasets: list[Any] = key(REQUIRED, "the datasets, each a dataset dict or HDF files, with the data keys of the first one")

    def problems(self) -> list[Problem]:
        return [] if self.datasets else problem("missing", "datasets: expected at least one dataset, got none")


@dataclass(frozen=True, kw_only=True)
class MixingDatasetKeys(DatasetKeys):
    """Keys of a dataset dict with `"class": "MixingDataset"`: corpora with the same data keys, mixed in given proportions."""

    opener: ClassVar[str] = "hvdtrain.plugins.combine.union:open_mixing"
    joins: ClassVar[bool] = True

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

    opener: ClassVar[str] = "hvdtrain.plugins.combine.files:open_files_dataset"

    files: list[str] = key(REQUIRED, "the HDF files")
    max_open_files: int = key(32, "the number of files that are open at a time", positive)


def check_steps(where: str, steps: list[Any], datasets: dict[str, Any]) -> tuple[list[Any], list[Problem]]:
    """The keys of the steps (or functions) of a `map_seq`, and the problems with them.

    Args:
        where: prefix of the names of keys in messages.
        datasets: the names of the datasets that steps may read.
    """
    checked: list[Any] = []
    problems: list[Problem] = []
    for number, step in enumerate(steps):
        name = f"{where}.{number}"
        if callable(step):
            checked.append(step)
            continue
        kind = step.get("class") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind not in STEPS:
            expected = f"a function, or a dict with a class of {', '.join(STEPS)}"
            problems += problem("unknown-value", f"{name}: expected {expected}, got {step!r}{absent(kind)}")
            continue
        options = {option: value for option, value in step.items() if option != "class"}
        keys, more = build(STEPS[kind], options, f"{name}.", {})
        problems += more + unknown_options(f"{name}.", options, STEPS[kind], kind)
        if keys is None:
            continue
        problems += [problem.within(f"{name}.") for problem in keys.problems()]
        for wanted in keys.reads:
            if wanted not in datasets:
                got = ", ".join(datasets) or "none"
                problems += problem("missing", f"datasets: expected a dataset {wanted!r} for {name}, got {got}")
        checked.append(keys)
    return checked, problems
