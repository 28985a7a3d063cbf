"""Asking other programs: a command's output, and what a fresh Python process says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from hvdtrain.comm import launch

OF_A_LAUNCHER = ("OMPI_", "PMIX_", "PMI_", "ORTE_", "HYDI_", "HYDRA_", "MPI_LOCAL")
"""Variables by which an MPI process finds its job: a child that kept them would join it as a rank."""


def environment_alone() -> dict[str, str]:
    """This process's environment without what makes a child a rank of the same MPI job."""
    return {name: value for name, value in launch.environment().items() if not name.startswith(OF_A_LAUNCHER)}


def output(command: Sequence[str], seconds: float = 20) -> tuple[int | None, str]:
    """A command's exit status and what it printed, standard error last; None where it is not there or takes too long."""
    try:
        done = subprocess.run(
            command, env=environment_alone(), capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        return None, f"{command[0]}: not found"
    except subprocess.TimeoutExpired:
        return None, f"{command[0]}: no answer within {seconds:.0f} s"
    except OSError as error:
        return None, f"{command[0]}: {error}"
    return done.returncode, (done.stdout + done.stderr).strip()


class PythonProbe:
    """A Python process of its own that prints a dict as JSON: importing a framework there leaves none of it in this one.

    Args:
        code: puts what it finds out into the dict `found`.
    """

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"import json\nfound = {{}}\n{code}\nprint('found:' + json.dumps(found))"],
            env=environment_alone(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def result(self, seconds: float = 120) -> tuple[dict[str, Any] | None, str]:
        """What it found, or None and the last line of the error."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
            return None, f"no answer within {seconds:.0f} s"
        found = [line.removeprefix("found:") for line in out.splitlines() if line.startswith("found:")]
        if found:
            answer: dict[str, Any] = json.loads(found[-1])
            return answer, ""
        return None, (err.strip().splitlines() or [f"ended with status {self._process.returncode}"])[-1]
