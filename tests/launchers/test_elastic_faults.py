"""The rest of the table of launchers and faults in docs/elastic.md: what test_elastic.py does not prove."""

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from elastic import (
    EPOCH,
    LATE_RANKS,
    answers,
    assert_goes_on_alone,
    command,
    horovodrun,
    keys_of,
    torchrun_agents,
    wait_until,
    write_config,
)
from launching import EMPTY, ROOT, Finished, clean_environment, hvdtrain, launch, torchrun

from hvdtrain.plugins.trace.records import has_begun, num_runs, trained_on

pytestmark = pytest.mark.again

PATIENCE = 20
"""Seconds of the watchdog."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path)


def three_hosts(folder: Path) -> tuple[Path, str, str]:
    """Names of this host for Horovod's driver, one rank each; the file with them, and the two of which faults may be planted."""
    hosts, last = folder / "hosts", socket.gethostname()
    hosts.write_text(f"localhost:1\n127.0.0.1:1\n{last}:1\n")
    return hosts, "127.0.0.1", last


def assert_one_of_three_goes_on(corpus: Path, folder: Path, config: Path, first: str, second: str, **keys: object) -> None:
    """Train under horovodrun with a fault (its step, and what happens then) on one host, then on another one."""
    hosts, one, other = three_hosts(folder)
    given = {**keys_of(corpus, folder, **keys), "planted": f"{one},{first},{other},{second}", "use_horovod": 1}
    finished = launch(horovodrun(hosts, command(config, given)), timeout=600, environment=LATE_RANKS)
    assert finished.status == 0, finished.err
    assert num_runs(folder / "trace") == 3
    assert trained_on(folder / "trace") == {1: EPOCH}


def test_ngpu_restarts_ranks_that_hang_or_are_stopped_as_often_as_allowed(corpus: Path, tmp_path: Path, config: Path) -> None:
    keys = keys_of(corpus, tmp_path, watchdog_timeout=PATIENCE)
    planted = "1,5,SIGSTOP,1,9,hang,1,13,loop"
    finished = launch(command(config, {**keys, "planted": planted, "ngpu": 3, "max_restarts": 2}), timeout=600)
    assert finished.status == 1, finished.err
    told = [line for line in finished.err.splitlines() if line.startswith("restart ")]
    assert told == [
        f"restart 1 of 2: rank 1 of 3 was ended by SIGKILL; 3 ranks continue from {tmp_path}/model.001.step-4.pt",
        f"restart 2 of 2: rank 1 of 3 hung and was ended by its watchdog; 3 ranks continue from {tmp_path}/model.001.step-8.pt",
    ]
    assert "is stopped (SIGSTOP)" in finished.err
    assert re.search(
        r"rank 1 on \S+ hangs: no progress for \d+ s \(watchdog_timeout\) in epoch 1, step 9; 2 ranks wait", finished.err
    )
    assert "rank 1 of 3 hung and was ended by its watchdog: no restart, after 2 of 2 (max_restarts)" in finished.err
    assert_goes_on_alone(config, keys)


def test_torchrun_restarts_ranks_that_are_killed_again_stopped_or_hang(corpus: Path, tmp_path: Path, config: Path) -> None:
    keys = keys_of(corpus, tmp_path, watchdog_timeout=PATIENCE, torch_distributed={})
    planted = "1,5,SIGKILL,0,6,SIGKILL,1,9,SIGSTOP,1,13,hang"
    finished = torchrun(command(config, {**keys, "planted": planted}), 2, 600, EMPTY, "--max-restarts", "4")
    assert finished.status == 0, finished.err
    begun = re.findall(r"Loaded \S+/(model\S+): training continues in epoch 1", finished.out)
    assert begun == [f"model.001.step-{step}.pt" for step in (4, 4, 8, 12)]
    assert trained_on(tmp_path / "trace") == {1: EPOCH}


def test_horovodrun_goes_on_after_an_exit_and_after_another_kill(corpus: Path, tmp_path: Path, config: Path) -> None:
    """The second one comes before another checkpoint was written. One rank continues in the end."""
    assert_one_of_three_goes_on(corpus, tmp_path, config, "5,exit", "6,SIGKILL")


def test_horovodrun_goes_on_without_a_rank_that_hangs_and_one_that_is_stopped(corpus: Path, tmp_path: Path, config: Path) -> None:
    assert_one_of_three_goes_on(corpus, tmp_path, config, "5,hang", "9,SIGSTOP", watchdog_timeout=PATIENCE)


def test_horovodrun_takes_a_stop_for_a_stop(corpus: Path, tmp_path: Path, config: Path) -> None:
    keys = keys_of(corpus, tmp_path, use_horovod=1)
    hosts, _, _ = three_hosts(tmp_path)
    finished = launch(horovodrun(hosts, command(config, {**keys, "planted": "1,5,SIGTERM"})), timeout=600, environment=LATE_RANKS)
    assert finished.status != 0
    assert (finished.out + finished.err).count("stopped by SIGTERM in epoch 1") == 1
    assert "continues as rank" not in finished.out + finished.err
    assert num_runs(tmp_path / "trace") == 1
    assert_goes_on_alone(config, keys | {"use_horovod": 0})


def stop(launcher: list[str], trace: Path, number: signal.Signals, ranks: int) -> Finished:
    """Send the launcher a signal as soon as all ranks train."""
    process = subprocess.Popen(
        [sys.executable, *launcher],
        env=clean_environment() | LATE_RANKS,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )
    wait_until(lambda: has_begun(trace, 0, ranks), process)
    os.kill(process.pid, number)
    out, err = process.communicate(timeout=120)
    return Finished(process.returncode, out.decode(), err.decode(), 0.0)


LONG = {"max_seqs": 1, "slow": "compute,-1", "save_interval_steps": None}
"""With which an epoch lasts until a signal comes, and no other checkpoint is written."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_stops_with_a_checkpoint(corpus: Path, tmp_path: Path, config: Path, number: signal.Signals) -> None:
    keys = keys_of(corpus, tmp_path, **LONG)
    agent = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "2"]
    ended = stop([*agent, *command(config, {**keys, "torch_distributed": {}})], tmp_path / "trace", number, 2)
    assert ended.status == 1, ended.err
    assert "stopped by SIG" in ended.err
    assert num_runs(tmp_path / "trace") == 1
    assert_goes_on_alone(config, {**keys, "slow": ",-1"})


def test_ctrl_c_to_ngpu_stops_with_a_checkpoint(corpus: Path, tmp_path: Path, config: Path) -> None:
    """SIGTERM: tests/launchers/test_elastic.py."""
    keys = keys_of(corpus, tmp_path, **LONG)
    ended = stop(command(config, {**keys, "ngpu": 2, "max_restarts": 2}), tmp_path / "trace", signal.SIGINT, 2)
    assert ended.status == 130, ended.err
    assert ended.err.count("stopped by SIGINT in epoch 1") == 1
    assert "restart " not in ended.err
    assert_goes_on_alone(config, {**keys, "slow": ",-1"})


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_horovodrun_ends_the_job(corpus: Path, tmp_path: Path, config: Path, number: signal.Signals) -> None:
    """Its ranks have five seconds for a checkpoint, which may not be enough on a busy machine."""
    keys = keys_of(corpus, tmp_path, **LONG, use_horovod=1) | {"save_interval_steps": 1}
    hosts, _, _ = three_hosts(tmp_path)
    ended = stop(horovodrun(hosts, command(config, keys)), tmp_path / "trace", number, 3)
    assert ended.status == 1, ended.err
    assert "continues as rank" not in ended.out + ended.err
    assert num_runs(tmp_path / "trace") == 1
    finished = hvdtrain(config, {**keys, "slow": ",-1", "use_horovod": 0})
    assert finished.status == 0, finished.err
    assert trained_on(tmp_path / "trace") == {1: EPOCH}


@pytest.mark.parametrize("failing", ["first", "second"])
def test_an_error_on_one_of_two_hosts_ends_torchrun_on_both(corpus: Path, tmp_path: Path, config: Path, failing: str) -> None:
    """Two agents on this host, as on two; they meet at the first one. None continues without the other."""
    keys = keys_of(corpus, tmp_path, torch_distributed={}, planted=f"{failing},5,raise")
    port, agent = torchrun_agents(command(config, keys), patience=20, err=subprocess.PIPE)
    first = agent("first")
    wait_until(lambda: answers(port), first)
    second = agent("second")
    told = "".join(one.communicate(timeout=600)[1].decode() for one in (first, second))
    assert (first.returncode, second.returncode) == (1, 1), told
    assert told.count("RuntimeError: planted by the test\nin this batch") == 1, told
    assert "not started again after an error that would only repeat (see above): rank" in told
    assert "got none with rank" not in told  # for which a rank would wait for five minutes
    assert_goes_on_alone(config, keys)
