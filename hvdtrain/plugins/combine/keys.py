"""The keys of MetaDataset and MapDataset."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import REQUIRED, key, not_negative, positive
from hvdtrain.config.references import is_reference
from hvdtrain.data.combine.step_keys import STEPS, check_steps
from hvdtrain.data.keys import DatasetKeys
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
            pair = isinstance(source, (tuple, list)) and len(source) == 2 and all(isinstance(part, str) for part in source)
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
