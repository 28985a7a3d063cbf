"""How worker processes begin and end."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import launch

from hvdtrain.data.combine.workers import Workers, end_with

STUCK = """
import os, sys, threading, time
import hvdtrain.data.combine.workers as workers

workers.START_SECONDS = 0.3
forks = 0

def before():
    global forks
    forks += 1

def after():
    if forks <= STUCK_FORKS:
        FAIL

os.register_at_fork(before=before, after_in_child=after)
made = workers.Workers(2, lambda number: (os.getpid(), number * 2))
made.start()
answers = made.results([1, 2, 3])
print([answer for _, answer in answers], len({pid for pid, _ in answers}), forks)
made.close()
"""


HANG = "lock = threading.Lock(); lock.acquire(); lock.acquire()  # as a lock that a thread of the parent held"
CRASH = "os.abort()"


@pytest.mark.parametrize("fail", [HANG, CRASH], ids=["hangs", "crashes"])
def test_a_process_that_fails_while_it_is_forked_is_started_again(tmp_path: Path, fail: str) -> None:
    (tmp_path / "stuck.py").write_text(STUCK.replace("STUCK_FORKS", "3").replace("FAIL", fail))
    finished = launch([str(tmp_path / "stuck.py")], timeout=60)
    assert finished.status == 0, finished.err
    assert finished.out == "[2, 4, 6] 2 5\n"  # both of the first two, and then one of the next, had to be started again


def test_processes_that_never_begin_are_an_error(tmp_path: Path) -> None:
    for fail, said in ((HANG, "did not begin within 0.3 s"), (CRASH, "did not begin: worker process 0 ended with exit code -6")):
        (tmp_path / "stuck.py").write_text(STUCK.replace("STUCK_FORKS", "99").replace("FAIL", fail))
        finished = launch([str(tmp_path / "stuck.py")], timeout=60)
        assert finished.status == 1
        assert f"worker process 0 was started 5 times and {said}" in finished.err


def test_tensors_come_with_their_attributes() -> None:
    def tensor(number: int) -> torch.Tensor:
        made = torch.full((2,), number)
        if number:
            made.speaker = f"speaker {number}"  # type: ignore[attr-defined]
        return made

    workers: Workers[int] = Workers(1, tensor)
    workers.start()
    plain, named = workers.results([0, 3])
    workers.close()
    assert (plain.tolist(), named.tolist(), named.speaker) == ([0, 0], [3, 3], "speaker 3")


BUSY = """
import os, signal, sys, time
from hvdtrain.data.combine.workers import Workers

def work(question):
    open(os.path.join(sys.argv[1], str(os.getpid())), "w").close()
    time.sleep(600)

made, later = Workers(1, work), Workers(1, work)  # the later one has a copy of the first one's pipe
made.start()
later.start()
made._send(0, 1)
later._send(0, 1)
while len(os.listdir(sys.argv[1])) < 2:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_processes_that_are_busy_end_with_their_parent(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(BUSY)
    (tmp_path / "pids").mkdir()
    process = subprocess.run([sys.executable, tmp_path / "busy.py", tmp_path / "pids"], timeout=60, stdin=subprocess.DEVNULL)
    assert process.returncode == -signal.SIGKILL
    pids = [int(path.name) for path in (tmp_path / "pids").iterdir()]
    assert len(pids) == 2
    until = time.monotonic() + 5
    while time.monotonic() < until and any(is_running(pid) for pid in pids):
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_a_process_whose_parent_has_ended_already_ends() -> None:
    child = os.fork()
    if child == 0:
        end_with(parent=os.getpid())  # this is not its parent's number
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
