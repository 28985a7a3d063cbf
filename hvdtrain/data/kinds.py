"""The classes of datasets that a config can name, and where they are implemented."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from hvdtrain.config.absent import absent
from hvdtrain.config.keys import key
from hvdtrain.config.plugins import Registry
from hvdtrain.data.dataset import SequenceSource
from hvdtrain.data.keys import DatasetKeys, FileDatasetKeys
from hvdtrain.data.remote import is_remote
from hvdtrain.errors import ConfigError, Problem

SOURCES: Registry[type] = Registry("sources")
"""Sources whose lengths are not known in advance; the other entries of the dict are their arguments."""


def iterable_source(where: str, iterable: Any) -> SequenceSource:
    """An iterable as a source of sequences. Raises: ConfigError, if the plug-in that reads iterables is missing."""
    if "IterableDataset" not in SOURCES:
        raise ConfigError.of(
            "unknown-value",
            f"{where}: expected data with __len__ and __getitem__, got an iterable{absent('IterableDataset')}",
        )
    source: SequenceSource = SOURCES["IterableDataset"](iterable)
    return source


@dataclass(frozen=True, kw_only=True)
class HDFDatasetKeys(FileDatasetKeys):
    """Keys of a dataset dict with `"class": "HDFDataset"`."""

    opener: ClassVar[str] = "hvdtrain.data.hdf.dataset:open_hdf_dataset"

    allow_external: bool = key(
        False,
        "follow external links, external storage and virtual datasets, by which a file makes the trainer read other files; "
        "such files are not copied to cache_dir",
    )

    def files_to_copy(self) -> tuple[str, ...]:
        # Paths to other files are relative to the file that contains them, so a copy would not find them.
        return () if self.allow_external else self.data_files()

    def problems(self) -> list[Problem]:
        remote = [path for path in self.data_files() if is_remote(path)] if self.allow_external else []
        return super().problems() + [
            Problem.of(
                "conflict", f"allow_external: expected False for remote files, which are copied alone, got True with {path}"
            )
            for path in remote[:1]
        ]


KINDS: Registry[type[DatasetKeys]] = Registry("datasets", {"HDFDataset": HDFDatasetKeys})
"""The keys of each kind of dataset, with its opener, by the name that a dataset dict has as 'class'."""


@dataclass(frozen=True, kw_only=True)
class StepKeys:
    """The base of the keys of every kind of step in the `map_seq` of a MapDataset."""

    opener: ClassVar[str]
    """'module:class' of the step, which gets its keys."""

    @property
    def reads(self) -> list[str]:
        """The names of the datasets in `datasets` of the MapDataset that the step reads."""
        return []

    def problems(self) -> list[Problem]:
        """Conflicts among the keys."""
        return []


STEPS: Registry[type[StepKeys]] = Registry("steps")
"""The keys of each kind of step, by the name that its dict has as 'class'."""


@dataclass(frozen=True)
class Adapter:
    """What makes a dataset's dict of a value of a config that another program, or library, has.

    Attributes:
        adapt: given the config key, the value and the default values of order keys, returns the value that stands for it, which
            is the same if it is of another kind; and the problems with it.
        classes: the values of 'class' that it knows.
    """

    adapt: Callable[[str, Any, Mapping[str, Any]], tuple[Any, list[Problem]]]
    classes: tuple[str, ...] = ()


ADAPTERS: Registry[Adapter] = Registry("adapters")
"""Those of plug-ins."""


def adapted_classes() -> list[str]:
    """The values of 'class' that adapters know, besides those in the tables here."""
    return [name for adapter in ADAPTERS.values() for name in adapter.classes]


def adapted(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[Any, list[Problem]]:
    """A dataset's value in a config as plug-ins understand it; the problems with it."""
    problems = []
    for adapter in ADAPTERS.values():
        value, more = adapter.adapt(name, value, defaults)
        problems += more
    return value, problems
