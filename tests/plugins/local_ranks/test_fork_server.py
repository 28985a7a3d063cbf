"""Ranks that are forked from a process with their imports: they are the launcher's children, like new programs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import clean_environment

from hvdtrain.comm.launchers import Place
from hvdtrain.plugins.local_ranks.fork_server import NAME
from hvdtrain.plugins.local_ranks.processes import launch

RANK = """
import atexit, json, os, random, signal, sys, time
from pathlib import Path
from hvdtrain.comm import child, this_process
from hvdtrain.comm.child import end_with
from hvdtrain.plugins.local_ranks import fork_server
from hvdtrain.plugins.local_ranks.reports import PEER_FAILED, wait_for_cause
child.TERMINATE_TIMEOUT = 0.2
fork_server.serve()
launcher = this_process.launcher()
folder, rank = Path(sys.argv[1]), launcher.place.rank
end_with(launcher.parent)
starts = len(launcher.failures)
found = {
    "is_child": os.getppid() == launcher.parent,
    "has_session": os.getsid(0) == os.getpid(),
    "is_forked": "planted" in sys.modules,
    "name": Path("/proc/self/comm").read_text().strip(),
    "asked": "HVDTRAIN_FORK_SERVER" in os.environ,
    "random": random.random(),
    "files": len(os.listdir("/proc/self/fd")),
}
(folder / f"rank-{rank}-start-{starts}.json").write_text(json.dumps(found))
while len(list(folder.glob(f"rank-*-start-{starts}.json"))) < launcher.place.size:
    time.sleep(0.01)
if sys.argv[2] == "wait":
    time.sleep(60)
if starts == 0 and sys.argv[2] == "kill server":
    os.kill(int(next(pid for pid in Path(f"/proc/{launcher.parent}/task/{launcher.parent}/children").read_text().split()
        if Path(f"/proc/{pid}/comm").read_text().strip() == "hvdtrain-fork")), signal.SIGKILL) if rank == 1 else None
if starts == 0:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_cause(os.environ, 10)
    os._exit(PEER_FAILED)
atexit.register((folder / f"exit-{rank}").touch)
launcher.on_success()
"""


def restart_once(places: list[Place], failed: Mapping[int, int]) -> list[Place]:
    return places if -signal.SIGKILL in failed.values() else []


def finding_modules_in(folder: Path) -> dict[str, str]:
    """The environment, with a folder in which Python finds modules first."""
    environ = clean_environment()
    return environ | {"PYTHONPATH": os.pathsep.join(filter(None, [str(folder), environ.get("PYTHONPATH")]))}


def run(folder: Path, planted: str, mode: str = "kill") -> tuple[int, list[str], list[dict[str, object]]]:
    """Run 2 ranks, of which the second one is killed once; return the status, the lines of the launcher, and what ranks found."""
    (folder / "planted.py").write_text(planted)
    reported: list[str] = []
    wanted = [Place("hvdtrain", rank, 2, rank, 2) for rank in range(2)]
    environ = finding_modules_in(folder)
    status = launch(
        wanted, [str(folder), mode], environ, restart_once, program=("-c", RANK), report=reported.append, imports=["planted"]
    )
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*"), key=lambda path: path.name[-6:])]
    return status, reported, found


def test_forked_ranks_are_the_launchers_children_and_end_like_programs(tmp_path: Path) -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()
    status, reported, found = run(tmp_path, "")
    assert status == 0, reported
    assert reported == ["rank 1 of 2: ended by signal 9 (SIGKILL)\n"]
    assert len(found) == 4
    for one in found:
        assert (one["is_child"], one["has_session"], one["is_forked"], one["asked"]) == (True, True, True, False)
        assert one["name"] != NAME
    assert len({one["random"] for one in found}) == 4
    assert len({one["files"] for one in found}) == 1
    assert all((tmp_path / f"exit-{rank}").exists() for rank in range(2))
    assert children.read_text() == before


@pytest.mark.parametrize(
    ("planted", "why"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()", "1 threads run"),
        ("import no_such_package", "ModuleNotFoundError"),
        ("import os\nos.kill(os.getpid(), 9)", "the process to fork has ended"),
    ],
)
def test_unsafe_processes_are_not_forked(tmp_path: Path, planted: str, why: str) -> None:
    status, reported, found = run(tmp_path, planted)
    assert status == 0, reported
    assert len(found) == 4
    assert [one["is_forked"] for one in found] == [False] * 4
    assert sum("ranks start as new programs" in line and why in line for line in reported) == 1


def test_ranks_go_on_without_the_process_that_forked_them(tmp_path: Path) -> None:
    status, reported, found = run(tmp_path, "", "kill server")
    assert status == 0, reported
    assert [one["is_forked"] for one in found] == [True, True, False, False], reported


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text("")
    program = f"""
import os
from hvdtrain.comm.launchers import Place
from hvdtrain.plugins.local_ranks.processes import launch
wanted = [Place("hvdtrain", rank, 2, rank, 2) for rank in range(2)]
launch(wanted, [{str(tmp_path)!r}, "wait"], os.environ, program=("-c", {RANK!r}), imports=["planted"])
"""
    environ = {**finding_modules_in(tmp_path), "TMPDIR": str(tmp_path)}  # a launcher that is killed leaves a folder
    launcher = subprocess.Popen([sys.executable, "-c", program], env=environ)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("rank-*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    pids = list(map(int, Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()))
    assert len(pids) == 3
    launcher.kill()
    launcher.wait()
    while any(Path(f"/proc/{pid}/fd").exists() and _runs(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process has not ended yet, also as a child of a process that does not wait for it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
