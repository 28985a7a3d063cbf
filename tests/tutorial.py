"""docs/tutorial.md as the tests run it: its files are written, its commands run, and what they print is what the page shows.

    .venv/bin/python tests/tutorial.py          runs everything, and writes the outputs of today into the page; as root

A block of ```python below a comment `file: NAME` is a file. In a block of ```console, lines after `$` are commands, and what
follows is the output of each. Comments in front of a block may say more:

    on: host            run it there, instead of on the laptop; for a block of commands
    varies: PATTERN     a regular expression of what may differ, besides times and measured numbers
    wait: FILE TEXT     not before a file, which may be a pattern of names, has a text
    do: ACTION          something that is no command of the reader, such as the end of a host
"""

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from launching import ROOT, clean_environment

PAGE = ROOT / "docs" / "tutorial.md"
CLUSTER = "\n## A cluster\n"
"""The heading that the commands on a cluster follow."""

BLOCK = re.compile(r"((?:^<!-- \w+: [^\n]* -->\n)*)^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOTE = re.compile(r"^<!-- (\w+): (.*) -->$", re.MULTILINE)

MEASURED = (
    r"^ +[\d.:]+( s)? train, [^|]*\| computing [^|]*",  # with saving, if that takes long, and a rank that computes less
    r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d)?",
    r"\b\d+(\.\d+)? ?(k |M )?(seq|frames|steps|[kKMG]?B)/s",
    r"\b\d+(\.\d+)? ?(s|ms|µs|min|h|%|B|[kKMG]B)(?!\w)",
    r"\b\d+(:\d\d)+\b",
    r"[-+]?\b\d+(\.\d+)?e[-+]?\d+\b",
    r"[-+]?\b\d+\.\d+\b",
    r"Submitted batch job \d+",
    r"(?<=; lost: ).*",
)
"""What differs between runs and hosts: times, sizes, and scores, which depend on the processor."""

SELDOM_PRINTED = re.compile(
    r"^(train: lengths: |train epoch \d+: rank \d+ held the others up).*\n"
    r"|, held up by reading, [^)\n]* each(?=\)$)"
    r"|^.*(btl_tcp_proc|Unable to find reachable pairing).*\n",
    re.MULTILINE,
)
"""What is printed if something takes long, and by Open MPI 5 about the host's network."""


@dataclass(frozen=True)
class Block:
    """A part of the page to run.

    Attributes:
        notes: those of the comments before it, in order.
        kind: 'python' or 'console'.
        place: of its text in the page.
    """

    notes: tuple[tuple[str, str], ...]
    kind: str
    text: str
    place: tuple[int, int]

    def note(self, name: str) -> str | None:
        return dict(self.notes).get(name)

    def commands(self) -> Iterator[tuple[str, str]]:
        """Each command of a console with its output."""
        for part in re.split(r"^\$ ", self.text, flags=re.MULTILINE)[1:]:
            command = re.match(r"(?:.*\\\n)*.*\n", part)
            assert command is not None
            yield command[0].rstrip("\n"), part[command.end() :]


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return [Block(tuple(NOTE.findall(one[1])), one[2], one[3], one.span(3)) for one in BLOCK.finditer(page)]


def normal(text: str, varies: str | None = None) -> str:
    """A text without what differs between runs, and without spaces that align columns."""
    for pattern in (*([varies] if varies else []), *MEASURED):
        text = re.sub(pattern, "#", text, flags=re.MULTILINE)
    return re.sub(r"[ \t]+", " ", text).strip()


Shell = Callable[[str], tuple[int, str]]
"""Runs a command in the tutorial's folder; its status, and what it prints."""


@dataclass
class Tutorial:
    """A run of the page.

    Args:
        folder: in which its files are written.
        laptop: runs the commands.
        host: runs those of the blocks on a host of the cluster.
        actions: what the page's `do` names.
        varies: a regular expression of what may differ in every block.
    """

    folder: Path
    laptop: Shell
    host: Shell | None = None
    actions: Mapping[str, Callable[[], None]] = field(default_factory=dict)
    varies: str | None = None

    def run(self, page: str) -> str:
        """Run a page; it with the outputs of this run."""
        done, end = "", 0
        for block in blocks_of(page):
            for name, value in block.notes:
                if name == "wait":
                    self._wait(*value.split(" ", 1))
                elif name == "do":
                    self.actions[value]()
            done += page[end : block.place[0]]
            end = block.place[1]
            done += self._run(block)
        return done + page[end:]

    def _run(self, block: Block) -> str:
        if block.kind == "python" and (name := block.note("file")):
            (self.folder / name).write_text(block.text)
        if block.kind != "console":
            return block.text
        shell = self.laptop if block.note("on") is None else self.host
        assert shell is not None
        written = ""
        for command, shown in block.commands():
            status, printed = shell(command)
            assert status == 0, f"{command}: status {status}\n{printed}"
            printed = SELDOM_PRINTED.sub("", printed)
            printed = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", printed).replace(str(self.folder), "/home/me/tutorial")
            printed = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "laptop", printed)
            printed = "".join(f"{line.rstrip()}\n" for line in printed.splitlines())
            # Shown as it was if only measurements differ, so that a new page differs from the old one where the program does.
            varies = "|".join(pattern for pattern in (block.note("varies"), self.varies) if pattern) or None
            is_same = normal(printed, varies) == normal(shown, varies)
            written += f"$ {command}\n{shown if is_same else printed}"
        return written

    def _wait(self, name: str, text: str, patience: float = 240) -> None:
        deadline = time.monotonic() + patience
        while not any(text in path.read_text(errors="replace") for path in self.folder.glob(name)):
            assert time.monotonic() < deadline, f"{name}: no {text!r} within {patience:g} s"
            time.sleep(0.1)


def environment_of(folder: Path) -> dict[str, str]:
    """That of the reader: `python` is the tests', and the home is a folder that ends with the tests."""
    (folder.parent / "home").mkdir(exist_ok=True)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return clean_environment() | {
        "PATH": path,
        "HOME": str(folder.parent / "home"),
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
        "COLUMNS": "100",
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
    }


def laptop(folder: Path) -> Shell:
    """Runs commands as the reader does on a laptop."""

    def run(command: str) -> tuple[int, str]:
        finished = subprocess.run(
            ["bash", "-c", f"{{ {command}\n}} 2>&1"],
            cwd=folder,
            env=environment_of(folder),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        return finished.returncode, finished.stdout

    return run


@contextmanager
def on_cluster(folder: Path, hosts: object) -> Iterator[Tutorial]:
    """A run with three hosts and Slurm (`cluster.hosts.Hosts`), of which one can be lost."""
    from cluster.hosts import Hosts
    from cluster.slurm import wait_until_idle
    from cluster.test_elastic import SECONDS_TO_ASK, end_host

    assert isinstance(hosts, Hosts)
    lost: list[str] = []

    def host(command: str) -> tuple[int, str]:
        mine = {name: value for name, value in environment_of(folder).items() if name in ("HOME", "COLUMNS", "NO_COLOR")}
        finished = hosts.run(["bash", "-c", f"{{ {command}\n}} 2>&1"], environment=mine, folder=folder, timeout=300)
        return finished.status, finished.out

    def lose() -> None:
        time.sleep(SECONDS_TO_ASK)
        end_host(hosts, "host2")
        lost.append("host2")

    def wait_for_end() -> None:
        deadline = time.monotonic() + 400
        while hosts.run(["squeue", "--noheader"]).out:
            assert time.monotonic() < deadline, "the job does not end"
            time.sleep(0.2)

    try:
        yield Tutorial(folder, laptop(folder), host, {"lose host2": lose, "wait for the job": wait_for_end})
    finally:
        hosts.run(["scancel", "--user=root"])
        for name in lost:
            hosts.daemon(["slurmd"], host=name)
        wait_until_idle(hosts, patience=120)


def main() -> None:
    """Write the page with the outputs of today."""
    from cluster.hosts import Hosts
    from cluster.slurm import start_slurm

    with tempfile.TemporaryDirectory(prefix="tutorial-") as place, tempfile.TemporaryDirectory(prefix="hosts-") as keys:
        folder = Path(place) / "tutorial"
        folder.mkdir()
        with Hosts(Path(keys), 3) as hosts:
            start_slurm(hosts)
            with on_cluster(folder, hosts) as tutorial:
                PAGE.write_text(tutorial.run(PAGE.read_text()))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
