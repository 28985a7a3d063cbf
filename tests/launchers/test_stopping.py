"""Signals and the time limit end a training with a checkpoint, and with a status that says whether to continue."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from launching import ROOT, TOY, faults, hvdtrain, mpi_version

from hvdtrain.plugins.report.state import SILENT, State, read_state
from hvdtrain.runtime.interrupt import Interrupt, InterruptKeys, seconds_of

LONG: dict[str, object] = {"num_epochs": 4000, "learning_rate": 1e-4}


def start(model: Path, corpus: Path, ranks: int | None = None, config: Path = TOY, **overrides: object) -> subprocess.Popen[str]:
    """Start a training and wait until it has saved its second epoch."""
    command = [sys.executable, "-m", "hvdtrain", str(config)]
    for name, value in {**LONG, "corpus": corpus, "model": model, **overrides}.items():
        command += [f"++{name}", str(value)]
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    if ranks is not None:
        command = ["mpirun", "-np", str(ranks), "--bind-to", "none", "--oversubscribe", *command, "++use_horovod", "1"]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 100
    while not model.with_name("model.002.pt").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.01)
    return process


def saved_within(folder: Path) -> list[Path]:
    return [path for path in folder.glob("model.*.step-*.pt") if ".opt." not in path.name and ".rank-" not in path.name]


def state(folder: Path, seconds: float = 0.0) -> State:
    """What a report says of the training in a folder, some seconds from now."""
    return read_state(folder, "model", is_complete=False, now=time.time() + seconds)


def continues(corpus: Path, folder: Path, out: str, **overrides: object) -> None:
    """The same command continues and ends with the weights of a training in one go."""
    epoch = int(out.split("in epoch ")[1].split()[0])
    keys = {**LONG, "corpus": corpus, "num_epochs": epoch, **overrides}
    continued = hvdtrain(TOY, {**keys, "model": folder / "model"})
    assert continued.status == 0, continued.err
    assert f"training continues in epoch {epoch}, after its step" in continued.out
    whole = hvdtrain(TOY, {**keys, "model": folder / "whole"})
    assert whole.status == 0, whole.err
    one, other = (torch.load(folder / f"{name}.{epoch:03d}.pt", weights_only=True)["model"] for name in ("model", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("how", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_one_process_stops_with_a_checkpoint(corpus: Path, tmp_path: Path, how: signal.Signals, status: int) -> None:
    process = start(tmp_path / "model", corpus)
    os.kill(process.pid, how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert err.startswith(f"stopped by {how.name} in epoch ")
    assert err.count("\n") == 1
    assert len(saved_within(tmp_path)) == 1
    ended = state(tmp_path)
    assert (ended.name, ended.by) == ("stopped", "rank 0")
    assert ended.why == err.strip()
    continues(corpus, tmp_path, err)
    assert state(tmp_path).name == "finished"


def test_a_killed_process_goes_on_from_its_last_checkpoint(corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "model", corpus, save_interval_steps=7)
    time.sleep(0.05)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate(timeout=60)
    assert [state(tmp_path, seconds).name for seconds in (0, SILENT + 10)] == ["running", "lost"]
    epoch = max(int(path.name.split(".")[1]) for path in tmp_path.glob("model.*.pt")) + 1
    keys = {**LONG, "corpus": corpus, "num_epochs": epoch}
    assert hvdtrain(TOY, {**keys, "model": tmp_path / "model"}).status == 0
    assert hvdtrain(TOY, {**keys, "model": tmp_path / "whole"}).status == 0
    one, other = (torch.load(tmp_path / f"{name}.{epoch:03d}.pt", weights_only=True)["model"] for name in ("model", "whole"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_usr1_to_mpirun_stops_all_ranks_once(corpus: Path, tmp_path: Path) -> None:
    process = start(tmp_path / "model", corpus, ranks=2)
    os.kill(process.pid, signal.SIGUSR1)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 75
    assert err.count("stopped by SIGUSR1 in epoch") == 1
    assert "Traceback" not in err
    assert len(saved_within(tmp_path)) == 1


@pytest.mark.parametrize("how", [pytest.param(signal.SIGTERM, marks=pytest.mark.soak), signal.SIGINT])
def test_sigterm_and_ctrl_c_to_mpirun_leave_time_for_a_checkpoint_if_it_has_to_wait(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    """Twice these seconds: before mpirun sends SIGTERM to the ranks, and before it kills them. It does not read their output
    meanwhile: nothing may be printed, as a toy training prints 16 KB within seconds.
    """
    if not mpi_version().startswith("4."):
        pytest.skip(f"Open MPI {mpi_version()} has no odls_base_sigkill_timeout")
    monkeypatch.setenv("OMPI_MCA_odls_base_sigkill_timeout", "5")
    process = start(tmp_path / "model", corpus, ranks=2, log_verbosity=0)
    os.kill(process.pid, how)
    _, err = process.communicate(timeout=100)
    assert process.returncode == 1
    assert len(saved_within(tmp_path)) == 1
    assert err.count("SIGTERM from mpirun, as after Ctrl-C: it kills the ranks 5 s later and returns 1.") == 1, err
    assert err.count("stopped by SIGTERM in epoch") == 1
    assert state(tmp_path).name == "stopped"


def test_sigterm_ends_a_step_that_hangs(corpus: Path, tmp_path: Path) -> None:
    """In a worker process: the step waits for it, and would wait for 20 times the longest step without the signal."""
    config = tmp_path / "config.py"
    config.write_text(
        TOY.read_text()
        + """
import hvdtrain.plugins.watchdog.watchdog as watchdog


def hanging(arrays, *, epoch):
    time.sleep(600 if epoch == 3 else 0)
    return arrays


watchdog.LEAST, watchdog.TIMES = 3.0, 1e6
train = {"class": "MapDataset", "dataset": train, "map_seq": hanging, "num_workers": 1}
"""
    )
    with start(tmp_path / "model", corpus, config=config) as process:
        time.sleep(2)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        out, err = process.communicate(timeout=100)
    assert process.returncode == 1, out + err
    assert 1 < time.monotonic() - began < 60
    assert "(watchdog_timeout) in epoch 3, step 0; its threads:" in err


def test_the_time_limit_stops_all_ranks(corpus: Path, tmp_path: Path) -> None:
    limits = {"time_limit": "00:01:03", "time_limit_margin": 60}
    finished = hvdtrain(TOY, {**LONG, **limits, "corpus": corpus, "model": tmp_path / "model", "use_horovod": 1}, ranks=2)
    assert finished.status == 75
    assert finished.err.count("stopped by time_limit in epoch") == 1
    assert len(saved_within(tmp_path)) == 1


def test_a_loss_that_is_no_number_is_reported_with_its_rank(corpus: Path, tmp_path: Path) -> None:
    common = {"corpus": corpus, "model": tmp_path / "model", "use_horovod": 1, "fault": "nan,1,5", "max_seqs": 4}
    finished = hvdtrain(TOY, {**common, "save_interval_steps": 4}, ranks=2)
    assert finished.status == 2
    assert finished.err.count("rank 1: ce = nan in step 5 of epoch 1, sequences seq-") == 1
    assert "none, so the loss itself is the cause" in finished.err
    assert state(tmp_path).name == "failed"
    assert "rank 1: ce = nan in step 5 of epoch 1" in state(tmp_path).why
    assert [path.name for path in saved_within(tmp_path)] == ["model.001.step-4.pt"]  # nothing broken was saved
    skipped = hvdtrain(TOY, {**common, "num_allowed_consec_invalid_gradient_steps": 1, "num_epochs": 2}, ranks=2)
    assert skipped.status == 0, skipped.err
    assert "training continues in epoch 1, after its step 4" in skipped.out
    model = torch.load(tmp_path / "model.002.pt", weights_only=True)["model"]
    assert model["first.weight"].isfinite().all()


def test_a_signal_that_comes_twice_by_hand_ends_at_once() -> None:
    with Interrupt(None) as interrupt:
        with pytest.raises(KeyboardInterrupt):  # no signal yet that there is something to save
            signal.raise_signal(signal.SIGINT)
        interrupt.defer()
        signal.raise_signal(signal.SIGUSR1)
        assert interrupt.reason == "SIGUSR1"
        signal.raise_signal(signal.SIGINT)
        assert interrupt.reason == "SIGINT"
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler


def test_time_limits() -> None:
    assert [seconds_of(text) for text in ("10", "1:30", "1:00:00", "2-01:00:00", 90)] == [10, 90, 3600, 176400, 90]
    for text in ("", "1:", "a", "1:2:3:4", "x-1:00"):
        with pytest.raises(ValueError, match=r"not a time|could not convert"):
            seconds_of(text)
    keys = InterruptKeys(time_limit=60)
    assert faults(keys.problems()) == ["time_limit_margin: conflict"]
    now = [0.0]
    interrupt = Interrupt(InterruptKeys(time_limit="2:00").seconds, clock=lambda: now[0])
    assert interrupt.reason is None
    now[0] = 60.0
    assert interrupt.reason == "time_limit"


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_job_starts_ends_it_at_once(corpus: Path, tmp_path: Path, how: signal.Signals) -> None:
    more = tmp_path / "more.py"
    more.write_text(f"import signal\ndef startup_callback(**_):\n    signal.raise_signal({how.value})\n    1 / 0\n")
    ended = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model"}, options=[str(more)])
    assert (ended.status, ended.err) == (75, f"stopped by {how.name} before the first step; the same command starts again\n")
    assert (state(tmp_path).name, list(tmp_path.glob("*.pt"))) == ("stopped", [])
