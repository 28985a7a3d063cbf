"""Checkpoints that another process writes are those that this one would have written."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hvdtrain.learner.contents import CheckpointContents
from hvdtrain.learner.integrity import damage
from hvdtrain.learner.torch.model_file import file_format
from hvdtrain.plugins.background.writer import BackgroundWriter

CPU = torch.device("cpu")


@pytest.fixture
def writer() -> Iterator[BackgroundWriter]:
    made = BackgroundWriter()
    yield made
    made.close()


def contents(size: int = 3) -> CheckpointContents:
    tied = torch.randn(size, 5)
    model = {
        "tied": tied,
        "also": tied,
        "view": torch.randn(5, size).t(),
        "flags": torch.tensor([True, False]),
        "narrow": torch.randn(7).bfloat16(),
        "number": torch.tensor(4),
        "empty": torch.zeros(0, 3),
        "indices": torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2), (4,)),
    }
    optimizer = {"optimizer": {"state": {0: {"step": torch.tensor(9.0), "mean": [torch.ones(size), torch.full((2,), 2.0)]}}}}
    return CheckpointContents(model, optimizer, {"epoch": 3, "step": 9, "texts": ["a"]}, file_format(CPU, "pt"))


def read(folder: Path) -> list[dict[str, Any]]:
    assert [damage(folder / name) for name in ("model.pt", "opt.pt")] == [None, None]
    return [file_format(CPU, "pt").read(folder / name) for name in ("model.pt", "opt.pt")]


def assert_same(one: Any, other: Any) -> None:
    """Whether nested containers are equal."""
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for first, second in zip(one, other, strict=True):
            assert_same(first, second)
    else:
        assert one == other


def test_the_files_are_those_of_a_synchronous_save(tmp_path: Path, writer: BackgroundWriter) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    for given in (contents(), contents(), contents(50_000)):
        given.write(here / "model.pt", here / "opt.pt")
        expected = read(here)
        copy = writer.copy(given)
        for tensor in given.model.values():
            if tensor.layout == torch.strided:
                tensor.zero_()
        copy.write(there / "model.pt", there / "opt.pt")
        found = read(there)
        assert_same(expected, found)
        assert found[0]["model"]["tied"].data_ptr() == found[0]["model"]["also"].data_ptr()


@pytest.mark.slow
def test_an_error_is_raised_here_and_a_lost_process_is_replaced(tmp_path: Path, writer: BackgroundWriter) -> None:
    given = contents()
    copy = writer.copy(given)
    with pytest.raises((OSError, RuntimeError), match="missing"):
        copy.write(tmp_path / "missing" / "model.pt", tmp_path / "missing" / "opt.pt")
    copy.write(tmp_path / "model.pt", tmp_path / "opt.pt")
    expected = read(tmp_path)
    process = writer._process
    assert process is not None
    process.kill()
    process.wait()
    for name in ("model.pt", "opt.pt"):
        (tmp_path / name).unlink()
    copy.write(tmp_path / "model.pt", tmp_path / "opt.pt")
    assert_same(read(tmp_path), expected)
    writer.copy(given).write(tmp_path / "model.pt", tmp_path / "opt.pt")
    assert writer._process is not process
    assert_same(read(tmp_path), expected)


PROGRAM = """
import os, sys, threading
from pathlib import Path
from hvdtrain.plugins.local_ranks.fork import fork
from hvdtrain.plugins.background.writer import BackgroundWriter, serve
from tests.plugins.background.test_writer import assert_same, contents, read

folder = Path(sys.argv[1])
forked = fork(serve)
assert forked is not None
writer = BackgroundWriter(forked)
for size in (3, 50_000, 3):  # the second needs more memory
    given = contents(size)
    given.write(folder / "model.pt", folder / "opt.pt")
    expected = read(folder)
    writer.copy(given).write(folder / "model.pt", folder / "opt.pt")
    assert_same(read(folder), expected)
    assert writer._process is forked.process and forked.process.poll() is None
threading.Thread(target=threading.Event().wait, daemon=True).start()
assert fork(serve) is None  # a thread may hold a lock
print(Path(f"/proc/{forked.process.pid}/comm").read_text().strip(), forked.process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
def test_a_fork_writes_and_ends_with_its_parent(tmp_path: Path) -> None:
    from leftovers import is_running  # here, as the program imports this module, and finds no other ones of the tests

    ended = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], check=False, capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    name, pid = ended.stdout.split()
    assert name == "hvdtrain-saver"
    deadline = time.monotonic() + 10
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))
