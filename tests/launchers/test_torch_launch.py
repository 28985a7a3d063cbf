"""Processes of torch.distributed: where they meet, and what happens when one of them fails.

Ways of starting them are in tests/cluster/test_launching_page.py.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import pytest
from fuzzing import SEED
from launching import ROOT, TOY, Finished, clean_environment, hvdtrain, launch, refused, torchrun, trainings
from strangers import strangers

from hvdtrain.comm.meeting_point import Address, SharedFile
from hvdtrain.comm.torch_rendezvous import meet
from hvdtrain.errors import LaunchError
from hvdtrain.plugins.report.state import read_state
from hvdtrain.settings import read_settings

PATIENCE = 15.0
"""Seconds within which the whole job has to end after a rank failed."""

QUICK = {"part": "two.hdf", "max_seqs": 1, "log_verbosity": 4}


def command(corpus: Path, folder: Path, **overrides: object) -> list[str]:
    """`-m hvdtrain CONFIG ++KEY VALUE ...` for a short training."""
    keys = {"corpus": corpus, "model": folder / "model", **QUICK, **overrides}
    return ["-m", "hvdtrain", str(TOY), *(text for key, value in keys.items() for text in (f"++{key}", str(value)))]


def port(number: int) -> int:
    """One that other tests at the same time hardly take."""
    return 10000 + (2 * os.getpid() + number) % 10000


def test_srun(corpus: Path, tmp_path: Path) -> None:
    """What srun sets, two nodes with one task each; the step's first node has an unknown name."""
    step = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_STEP_NODELIST": "no-such-node[1-2]"}
    job = {"SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "0", "SLURM_LAUNCH_NODE_IPADDR": "127.0.0.1", **step}
    tasks = [{**job, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank), "SLURM_LOCALID": "0"} for rank in (0, 1)]
    arguments = command(corpus, tmp_path, torch_distributed={})
    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(lambda task: launch(arguments, environment=task), tasks)
    assert first.status == 0, first.err
    assert "torch: 2 ranks, 2 on" in first.out
    assert first.out.count("Finished training in epoch 1.") == 1


def meeting(path: Path, ranks: list[tuple[int, int]], timeout: float = 60.0) -> list[str]:
    """Have ranks, given as (rank, size), meet at a file as their processes would; what each was told, or "met"."""

    def met(rank: int, size: int) -> str:
        try:
            meet(SharedFile(path), rank, size, timeout)
        except LaunchError as error:
            return str(error)
        return "met"

    with ThreadPoolExecutor(len(ranks)) as pool:
        running = [pool.submit(met, *one) for one in reversed(ranks)]
    return [one.result() for one in reversed(running)]


def test_a_file_of_an_earlier_run_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "meet"
    path.write_text('{"hosts": ["127.0.0.1"], "port": 9, "token": "old"}')
    assert meeting(path, [(0, 2), (1, 2)]) == ["met", "met"]
    assert not path.exists()


@pytest.mark.parametrize("on_one_host", [True, False])
def test_where_the_store_listens(tmp_path: Path, on_one_host: bool) -> None:
    """On one host, where no other one reaches it: torch's store takes commands from anybody."""
    for place in (SharedFile(tmp_path / "meet"), Address(("localhost",), port(0))):
        with ThreadPoolExecutor(2) as pool:
            stores = [running.result() for running in [pool.submit(meet, place, rank, 2, 60.0, on_one_host) for rank in (0, 1)]]
        stores[1].set("said", "by rank 1")
        assert stores[0].get("said") == b"by rank 1"
        lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
        local = {parts[1].split(":")[0] for parts in lines if parts[1].endswith(f":{stores[0].port:04X}") and parts[3] == "0A"}
        assert (local == {"0100007F"}) == on_one_host, local
        if isinstance(place, Address) and on_one_host:
            with pytest.raises(LaunchError, match=f"expected port {place.port} of this host to be free"):
                meet(place, 0, 2, 60.0, on_one_host)


def test_a_rank_given_twice_and_other_numbers_of_processes_are_found_out(tmp_path: Path) -> None:
    for told in meeting(tmp_path / "twice", [(0, 3), (1, 3), (1, 3)]):
        assert "expected distinct ranks, got rank 1 twice" in told
    for told in meeting(tmp_path / "other", [(0, 2), (1, 3)]):
        assert re.search("expected the same number of processes on all ranks, got (2 and 3|3 and 2)", told)


def test_who_does_not_come_is_named(corpus: Path, tmp_path: Path) -> None:
    keys = {"torch_distributed": {"timeout_sec": 2}, "dist_init_method": f"file://{tmp_path}/meet", "dist_world_size": 2}
    first = launch(command(corpus, tmp_path, **keys, dist_rank=0))
    assert first.status == 2
    assert f"file://{tmp_path}/meet: expected 2 processes, got none with rank 1 in time" in first.err
    [second] = meeting(tmp_path / "meet", [(1, 2)], timeout=2.0)
    assert f"rank 1 of 2: expected rank 0 at file://{tmp_path}/meet, got no answer within 2 s" in second


def test_ngpu_starts_processes_and_passes_a_signal_on(corpus: Path, tmp_path: Path) -> None:
    arguments = command(corpus, tmp_path, ngpu=2, fault="hang,1,0", record=tmp_path / "record")
    process = subprocess.Popen([sys.executable, *arguments], env=clean_environment(), cwd=ROOT)
    wait_for(tmp_path / "record.fault")
    process.send_signal(signal.SIGINT)
    time.sleep(2)  # the first asks for a checkpoint after the step, which a rank that hangs never ends
    process.send_signal(signal.SIGINT)
    assert process.wait(2 * PATIENCE) == 130


def test_ranks_begin_where_the_launcher_began(corpus: Path, tmp_path: Path) -> None:
    """The launcher runs the config, too, which may change the folder."""
    (tmp_path / "config.py").write_text(f"""
import os
# Reads the keys corpus and part.
exec(open({str(TOY)!r}).read())
os.makedirs("inside", exist_ok=True)
os.chdir("inside")
""")
    keys = {"corpus": corpus, "model": "made/model", "ngpu": 2, **QUICK, "max_restarts": 1}
    texts = [text for key, value in keys.items() for text in (f"++{key}", str(value))]
    ended = subprocess.run(
        [sys.executable, "-m", "hvdtrain", "config.py", *texts],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "inside" / "made" / "model.001.pt").exists()


@pytest.mark.parametrize("launcher", ["ngpu", "torchrun"])
def test_processes_whose_launcher_was_killed_stop_with_a_checkpoint(corpus: Path, tmp_path: Path, launcher: str) -> None:
    keys = {"num_epochs": 10**6, "part": "train.hdf", "max_seqs": 4, "cleanup_old_models": True}
    if launcher == "ngpu":
        arguments = command(corpus, tmp_path, ngpu=2, **keys)
    else:
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
        arguments = [*agent, *command(corpus, tmp_path, torch_distributed={}, **keys)]
    process = subprocess.Popen(
        [sys.executable, *arguments],
        env=clean_environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    wait_for(tmp_path / "model.001.pt")
    assert len(trainings(tmp_path)) == 3
    process.kill()
    _, err = process.communicate(timeout=120)  # the ranks' stderr, until they have ended
    assert trainings(tmp_path) == []
    assert err.count("stopped by the end of its launcher in epoch ") == 1, err
    assert "rank 1 of 2" not in err  # it does not fail


ENDS = """
import signal, time
from hvdtrain.comm import child
child.TERMINATE_TIMEOUT = child.STOP_TIMEOUT = 0.2
{handler}
child.end_with(1)  # which is another one than that of this process
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize(
    ("handler", "printed"), [("", ""), ("signal.signal(signal.SIGTERM, lambda *_: print('asked'))", "asked\n")]
)
def test_who_does_not_stop_without_a_launcher_is_ended(handler: str, printed: str) -> None:
    ended = subprocess.run([sys.executable, "-u", "-c", ENDS.format(handler=handler)], cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, printed, "")


def failure_in(finished: Finished) -> float:
    """When the first rank failed, in seconds since 1970, as torchrun reports it."""
    [failed] = re.findall(r"(?i)first observed failure.*?time\s*: (\S+)", finished.err, re.DOTALL)
    return datetime.fromisoformat(failed.replace("_", "T")).timestamp()


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, path
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("fault", "launcher"),
    [
        ("kill", "ngpu"),
        ("exit0", "ngpu"),
        pytest.param("SIGSTOP", "torchrun", marks=pytest.mark.fuzz),
        pytest.param("SIGSTOP", "ngpu", marks=pytest.mark.again),
        *(pytest.param("raise", launcher, marks=pytest.mark.again) for launcher in ("ngpu", "torchrun")),
        pytest.param("kill", "torchrun", marks=pytest.mark.again),
    ],
)
def test_a_rank_that_fails_ends_the_job(corpus: Path, tmp_path: Path, launcher: str, fault: str) -> None:
    """One that raises an error: test_elastic.py."""
    keys = {"fault": f"{fault},1,3", "record": tmp_path / "record", "part": "train.hdf", "max_seqs": 4}
    if fault == "SIGSTOP":
        keys["watchdog_timeout"] = 15
    # Whatever strangers send to the watchdogs, they find a rank that is stopped.
    with strangers(tmp_path, random.Random(SEED)) if fault == "SIGSTOP" else nullcontext(set()) as reached:
        if launcher == "ngpu":
            finished = launch(command(corpus, tmp_path, ngpu=2, **keys))
        else:
            finished = torchrun(command(corpus, tmp_path, torch_distributed={}, **keys), 2)
    assert {host for host, _ in reached} == ({"127.0.0.1"} if fault == "SIGSTOP" else set())
    planted = float((tmp_path / "record.fault").read_text())
    # torchrun itself takes another half a minute: it asks the rank that is stopped to end, and kills it then.
    ended_at = failure_in(finished) if launcher == "torchrun" else time.time()
    assert ended_at - planted < PATIENCE + (15 if fault == "SIGSTOP" else 0)
    assert finished.status != 0
    assert trainings(tmp_path) == []
    if fault == "raise":
        assert "rank 1 of 2: RuntimeError: planted by the test\n" in finished.err
        assert "RuntimeError: planted by the test" in finished.err
    if fault == "SIGSTOP":
        stopped = r"rank 1 on \S+ has sent no heartbeat for \d+ s \(last in .*\): its process \d+ is stopped \(SIGSTOP\)\n"
        assert re.search(stopped, finished.err)
        assert "its threads:" not in finished.err
    if fault in ("kill", "exit0"):
        assert re.search(r"rank 0 of 2: stopped, because another rank failed: rank 1 on \S+ has ended\n", finished.err)
    if fault == "exit0":
        assert "rank 1 of 2: ended with exit status 0 before its work was done (by os._exit?)\n" in finished.err
        assert finished.status == 1
    elif launcher == "ngpu" and fault != "raise":
        first = finished.err.index("rank 1 of 2: ended by signal 9 (SIGKILL)")
        assert "because another rank failed" not in finished.err[:first]
        assert finished.status == 137
        ended = read_state(tmp_path, "model", is_complete=False)
        assert (ended.name, ended.why) == ("failed", "rank 1 of 2 ended by signal 9 (SIGKILL)"), ended


def test_a_mapped_file_that_is_cut_off_is_named(corpus: Path, tmp_path: Path) -> None:
    """A rank that reads what is not there any more is ended by SIGBUS, possibly all of them: the launcher looks, and so does the
    next start."""
    shutil.copytree(corpus, tmp_path / "corpus")
    file = tmp_path / "corpus" / "train.hdf"
    keys = {"record": tmp_path / "record", "part": "train.hdf", "max_seqs": 4, "ngpu": 2, "fault": "cut,1,3"}
    finished = launch(command(tmp_path / "corpus", tmp_path, **keys))
    assert finished.status != 0
    named = f"{file}: expected the file that was opened at the start, got one of 4096 bytes instead of "
    assert named in finished.err, finished.err
    again = hvdtrain(TOY, {"corpus": tmp_path / "corpus", "model": tmp_path / "model"})
    assert again.status == 2
    assert f"{file}: expected a whole HDF5 file" in again.err


def test_timeout_sec_ends_a_wait_for_a_rank_that_hangs(corpus: Path, tmp_path: Path) -> None:
    keys = {"fault": "hang,1,0", "record": tmp_path / "record", "torch_distributed": {"timeout_sec": 15}}
    finished = torchrun(command(corpus, tmp_path, **keys), 2)
    assert finished.status != 0
    assert "rank 0 of 2: stopped, because another rank did not respond within timeout_sec of torch_distributed" in finished.err
    assert failure_in(finished) - float((tmp_path / "record.fault").read_text()) < 2 * PATIENCE


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"use_horovod": 1, "torch_distributed": {}}, "use_horovod, torch_distributed: conflict"),
        ({"use_horovod": 1, "ngpu": 2}, "use_horovod: conflict"),
        ({"torch_distributed": {"bakend": "gloo"}}, "torch_distributed.bakend: unknown-key"),
        ({"torch_distributed": {"backend": "mpi"}}, "torch_distributed.backend: wrong-format"),
        ({"torch_distributed": {"fsdp": True}}, "torch_distributed.fsdp: unsupported"),
        ({"torch_distributed": {"options": {"static": 1}}}, "torch_distributed.options: unsupported"),
        ({"torch_distributed": 1}, "torch_distributed: wrong-type"),
        ({"ngpu": 2, "multiprocessing_distributed": "false"}, "multiprocessing_distributed: unsupported"),
        ({"dist_rank": 2, "dist_world_size": 2}, "dist_rank: conflict"),
        ({"dist_rank": 0}, "dist_world_size: missing"),
        ({"dist_master_addr": "h"}, "dist_master_port: missing"),
        ({"sync_batch_norm": 1, "torch_distributed": {"reduce_type": "param"}}, "sync_batch_norm: conflict"),
    ],
)
def test_mistakes_in_the_keys(corpus: Path, tmp_path: Path, overrides: dict[str, object], message: str) -> None:
    texts = {"corpus": str(corpus), "model": str(tmp_path / "model"), **{name: str(value) for name, value in overrides.items()}}
    with refused(message):
        read_settings([TOY], texts)


def test_a_model_in_a_wrapper_is_refused(corpus: Path, tmp_path: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "layers": "threads"})
    assert finished.status == 2
    assert "get_model: expected the model itself, got it inside a DataParallel" in finished.err
    assert "++ngpu 4" in finished.err
