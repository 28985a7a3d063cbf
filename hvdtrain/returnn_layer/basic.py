"""`returnn.forward_iface`, `returnn.log`, `returnn.util.basic`, `returnn.util.file_cache`: small helpers that configs import."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Any

from hvdtrain.runtime import log as program_log

__all__ = [
    "NotSpecified",
    "cf",
    "get_fwd_compat_kwargs",
    "get_hostname",
    "get_login_username",
    "hms",
    "human_bytes_size",
    "human_size",
]


class ForwardCallbackIface:
    """Base class for a config's forward_callback, which receives the outputs of the task forward."""

    def init(self, *, model: Any) -> None:
        """Called once before the first sequence."""

    def process_seq(self, *, seq_tag: str, outputs: Any) -> None:
        """Called for every sequence. `outputs` is a TensorDict whose raw tensors are numpy arrays without padding."""

    def finish(self) -> None:
        """Called once after the last sequence."""


class Stream:
    """A text stream whose lines go to the log, with a `log_verbosity` from which they are shown."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._rest = ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            program_log.write(self._level, line)
        return len(text)

    def flush(self) -> None:
        """Does nothing: whole lines are logged at once, and an unfinished line waits for its end."""


class Log:
    """Streams for the verbosity levels 1 to 5."""

    def __init__(self) -> None:
        self.v1, self.v2, self.v3, self.v4, self.v5 = self.v = [Stream(level) for level in range(1, 6)]
        self.error = self.v1

    def print_warning(self, text: str, prefix_text: str = "WARNING:", extra_text: str | None = None) -> None:
        program_log.warning(f"{prefix_text} {text}{'' if extra_text is None else f' {extra_text}'}")

    def print_deprecation_warning(self, text: str) -> None:
        self.print_warning(text, prefix_text="DEPRECATION WARNING:")


log = Log()


def get_login_username() -> str:
    """The name of the user; the user id if the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def get_hostname() -> str:
    return socket.gethostname()


def get_fwd_compat_kwargs() -> dict[str, None]:
    """Arguments that RETURNN adds to calls of config functions, so that these accept new ones; hvdtrain adds none."""
    return {}


def cf(filename: str) -> str:
    """Returns the file name unchanged: hvdtrain's key `cache_dir` copies data files to a local disk."""
    return filename


class CachedFile(str):
    """The name of a data file in a dataset dict. RETURNN copies such files to a local disk, hvdtrain all files if `cache_dir` is
    set.
    """

    @property
    def filename(self) -> str:
        return str(self)


class NotSpecified:
    """The default of an argument for which None has a meaning."""


def hms(seconds: float) -> str:
    """Format seconds as hours, minutes and seconds.

    >>> hms(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def human_size(number: float, factor: int = 1000, frac: float = 0.8, prec: int = 1) -> str:
    """Format a number with the unit K, M, G or T.

    >>> human_size(12), human_size(123_456)
    ('12', '123.5K')
    """
    units = ["", "K", "M", "G", "T"]
    while len(units) > 1 and abs(number) >= factor * frac:
        number /= factor
        units.pop(0)
    return f"{number}{units[0]}" if units[0] == "" else f"{number:.{prec}f}{units[0]}"


def human_bytes_size(number: float, factor: int = 1024, frac: float = 0.8, prec: int = 1) -> str:
    """Format a number of bytes with the unit KB, MB, GB or TB."""
    return human_size(number, factor, frac, prec) + "B"
