"""The keys of datasets in tar, parquet and Arrow files."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import product
from typing import Any, ClassVar, Literal

from hvdtrain.config.keys import REQUIRED, key
from hvdtrain.data.keys import FileDatasetKeys
from hvdtrain.errors import Problem, problem

RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")


def expand_ranges(name: str) -> list[str]:
    """The names that a range of numbers in braces stands for, as in the shell.

    >>> expand_ranges("train-{08..10}.tar"), expand_ranges("a.tar")
    (['train-08.tar', 'train-09.tar', 'train-10.tar'], ['a.tar'])
    """
    literal = RANGE.split(name)[::3]
    ranges = [
        [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)] for first, last in RANGE.findall(name)
    ]
    return ["".join(text for pair in zip(literal, (*numbers, ""), strict=True) for text in pair) for numbers in product(*ranges)]


@dataclass(frozen=True, kw_only=True)
class ShardDatasetKeys(FileDatasetKeys):
    """The base of the keys of kinds whose files are shards of one dataset, which may be remote."""

    vocabulary: dict[str, str] = key(
        {},
        "by data key, for texts: a file with one entry per line; the first is class 0, and <unk> stands for everything else",
    )
    units: Literal["characters", "words"] = key(
        "characters", "whether an entry of a vocabulary is a character of a text, or a word between spaces"
    )

    def problems(self) -> list[Problem]:
        empty = [name for name in self._given_files() if not expand_ranges(name)]
        return super().problems() + [
            Problem.of("out-of-range", f"files: expected a range such as {{000..127}}, got an empty one in {name!r}")
            for name in empty
        ]

    def _unknown_keys(self, option: str, all_keys: str) -> list[Problem]:
        """Data keys in an option that are missing in the one that lists all of them, if there is such a list."""
        listed = getattr(self, all_keys)
        return [
            Problem.of("unknown-value", f"{option}: expected data keys of {all_keys} ({', '.join(listed)}), got {name!r}")
            for name in getattr(self, option)
            if listed and name not in listed
        ]

    def data_files(self) -> tuple[str, ...]:
        return tuple(name for pattern in self._given_files() for name in expand_ranges(pattern))

    def _given_files(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else tuple(self.files)


@dataclass(frozen=True, kw_only=True)
class TarDatasetKeys(ShardDatasetKeys):
    """Keys of a dataset dict with `"class": "TarDataset"`: tar files as WebDataset writes them."""

    opener: ClassVar[str] = "hvdtrain.plugins.tables.tar:TarShards"
    scans: ClassVar[bool] = True

    files: str | list[str] = key(
        REQUIRED, "the tar file, or a list of them: paths or URLs, in which {000..127} stands for a range of numbers"
    )
    entries: dict[str, str] = key(
        {},
        "by data key, the suffix of the files that contain it, such as 'npy' or 'left.npy'; by default all suffixes of the first "
        "sample, each as the data key that its first part names",
    )
    decode: dict[str, Any] = key(
        {}, "by data key, a function from the bytes of a file to an array, for formats that hvdtrain does not read"
    )

    def problems(self) -> list[Problem]:
        problems = super().problems()
        for name, function in self.decode.items():
            if not callable(function):
                problems += problem("wrong-type", f"decode.{name}: expected a function, got {function!r}")
        return problems + self._unknown_keys("decode", "entries") + self._unknown_keys("vocabulary", "entries")


@dataclass(frozen=True, kw_only=True)
class ParquetDatasetKeys(ShardDatasetKeys):
    """Keys of a dataset dict with `"class": "ParquetDataset"`: the rows of parquet files."""

    opener: ClassVar[str] = "hvdtrain.plugins.tables.tables:TableShards"

    files: str | list[str] = key(
        REQUIRED, "the parquet file, or a list of them: paths or URLs, in which {000..127} stands for a range of numbers"
    )
    columns: dict[str, str] = key(
        {}, "by data key, the column; by default all columns under their own names, except that of `tag`"
    )
    tag: str | None = key(None, "the column with the names of the sequences; None: row-0, row-1, ...")

    def problems(self) -> list[Problem]:
        return super().problems() + self._unknown_keys("vocabulary", "columns")


@dataclass(frozen=True, kw_only=True)
class ArrowDatasetKeys(ParquetDatasetKeys):
    """Keys of a dataset dict with `"class": "ArrowDataset"`: the rows of Arrow files, which are memory-mapped."""

    files: str | list[str] = key(
        REQUIRED, "the Arrow file (IPC format, file or stream), or a list of them: paths or URLs, with ranges such as {000..127}"
    )
