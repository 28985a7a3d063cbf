"""The mpirun that started this process on this host."""

from __future__ import annotations

import os
import re
from pathlib import Path

MPIRUN_OF_OPEN_MPI_5 = "prterun"

MPIRUN = ("mpirun", "mpiexec", "orterun", MPIRUN_OF_OPEN_MPI_5)


def print_through_mpirun(text: str) -> bool:
    """Print to the stderr of the mpirun that started this process on this host; return whether that was possible.

    After Ctrl-C or SIGTERM on a terminal, mpirun no longer forwards the output of its ranks.
    """
    process = Path(f"/proc/{os.getppid()}")
    try:
        if (process / "comm").read_text(encoding="utf-8").strip() not in MPIRUN:
            return False
        flags = re.search(r"^flags:\s*([0-7]+)", (process / "fdinfo/2").read_text(encoding="utf-8"), re.MULTILINE)
        if (process / "fd/2").is_file() and flags and not int(flags[1], 8) & os.O_APPEND:
            os.write(2, f"{text}\n".encode())  # forwarded: mpirun writes over what others append
            return True
        with open(process / "fd/2", "a", encoding="utf-8") as stderr:
            print(text, file=stderr, flush=True)
        return True
    except OSError:
        return False
