"""The watchdog ends a process that hangs, and lets one continue that comes back."""

import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
from launching import ROOT
from thread_ranks import on_ranks

from hvdtrain.errors import DataError
from hvdtrain.plugins.watchdog.diagnosis import Diagnosis, Heartbeat
from hvdtrain.plugins.watchdog.hanging import STACK_SIGNAL
from hvdtrain.plugins.watchdog.open import exchange_contacts
from hvdtrain.plugins.watchdog.watchdog import JobWatchdog, _is_waiting
from hvdtrain.runtime.interrupt import Stopped

BEGIN = """
import sys, time
from hvdtrain.plugins.watchdog import watchdog
watchdog.LEAST, watchdog.UNKNOWN = 0.6, 5.0
def beats(dog, number, seconds, phase="steps"):
    for step in range(number):
        dog.beat(f"step {step}", phase)
        time.sleep(seconds)
"""


def run(body: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", BEGIN + body], capture_output=True, text=True, timeout=60, cwd=ROOT)


def begun(body: str, stderr: IO[str] | int) -> "subprocess.Popen[str]":
    """A process that runs, and has printed `begins`."""
    process = subprocess.Popen([sys.executable, "-c", BEGIN + body], stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
    return process


def test_it_adapts_to_the_steps_and_the_start_has_time() -> None:
    ended = run("""
with watchdog.JobWatchdog(None, 3) as dog:
    time.sleep(2)
    beats(dog, 3, 0.1)
    print("hangs", flush=True)
    dog.beat("step 3", "steps")
    time.sleep(30)
""")
    assert ended.returncode == 1
    assert ended.stdout == "hangs\n"
    # 20 times 0.1 s; it looks every second, and waits three for the reports of others
    assert re.search(r"rank 3: no progress for \d s \(watchdog_timeout\) in step 3; its threads:", ended.stderr)
    assert 'File "<string>"' in ended.stderr


def test_a_number_holds_for_steps_but_not_for_the_start() -> None:
    ended = run("""
class Restarting(watchdog.Launcher):
    hung_status = 77
with watchdog.JobWatchdog(1.0, 0, launcher=Restarting) as dog:
    time.sleep(2.5)
    dog.beat("step 0", "steps")
    time.sleep(30)
""")
    assert ended.returncode == 77  # that of a rank which may be started again
    assert re.search(r"rank 0: no progress for \d s \(watchdog_timeout\) in step 0", ended.stderr)


def test_who_comes_back_while_the_warning_runs_goes_on() -> None:
    ended = run("""
import threading
warned = threading.Event()
say = watchdog._print
watchdog._print = lambda text: (say(text), warned.set())
with watchdog.JobWatchdog(None, 1) as dog:
    beats(dog, 3, 0.01)
    warned.wait(50)
    beats(dog, 50, 0.1)
print("done")
""")
    assert (ended.returncode, ended.stdout) == (0, "done\n")
    assert re.search(r"rank 1: no progress for \d s", ended.stderr)
    assert "rank 1: makes progress again, in step" in ended.stderr


def test_a_process_that_was_suspended_goes_on() -> None:
    body = """
with watchdog.JobWatchdog(2.0, 0) as dog:
    print("begins", flush=True)
    beats(dog, 20, 0.1)
print("done")
"""
    process = begun(body, subprocess.PIPE)
    process.send_signal(signal.SIGSTOP)
    time.sleep(8)
    process.send_signal(signal.SIGCONT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, "done\n", "")


def test_code_that_keeps_pythons_lock_shows_its_stack_on_a_signal(tmp_path: Path) -> None:
    body = """
import re
def keep_the_lock():
    re.match("(a+)+$", 60 * "a" + "b")
with watchdog.JobWatchdog(None, 0):
    print("begins", flush=True)
    keep_the_lock()
"""
    with (tmp_path / "err").open("w") as err:
        process = begun(body, err)
    deadline = time.monotonic() + 60
    try:
        while "in keep_the_lock" not in (tmp_path / "err").read_text():
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            process.send_signal(STACK_SIGNAL)  # again and again: the first one may come before the function is called
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_an_error_of_its_own_does_not_end_it() -> None:
    ended = run("""
from hvdtrain.plugins.watchdog.heartbeats import Heartbeats
class Broken(Heartbeats):
    def listen(self, seconds):
        raise RecursionError("planted")
with watchdog.JobWatchdog(0.5, 3, Broken(3)) as dog:
    dog.beat("step 3", "steps")
    time.sleep(30)
""")
    assert ended.returncode == 1
    assert ended.stderr.count("rank 3: the watchdog had an error and keeps watching: RecursionError('planted')") == 1
    assert "rank 3: no progress for " in ended.stderr


@pytest.mark.parametrize("is_broken", [False, True])
def test_it_ends_a_process_whose_stderr_is_no_file(is_broken: bool) -> None:
    """As in a notebook, or where a test has put something in its place."""
    ended = run(f"""
import os
class Stream:
    def write(self, text):
        os.write(1, text.encode())
        assert not {is_broken}, "planted"
    def flush(self):
        pass
sys.stderr, sys.__stderr__ = Stream(), None
def hangs_here():
    time.sleep(30)
with watchdog.JobWatchdog(0.5, 3) as dog:
    dog.beat("step 3", "steps")
    hangs_here()
""")
    assert ended.returncode == 1
    assert "rank 3: no progress for " in ended.stdout
    assert "in hangs_here" in ended.stdout


@pytest.mark.parametrize(
    ("module", "waits"),
    [
        ("horovod.torch.mpi_ops", True),
        ("torch.cuda", True),
        ("hvdtrain.plugins.horovod.communicator", True),
        ("hvdtrain.commands", False),
        ("loss", False),
        (None, False),
    ],
)
def test_who_waits_is_told_by_modules_and_not_by_folders(module: str | None, waits: bool) -> None:
    """A user's code may be in a folder called horovod."""
    began: list[int] = []
    ends: list[int] = []
    code = "def work():\n    began.append(1)\n    while not ends:\n        sleep(0.01)"  # it calls no functions of Python
    space = {"__name__": module, "began": began, "ends": ends, "sleep": time.sleep}
    exec(compile(code, "/home/me/horovod/loss.py", "exec"), space)
    thread = threading.Thread(target=space["work"])
    thread.start()
    while not began:
        time.sleep(0.01)
    try:
        assert _is_waiting(thread.ident or 0) == waits
    finally:
        ends.append(1)
        thread.join()


@pytest.mark.parametrize(
    ("error", "everywhere"), [(Stopped("stopped by SIGTERM"), True), (DataError("of one rank"), False), (ValueError(), False)]
)
def test_who_ends_with_an_error_of_all_ranks_has_not_failed(error: Exception, everywhere: bool) -> None:
    """Others may still be in a callback, or wait where the ranks disconnect."""
    first, second = on_ranks(
        2, lambda comm: exchange_contacts(comm.rank, ["127.0.0.1"], lambda own: comm.gather(own, name="watchdog"))
    )
    with suppress(type(error)), JobWatchdog(None, 1, second):
        raise error
    first.listen(2.0)
    waits = Heartbeat("closing the job", 4.0, 6, True, False)
    assert first.conclude(waits) == (None if everywhere else Diagnosis(gone=(1,), ends=True))
    first.close()


def test_who_is_silent_while_another_one_waits_is_in_no_callback(tmp_path: Path) -> None:
    """A rank that is stopped has no half hour. Both ranks are in one process here, which is killed in the end for rank 1."""
    ended = run("""
sys.path.insert(0, "tests")
from thread_ranks import on_ranks
from hvdtrain.plugins.watchdog import hanging, heartbeats
from hvdtrain.plugins.watchdog.open import exchange_contacts
heartbeats.SILENT, watchdog.UNKNOWN = 1.0, 60.0
hanging.STACK_SIGNAL = 0  # the stacks of threads that run could crash this process before it is killed
def exchange(comm):
    return exchange_contacts(comm.rank, ["127.0.0.1"], lambda own: comm.gather(own, name="watchdog"))
first, second = on_ranks(2, exchange)
space = {"__name__": "hvdtrain.plugins.horovod.communicator", "second": second, "sleep": time.sleep, "time": time.monotonic}
space["sign"] = heartbeats.Heartbeat("on_stop of a callback", 1.0, 6, False, False)
exec('''
def wait():
    until = time() + 4
    while time() < until:
        second.send(sign)
        sleep(0.01)
    print("has time", flush=True)
    while True:
        sleep(0.1)
''', space)
with watchdog.JobWatchdog(1.5, 0, first) as dog:
    dog.beat("on_stop of a callback", "unhurried")
    space["wait"]()
""")
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout == "has time\n"
    assert re.search(r"rank 1 on \S+ has sent no heartbeat for \d+ s \(last in on_stop of a callback\)", ended.stderr)
