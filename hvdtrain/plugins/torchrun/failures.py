"""The error that ended an attempt of torchrun, recorded for the next attempt: torchrun restarts ranks after any failure."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Failure:
    """An error that ended a job, and would end it again.

    Attributes:
        status: the exit status of the rank.
        text: the rank and its message.
    """

    status: int
    text: str

    @property
    def refusal(self) -> str:
        """Why the next attempt does not train."""
        return f"not started again after an error that would only repeat (see above): {self.text}"


def record(environ: Mapping[str, str], failure: Failure) -> None:
    """Record an error for the next attempt of torchrun. The first one counts."""
    path = _path(environ)
    if path is not None:
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{failure.status}\n{failure.text}")
        except OSError:
            pass  # another rank was first, or the folder is gone; then torchrun restarts the ranks as usual


def read(environ: Mapping[str, str]) -> Failure | None:
    """The error that ended an earlier attempt of the same torchrun."""
    path = _path(environ)
    if path is None or not path.exists():
        return None
    status, _, text = path.read_text(encoding="utf-8").partition("\n")
    return Failure(int(status) if status.isdigit() else 1, text)


def print_refusal(environ: Mapping[str, str], failure: Failure) -> None:
    """Print why this attempt of torchrun ends at once, unless another rank of the host prints it."""
    attempt = _attempt(environ)
    if attempt is None:
        return
    try:
        (attempt / "hvdtrain-reported").open("x").close()  # one rank creates it, and the ranks look at the same moment
    except FileExistsError:
        return
    except OSError:
        pass  # then every rank prints it
    sys.stderr.write(f"{failure.refusal}\n")
    sys.stderr.flush()


def _path(environ: Mapping[str, str]) -> Path | None:
    """The file of `record`. It is next to the folders of the attempts; every torchrun creates these on its host."""
    attempt = _attempt(environ)
    return None if attempt is None else attempt.parent / "hvdtrain-error"


def _attempt(environ: Mapping[str, str]) -> Path | None:
    """The folder of this attempt of a torchrun that may restart its ranks."""
    parents = Path(environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    if not max_restarts(environ) or len(parents) < 3 or not parents[1].name.startswith("attempt_"):
        return None
    return parents[1]


def max_restarts(environ: Mapping[str, str]) -> int:
    """How often torchrun may restart its ranks.

    >>> max_restarts({"TORCHELASTIC_MAX_RESTARTS": "3"}), max_restarts({})
    (3, 0)
    """
    text = environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(text) if text.isdigit() else 0


def cause_in(message: str) -> str:
    """The error of a traceback, without the lines that were added to it; any other message as it is."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines[:-1]) if line.startswith("  ")]
    return lines[frames[-1] + 1] if frames and "Traceback (most recent call last):" in lines else message
