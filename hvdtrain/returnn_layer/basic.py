"""`returnn.util.basic`: the small helpers that configs use."""

from __future__ import annotations

import getpass
import os
import socket

__all__ = ["cf", "get_fwd_compat_kwargs", "get_hostname", "get_login_username", "hms", "human_bytes_size", "human_size"]


def get_login_username() -> str:
    """Who runs the program; the number of the user where the system has no name for it, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


def get_hostname() -> str:
    return socket.gethostname()


def get_fwd_compat_kwargs() -> dict[str, None]:
    """What RETURNN passes to a config's functions so that they take further arguments: nothing here."""
    return {}


def cf(filename: str) -> str:
    """The file itself; hvdtrain's key `cache_dir` copies data files to a local disk."""
    return filename


def hms(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> hms(3725.4)
    '1:02:05'
    """
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def human_size(number: float, factor: int = 1000, frac: float = 0.8, prec: int = 1) -> str:
    """A number with K, M, G or T.

    >>> human_size(12), human_size(123_456)
    ('12', '123.5K')
    """
    units = ["", "K", "M", "G", "T"]
    while len(units) > 1 and abs(number) >= factor * frac:
        number /= factor
        units.pop(0)
    return f"{number}{units[0]}" if units[0] == "" else f"{number:.{prec}f}{units[0]}"


def human_bytes_size(number: float, factor: int = 1024, frac: float = 0.8, prec: int = 1) -> str:
    """Bytes with KB, MB, GB or TB."""
    return human_size(number, factor, frac, prec) + "B"
