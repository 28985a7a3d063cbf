"""Files on object storage and web servers, which a plug-in reads and writes: `s3://`, `https://`, `hf://` and so on.

A remote file is only ever read to make a local copy of it, which another plug-in does (`Copier`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.absent import absent
from hvdtrain.config.keys import Sections
from hvdtrain.config.plugins import Registry
from hvdtrain.errors import Problem, problem

REMOTE = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://.")

OBJECT_STORAGE = ("s3", "s3a", "hf", "gs", "gcs", "az", "abfs")
"""The schemes of places where a file is stored whole or not at all."""


@dataclass(frozen=True)
class Storage:
    """What can read URLs.

    Attributes:
        problems: those with what reading or writing URLs needs, given the config key.
        look_up: by URL, the files, with their sizes and versions, as the plug-in that copies them takes them. Raises: DataError.
    """

    problems: Callable[[str, Iterable[str]], list[Problem]]
    look_up: Callable[[Iterable[str]], Mapping[str, Any]]


STORAGES: Registry[Storage] = Registry("storages")
"""Those of plug-ins; the last one is used."""


@dataclass(frozen=True)
class Copier:
    """What makes copies of data files on a local disk of every host, from which they are read.

    Attributes:
        problems: those with what copying remote files needs, given the sections of keys, and URLs by the config key of their
            dataset.
        copy: called by all ranks before data is opened, with the settings, the paths or URLs of the files, the communicator, the
            watchdog, and an `ExitStack` that is closed once the copies are not used any more. Returns, by path, that of the copy;
            a file without one is read where it is. Raises: DataError, if a remote one has none.
    """

    problems: Callable[[Sections, Mapping[str, Sequence[str]]], list[Problem]]
    copy: Callable[..., Mapping[str, str]]


COPIERS: Registry[Copier] = Registry("copiers")
"""Those of plug-ins; the last one is used."""


def is_remote(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a URL.

    >>> is_remote("s3://bucket/train.hdf"), is_remote("/data/train.hdf"), is_remote("corpus.py:Corpus")
    (True, False, False)
    """
    return isinstance(path, str) and REMOTE.match(path) is not None


def scheme_of(url: str) -> str:
    """What a URL begins with; empty: it is none."""
    match = REMOTE.match(url)
    return match.group(1).lower() if match else ""


def can_be_mirror(value: str) -> bool:
    """Whether a value is a URL on object storage.

    >>> can_be_mirror("s3://bucket/exp"), can_be_mirror("https://host/exp"), can_be_mirror("exp")
    (True, False, False)
    """
    return scheme_of(value) in OBJECT_STORAGE


def without_query(url: str) -> str:
    """A URL for a log, which should not have a signature."""
    return url.partition("?")[0]


def url_problems(where: str, urls: Iterable[str]) -> list[Problem]:
    """Problems with what reading or writing URLs needs.

    Args:
        where: the config key.
    """
    storage = STORAGES.last
    if storage is not None:
        return storage.problems(where, urls)
    return problem("missing-package", f"{where}: expected a path on a disk, got a URL{absent('fsspec')}")
