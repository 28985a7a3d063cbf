"""The watchdog ends a process that hangs, and lets one go on that comes back."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from launching import ROOT

from hvdtrain.runtime.heartbeats import STACK_SIGNAL

BEGIN = """
import sys, time
from hvdtrain.runtime import watchdog
watchdog.LEAST, watchdog.UNKNOWN = 0.6, 5.0
def beats(dog, number, seconds, phase="steps"):
    for step in range(number):
        dog.beat(f"step {step}", phase)
        time.sleep(seconds)
"""


def run(body: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, "-c", BEGIN + body], capture_output=True, text=True, timeout=60, cwd=ROOT)


def test_it_adapts_to_the_steps_and_the_start_has_time() -> None:
    ended = run("""
with watchdog.Watchdog(None, 3) as dog:
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
with watchdog.Watchdog(1.0, 0, ending=watchdog.Ending(hung=77)) as dog:
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
with watchdog.Watchdog(None, 1) as dog:
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
with watchdog.Watchdog(2.0, 0) as dog:
    print("begins", flush=True)
    beats(dog, 20, 0.1)
print("done")
"""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + body], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"
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
with watchdog.Watchdog(None, 0):
    print("begins", flush=True)
    keep_the_lock()
"""
    with (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([sys.executable, "-c", BEGIN + body], stdout=subprocess.PIPE, stderr=err, text=True, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == "begins\n"

    deadline = time.monotonic() + 60
    try:
        while "in keep_the_lock" not in (tmp_path / "err").read_text():
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            process.send_signal(STACK_SIGNAL)  # again and again: the first one may come before the function is called
            time.sleep(0.1)
    finally:
        process.kill()
        process.communicate(timeout=60)
