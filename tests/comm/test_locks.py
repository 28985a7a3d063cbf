"""The locks of the tests' workers (launching.py)."""

import fcntl
import os
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
from launching import locked


def test_a_lock_is_free_again_though_a_process_that_was_forked_meanwhile_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has a copy of the open file. With a lock that it kept, tests that run alone would wait for ever."""
    run = uuid.uuid4().hex
    monkeypatch.setenv("PYTEST_XDIST_TESTRUNUID", run)
    child = 0
    try:
        with locked("fork", fcntl.LOCK_EX):
            child = os.fork()
            if child == 0:
                signal.pause()
        with locked("fork", fcntl.LOCK_EX | fcntl.LOCK_NB):  # raises an error if it is not free
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        Path(tempfile.gettempdir(), f"hvdtrain-tests-{run}.fork.lock").unlink()
