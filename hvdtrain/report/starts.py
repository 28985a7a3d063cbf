"""The record of a training's starts (starts.jsonl)."""

from __future__ import annotations

import json
import platform
import shlex
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.version import __version__

PACKAGES = (
    *(name for framework in FRAMEWORKS.values() for name in framework.distributions),
    "horovod",
    "mpi4py",
    "numpy",
    "h5py",
)


@cache
def versions() -> Mapping[str, str]:
    """The versions of Python, hvdtrain and `PACKAGES`, determined without importing them."""
    versions_by_name = {"hvdtrain": __version__, "Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions_by_name[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions_by_name


def command_text(arguments: Sequence[str]) -> str:
    """A command as a user would type it.

    >>> print(command_text(["/lib/hvdtrain/__main__.py", "g2p.py", "++optimizer", "{'class': 'sgd'}"]))
    python -m hvdtrain g2p.py ++optimizer "{'class': 'sgd'}"
    """
    program = "python -m hvdtrain" if arguments[0].endswith("hvdtrain/__main__.py") else shlex.quote(arguments[0])
    words = (f'"{word}"' if "'" in word and not set(word) & set('"$`\\!') else shlex.quote(word) for word in arguments[1:])
    return " ".join([program, *words])


def report_command(folder: Path) -> str:
    """The command that makes a page about the training in a folder, for the program that runs now."""
    program = "hvdtrain" if Path(sys.argv[0]).name == "hvdtrain" else "python -m hvdtrain"
    return f"{program} report {shlex.quote(str(folder))}"


@dataclass(frozen=True)
class Start:
    """One start of a training: a line of starts.jsonl.

    Attributes:
        hosts: (host, device) of every rank.
        settings: (value as text, origin) of every key.
        first_epoch: the epoch that training starts or resumes with.
        texts: the text of each config file, by its path.
        directory: the directory in which the command was given.
        goodput: where the seconds of the training went until this start (`plugins/goodput/`).
        commit: of the repository with the config; empty: there is none.
    """

    hosts: Sequence[tuple[str, str]]
    settings: Mapping[str, tuple[str, str]]
    first_epoch: int
    num_parameters: int
    texts: Mapping[str, str] = field(default_factory=dict)
    directory: str = field(default_factory=lambda: str(Path.cwd()))
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S %z"))
    command: str = field(default_factory=lambda: command_text(sys.argv))
    versions: Mapping[str, str] = field(default_factory=versions)
    goodput: Mapping[str, float] = field(default_factory=dict)
    commit: str = ""


SHOWN_HOSTS = 8
"""The most hosts that a line names."""


def ranks_text(size: int) -> str:
    """How many ranks there are.

    >>> ranks_text(1), ranks_text(2)
    ('1 rank', '2 ranks')
    """
    return f"{size} rank{'s' * (size != 1)}"


def hosts_text(hosts: Iterable[tuple[str, str]]) -> str:
    """The number of ranks on each host.

    Args:
        hosts: (host, device) of every rank.

    >>> hosts_text([("node1", "CPU"), ("node1", "CPU"), ("node2", "CPU")])
    '2 on node1 (CPU), 1 on node2 (CPU)'
    >>> hosts_text([(f"node{rank // 8}", "NVIDIA H100") for rank in range(1024)])[-52:]
    ' 8 on node7 (NVIDIA H100), and 960 on 120 more hosts'
    """
    counts = list(Counter(hosts).items())
    places = [f"{count} on {host} ({device})" for (host, device), count in counts[:SHOWN_HOSTS]]
    more = counts[SHOWN_HOSTS:]
    of_more = f"and {sum(count for _, count in more)} on {len(more)} more host{'s' if len(more) > 1 else ''}"
    return ", ".join([*places, *([of_more] if more else [])])


def append_start(folder: Path, start: Start) -> None:
    """Append a line to the folder's starts.jsonl. Raises: ConfigError, if it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "starts.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(start)) + "\n")
    except OSError as error:
        reason = error.strerror
        raise ConfigError.of("not-writable", f"model: expected a folder that can be written to, got {folder}: {reason}") from None
