"""What docs/debugging.md says: a debugger on one rank, and the stacks of a process that continues."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import ROOT, TOY, clean_environment

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"} if os.geteuid() == 0 else {}
MPIRUN = ["mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe"]


def command(config: Path, corpus: Path, folder: Path, **more: object) -> list[str]:
    keys = {"corpus": corpus, "model": folder / "model", **more}
    return [sys.executable, "-m", "hvdtrain", str(config), *(text for key in keys for text in (f"++{key}", str(keys[key])))]


@pytest.mark.parametrize("launcher", ["ngpu", "mpirun"])
def test_a_breakpoint_of_rank_1_gets_input(corpus: Path, tmp_path: Path, launcher: str) -> None:
    source = TOY.read_text(encoding="utf-8")
    body = "    context = hvdtrain.get_run_ctx()"
    assert body in source
    stop = "    if hvdtrain.rank() == 1 and not hasattr(model, 'seen'):\n        model.seen = True\n        breakpoint()\n"
    config = tmp_path / "config.py"
    config.write_text(source.replace(body, stop + body), encoding="utf-8")
    if launcher == "ngpu":
        arguments = command(config, corpus, tmp_path, ngpu=2)
    else:
        arguments = [*MPIRUN, "--stdin", "1", *command(config, corpus, tmp_path, use_horovod=1)]
    finished = subprocess.run(
        arguments,
        input="p 'rows', len(extern_data['data'].seq_lens)\nc\n",
        env=clean_environment() | AS_ROOT,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=120,
        check=True,
    )
    assert "(Pdb) ('rows', 6)" in finished.stdout
    assert "Finished training in epoch 1." in finished.stdout


def test_a_signal_prints_the_stacks_of_a_process_that_goes_on(corpus: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as file:
        training = subprocess.Popen(
            command(TOY, corpus, tmp_path, num_epochs=100_000),
            env=clean_environment(),
            cwd=ROOT,
            stdout=file,
            stderr=file,
        )
        try:
            while "start epoch 2" not in log.read_text() and training.poll() is None:
                time.sleep(0.2)
            os.kill(training.pid, signal.SIGRTMIN + 7)
            while "most recent call first" not in log.read_text() and training.poll() is None:
                time.sleep(0.1)
            reached = log.read_text().count("start epoch")
            while log.read_text().count("start epoch") <= reached + 1 and training.poll() is None:
                time.sleep(0.1)
            assert training.poll() is None, log.read_text()
        finally:
            training.kill()
            training.wait()
    assert "hvdtrain/engine.py" in log.read_text()
    assert "hvdtrain/plugins/watchdog/watchdog.py" in log.read_text(), "of all threads"
