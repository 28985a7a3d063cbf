"""tools/hdf_dump.py under mpirun writes the file that one process writes, and ends on all ranks when one fails."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy
import pytest
from launching import ROOT, Finished, launch

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

CORPUS = """
import os, sys, time
from collections.abc import Sequence
import numpy

rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", 0))

def sequence(number):
    # The types of the first sequence hold for all.
    frames = numpy.full((number % 5, 3), number, "float32" if number == 0 else "float64")
    return f"sequence {number}", {"data": frames, "text": numpy.array([f"täxt {number}"])}

class Indexed(Sequence):
    dims = {"classes": 100}

    def __init__(self, size=50):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, number):
        tag, arrays = sequence(number)
        return tag, arrays | {"classes": numpy.array([number], "int8" if number == 0 else "int64")}

class Counted:
    def __len__(self):
        return 20

    def __iter__(self):
        for number in range(23):  # more than it says
            yield sequence(number)

def uncounted():
    yield from map(sequence, range(4))

class Wrong(Indexed):
    def __len__(self):
        return 5000

    def __getitem__(self, number):
        if number == 3333:  # the first of the last rank
            return self.mistake()
        time.sleep(0.2)  # the other ranks would take longer than a test may
        return super().__getitem__(number % 50)  # nothing else is wrong

    def mistake(self):
        return "no sequence"

class Broken(Wrong):
    def mistake(self):
        return 1 / 0

class Slow(Indexed):
    def __getitem__(self, number):
        if number % 10 == 3:
            print("begun", flush=True)
            time.sleep(60)
        return super().__getitem__(number)
"""

# One start of MPI for many conversions: each list of arguments is one of the tool.
MANY = """
import ast, sys
from hvdtrain.plugins.hdf_tools.dump import main
print([main(arguments) for arguments in ast.literal_eval(sys.argv[1])])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with corpus.py, an HDF file, and a folder for what is written."""
    (tmp_path / "corpus.py").write_text(CORPUS, encoding="utf-8")
    (tmp_path / "out").mkdir()
    with HDFWriter(tmp_path / "source.hdf", labels={"classes": list("abcde")}) as writer:
        for number in range(37):
            frames = numpy.full((number % 7 + 1, 2), number, numpy.float32)
            writer.add(f"é{number}", {"data": frames, "classes": numpy.array([number % 4])})
    return tmp_path


def contents(path: Path) -> tuple[object, object]:
    dataset = open_hdf([path])
    sequences = [dataset.sequence(index) for index in range(dataset.num_sequences)]
    tags = dataset.tags(range(dataset.num_sequences))
    return dataset.streams, [(tag, {key: a.tolist() for key, a in one.items()}) for tag, one in zip(tags, sequences, strict=True)]


def dump_on_ranks(folder: Path, ranks: int, *arguments: str) -> Finished:
    return launch(["-m", "hvdtrain", "dump", *arguments, str(folder / "out" / "file.hdf")], ranks=ranks, timeout=300)


@pytest.mark.slow
def test_ranks_write_what_one_process_writes(folder: Path) -> None:
    shuffled = {"class": "HDFDataset", "files": str(folder / "source.hdf"), "seq_ordering": "random", "partition_epoch": 2}
    sources: dict[str, list[str]] = {
        "whole": [str(folder / "source.hdf")],
        "part": [str(shuffled), "--epoch", "3", "--start_seq", "2", "--end_seq", "14"],
        "packed": [str(folder / "source.hdf"), "--compression", "gzip"],
        "indexed": [f"{folder / 'corpus.py'}:Indexed"],
        "few": [str({"class": f"{folder / 'corpus.py'}:Indexed", "size": 2})],  # fewer sequences than ranks
        "counted": [f"{folder / 'corpus.py'}:Counted"],
        "some": [f"{folder / 'corpus.py'}:Counted", "--start_seq", "3", "--end_seq", "17"],
    }
    conversions = [[*source, str(folder / "out" / f"{name}.hdf")] for name, source in sources.items()]
    again = conversions[:1]  # refused, as the file is there by now
    finished = launch(["-c", MANY, repr(conversions + again)], ranks=3, timeout=300)
    assert finished.status == 0, finished.err
    assert finished.out.count(str([0] * len(conversions) + [2])) == 3
    assert finished.err.count("rank 0: ") == finished.err.count("expected a file that does not exist yet") == 1
    assert finished.out.count(" sequences, ") == len(conversions)  # logged by one rank only
    assert sorted(path.name for path in (folder / "out").iterdir()) == sorted(f"{name}.hdf" for name in sources)
    for name, source in sources.items():
        assert main([*source, str(folder / f"{name}.hdf")]) == 0
        assert contents(folder / "out" / f"{name}.hdf") == contents(folder / f"{name}.hdf"), name


@pytest.mark.parametrize(
    ("source", "status", "message"),
    [
        ("Wrong", 2, "rank 2: train, item 3333, 'data': expected numbers, got str 'no sequence' ("),
        pytest.param("Broken", 1, "in mistake\n", marks=pytest.mark.slow),
        pytest.param(
            "uncounted", 2, "train: expected a source with a known number of sequences (__len__)", marks=pytest.mark.slow
        ),
        pytest.param("missing", 2, "expected a name 'missing'", marks=pytest.mark.slow),
    ],
)
def test_an_error_on_one_rank_ends_all(folder: Path, source: str, status: int, message: str) -> None:
    finished = dump_on_ranks(folder, 3, f"{folder / 'corpus.py'}:{source}")
    assert finished.status == status
    assert finished.err.count(message) == 1, finished.err
    assert ("ZeroDivisionError" in finished.err) == (source == "Broken")
    assert list((folder / "out").iterdir()) == []


def interrupted(command: list[str], how: signal.Signals, marks: int, environment: dict[str, str]) -> tuple[int, str]:
    """Send a signal once the process has printed `begun` `marks` times; return its status and its stderr."""
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=True
    ) as process:
        said = ""
        while said.count("begun") < marks:  # ranks may print into one line, as Python writes a line's end by itself
            line = process.stdout.readline()
            assert line, said
            said += line
        process.send_signal(how)
        _, told = process.communicate(timeout=120)
    return process.returncode, told


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_leaves_nothing_behind(folder: Path, how: signal.Signals) -> None:
    out = folder / "out" / "file.hdf"
    command = [sys.executable, "-m", "hvdtrain", "dump", f"{folder / 'corpus.py'}:Slow", str(out)]
    status, told = interrupted(command, how, 1, dict(os.environ))
    assert status == 130
    assert told == f"\ninterrupted; {out} was not written\n"
    assert list(out.parent.iterdir()) == []


def test_interrupted_ranks_leave_nothing_behind(folder: Path) -> None:
    environment = dict(os.environ) | {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe", sys.executable, "-m", "hvdtrain", "dump"]
    status, _ = interrupted(
        [*command, f"{folder / 'corpus.py'}:Slow", str(folder / "out" / "file.hdf")], signal.SIGINT, 2, environment
    )
    assert status != 0
    for _ in range(100):  # mpirun may end before its ranks do
        if not list((folder / "out").iterdir()):
            break
        time.sleep(0.1)
    assert list((folder / "out").iterdir()) == []
