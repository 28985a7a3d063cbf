"""A rank that fails takes the others down within seconds, and what the user sees is why."""

import re
import socket
import sys
import time
from pathlib import Path

import pytest
from inside import run_inside
from launching import TOY, Finished, hvdtrain, trainings

from hvdtrain.plugins.report.state import read_state

PATIENCE = 10.0
"""Seconds within which the whole job has to end after a rank failed."""


def run_with_fault(corpus: Path, folder: Path, **overrides: object) -> tuple[Finished, float]:
    """Train on 2 ranks with a planted fault; return how it ended, and how long after the fault."""
    record = folder / "record"
    finished = hvdtrain(
        TOY, {"corpus": corpus, "model": folder / "model", "use_horovod": 1, "record": record, **overrides}, ranks=2
    )
    assert finished.status != 0
    return finished, time.time() - float((folder / "record.fault").read_text())


def test_a_rank_that_is_killed_ends_the_job(corpus: Path, tmp_path: Path) -> None:
    finished, seconds = run_with_fault(corpus, tmp_path, fault="kill,1,5")
    assert seconds < PATIENCE
    assert "Killed" in finished.err  # mpirun's own words
    assert "stopped by" not in finished.err  # mpirun's signal to the others is no request to stop


def test_a_rank_that_hangs_ends_the_job_and_shows_where(corpus: Path, tmp_path: Path) -> None:
    finished, seconds = run_with_fault(corpus, tmp_path, fault="hang,1,5", watchdog_timeout=10)
    assert seconds < 10 + PATIENCE
    verdict = rf"rank 1 on {socket.gethostname()} hangs: no progress for \d\d s \(watchdog_timeout\) in epoch 1, step 5"
    assert re.search(verdict + "; rank 0 waits for it", finished.err)
    assert re.search(r"rank 1: no progress for \d\d s \(watchdog_timeout\) in epoch 1, step 5; its threads:", finished.err)
    assert "in fail" in finished.err  # the function that hangs, in the stack of rank 1
    assert finished.err.count("its threads:") == 1
    ended = read_state(tmp_path, "model", is_complete=False)
    assert (ended.name, ended.by) == ("failed", "the watchdog of rank 0")
    assert re.match(verdict, ended.why), ended


@pytest.mark.again
def test_a_rank_that_is_stopped_ends_the_job_and_nothing_is_left(corpus: Path, tmp_path: Path) -> None:
    """Under other launchers: tests/launchers/test_torch_launch.py, tests/cluster/test_failures.py."""
    finished, seconds = run_with_fault(corpus, tmp_path, fault="SIGSTOP,1,5", watchdog_timeout=10)
    assert seconds < 10 + PATIENCE
    assert re.search(r"rank 1 on \S+ has sent no heartbeat .*: its process \d+ is stopped \(SIGSTOP\)", finished.err)
    assert trainings(tmp_path) == []


def with_relays(corpus: Path, folder: Path, fault: str) -> Finished:
    """Train on 5 ranks as in a job of hundreds, where rank 3 is a relay for rank 4, and rank 0 for ranks 1 and 2."""
    few = folder / "few.py"
    few.write_text("from hvdtrain.plugins.watchdog import relays\nrelays.DIRECT, relays.RANKS_OF_HOST = 2, 1\n")
    keys = {"corpus": corpus, "model": folder / "model", "use_horovod": 1, "record": folder / "record", "fault": fault}
    finished = hvdtrain(TOY, {**keys, "watchdog_timeout": 6}, ranks=5, options=[str(few)])
    assert finished.status != 0
    assert time.time() - float((folder / "record.fault").read_text()) < 6 + PATIENCE
    assert trainings(folder) == []
    return finished


def test_a_rank_behind_a_relay_that_hangs_is_named_and_shows_where(corpus: Path, tmp_path: Path) -> None:
    finished = with_relays(corpus, tmp_path, "hang,4,5")
    assert re.search(r"rank 4 on \S+ hangs: no progress for .* in epoch 1, step 5; 4 ranks wait for it", finished.err)
    assert re.search(r"rank 4: no progress for \d+ s \(watchdog_timeout\) in epoch 1, step 5; its threads:", finished.err)


@pytest.mark.again
def test_a_relay_that_is_stopped_is_named(corpus: Path, tmp_path: Path) -> None:
    finished = with_relays(corpus, tmp_path, "SIGSTOP,3,5")
    assert re.search(r"rank 3 on \S+ has sent no heartbeat .*: its process \d+ is stopped \(SIGSTOP\)", finished.err)
    assert "rank 4 on" not in finished.err


def test_an_error_in_a_callback_in_param_mode_ends_the_job_too(corpus: Path, tmp_path: Path) -> None:
    """One in train_step, where gradients are exchanged: tests/launchers/test_elastic.py."""
    finished, seconds = run_with_fault(
        corpus, tmp_path, fault="callback,0,5", horovod_reduce_type="param", horovod_param_sync_step=100
    )
    assert seconds < PATIENCE
    assert "rank 0 of 2: RuntimeError: planted" in finished.err
    assert "RuntimeError: planted in a callback" in finished.err
    assert "in on_step_end" in finished.err


def test_several_processes_without_use_horovod_are_refused(corpus: Path, tmp_path: Path) -> None:
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model"}, ranks=2)
    assert finished.status == 2
    assert "2 processes that mpirun started" in finished.err
    assert "(add ++use_horovod 1 to the command, or ++torch_distributed {}; without a launcher, unset OMPI_COMM_WORLD_RANK)" in (
        finished.err
    )
    assert "Traceback" not in finished.err
    assert not list(tmp_path.iterdir())


def test_a_mistake_that_all_ranks_see_is_reported_once(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.hdf").write_bytes((corpus / "train.hdf").read_bytes()[:5000])
    common = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1}
    finished = hvdtrain(TOY, {**common, "train.files": tmp_path / "broken.hdf"}, ranks=2)
    assert finished.status == 2
    assert finished.err.count(f"{tmp_path}/broken.hdf: expected a whole HDF5 file") == 1
    assert "Traceback" not in finished.err
    late = tmp_path / "late.py"
    late.write_text('import os, time\ntime.sleep(1.5 * (os.environ["OMPI_COMM_WORLD_RANK"] == "0"))\n')
    finished = hvdtrain(late, {"learning_rat": 1}, ranks=2)  # mpirun ends rank 0 if the other one exits before it
    assert finished.status == 2
    assert finished.err.count("learning_rat: unknown key in the command line (did you mean learning_rate?)") == 1


def test_a_mistake_in_train_step_is_reported_even_if_rank_0_does_not_see_it(corpus: Path, tmp_path: Path) -> None:
    finished, seconds = run_with_fault(corpus, tmp_path, fault="mistake,1,5")
    assert seconds < PATIENCE
    assert "rank 1 of 2: 1 problem in the config:" in finished.err
    assert "expected a unique name for every loss, got 'twice' twice" in finished.err
    assert "Traceback" not in finished.err


def test_without_horovod_the_error_says_how_to_build_it(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "horovod", None)
    finished = run_inside([TOY, "++use_horovod", 1, "++corpus", corpus, "++model", tmp_path / "model"])
    assert finished.status == 2
    assert "use_horovod: expected an installed Horovod" in finished.err
    assert "python -m hvdtrain build-horovod" in finished.err
    assert "Traceback" not in finished.err


TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "one"}


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "the 2 processes that mpirun started, got 1 from Horovod"),
        (TORCHRUN, "the 2 processes that torchrun started, got 1 from Horovod (torchrun is for"),
    ],
)
def test_a_launcher_that_is_not_horovods_is_found_out(
    corpus: Path, tmp_path: Path, environment: dict[str, str], told: str
) -> None:
    """MPICH's mpirun sets PMI_SIZE. A Horovod that was built for Open MPI then sees only its own process."""
    keys = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1}
    finished = hvdtrain(TOY, keys, environment=environment)
    assert finished.status == 2
    assert f"expected {told}" in finished.err
    assert not list(tmp_path.iterdir())


def test_use_horovod_on_one_rank_works_and_says_so_where_nothing_started_it(corpus: Path, tmp_path: Path) -> None:
    """Where mpirun started it, test_resume.py looks."""
    finished = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1})
    assert finished.status == 0, finished.err
    assert "this process was started alone" in finished.out
