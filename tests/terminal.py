"""A program with a terminal: a real one, of the system's kind (pty)."""

import codecs
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from launching import EMPTY, clean_environment


class Terminal:
    """A program with a terminal for all it prints and is typed."""

    def __init__(
        self,
        folder: Path,
        arguments: list[str],
        columns: int = 120,
        launcher: Sequence[str] = (),
        environment: Mapping[str, str] = EMPTY,
    ) -> None:
        self._end, inside = pty.openpty()
        self.resize(columns)
        self.process = subprocess.Popen(
            [*launcher, sys.executable, *arguments], cwd=folder, env=clean_environment() | dict(environment),
            stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
            preexec_fn=lambda: os.ttyname(0) and os.close(os.open(os.ttyname(0), os.O_RDWR)),  # it becomes the session's own
        )  # fmt: skip
        os.close(inside)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def resize(self, columns: int) -> None:
        """Give the terminal a width."""
        subprocess.run(["stty", "cols", str(columns), "rows", "24"], stdin=self._end, check=True)

    def read_until(self, pattern: str, seconds: float = 60) -> None:
        """Read until a pattern has come."""
        until = time.monotonic() + seconds
        while not re.search(pattern, self.text):
            assert time.monotonic() < until, self.text
            assert self._more(), self.text

    def read_to_end(self) -> int:
        """Read what is still to come; return the exit status."""
        while self._more():
            pass
        os.close(self._end)
        return self.process.wait(timeout=60)

    def type(self, keys: bytes) -> None:
        os.write(self._end, keys)

    def _more(self) -> bool:
        try:
            got = os.read(self._end, 4096)
        except OSError:  # the program has ended
            return False
        self.text += self._decoder.decode(got)  # what was read may end within a character
        return bool(got)


def screen(text: str) -> list[str]:
    """The lines that are left to be seen: a carriage return goes back to a line's beginning, and what follows replaces it."""
    lines = []
    for printed in text.split("\n"):
        shown = ""
        for part in printed.rstrip("\r").split("\r"):
            shown = part + shown[len(part) :]
        lines.append(shown.rstrip())
    return lines
