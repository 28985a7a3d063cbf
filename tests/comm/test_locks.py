"""The locks of the tests' workers (launching.py)."""

import fcntl
import os
import signal
from pathlib import Path

from launching import locked


def test_a_lock_is_free_again_though_a_process_that_was_forked_meanwhile_lives_on(tmp_path: Path) -> None:
    """It has a copy of the open file. With a lock that it kept, tests that run alone would wait for ever."""
    child = 0
    try:
        with locked(tmp_path / "lock", fcntl.LOCK_EX):
            child = os.fork()
            if child == 0:
                signal.pause()
        with locked(tmp_path / "lock", fcntl.LOCK_EX | fcntl.LOCK_NB):  # raises an error if it is not free
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
