"""Ranks that a calling program starts: a function runs on each of them, and rank 0's value, or an error, comes back.

The program and its ranks share a folder for the time of the call: `job` says what to do, rank 0 adds lines to `log` and writes
`result`, and a rank that fails writes `error-RANK`. The processes are those of `local.py`, which ends them all if one fails.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from hvdtrain.comm import launch, local
from hvdtrain.comm.child import end_with
from hvdtrain.comm.launchers import Launch
from hvdtrain.config.source import MODULE_NAME, resolve
from hvdtrain.errors import ConfigError, HvdtrainError, PeerFailure, TrainingError

PROGRAM = ("-c", "import sys; from hvdtrain.comm.spawn import on_rank; sys.exit(on_rank(sys.argv[1]))")
"""Of Python's arguments, those that start a rank."""

SECONDS_FOR_THE_CAUSE = 1.0
"""How long a rank that fails because of another one waits: the launcher ends it meanwhile."""

NOWHERE = ("__main__", "__mp_main__", MODULE_NAME)
"""Modules that no other process can import."""

LOGGER = logging.getLogger("hvdtrain")


class NotImportable(Exception):
    """A value contains a function or a class that no other process can import; the message names it."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and (value.__module__ in NOWHERE or "<" in value.__qualname__):
            raise NotImportable(f"{value.__qualname__} of {value.__module__}")
        return NotImplemented


def packed(value: Any) -> bytes:
    """A value for another process. Raises: NotImportable."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except NotImportable:
        raise
    except Exception as error:  # pickle raises PicklingError, TypeError, AttributeError, ..., and an object whatever it wants
        raise NotImportable(f"{type(value).__name__} ({error})") from None
    return buffer.getvalue()


@dataclass(frozen=True)
class _Job:
    path: list[str]
    level: int
    function: str
    arguments: bytes


class RankTraceback(Exception):
    """The traceback of an error on a rank, as text: the cause of the error that the program gets."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def call_on_ranks(
    wanted: list[Launch], function: str, arguments: Mapping[str, Any], again: local.Again = local.never, signals: bool = False
) -> Any:
    """Start ranks, which call a function, and wait for their end; return rank 0's value.

    Lines of rank 0's log go to this process's logger `hvdtrain`.

    Args:
        function: 'module:name'.
        arguments: its keyword arguments, which can be packed.
        again: which ranks to start again after a failure.
        signals: forward SIGINT, SIGTERM and the like to the ranks; otherwise a KeyboardInterrupt here ends them at once.

    Raises:
        Exception: what a rank raised first, with that rank's traceback as its cause.
        TrainingError: a rank ended without a word, such as by a signal.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-call-") as name:
        folder = Path(name)
        job = _Job(sys.path, LOGGER.getEffectiveLevel(), function, packed(dict(arguments)))
        (folder / "job").write_bytes(pickle.dumps(job))
        said: list[str] = []
        is_main = threading.current_thread() is threading.main_thread()  # Python sets signal handlers only there
        with _Log(folder / "log") as log:
            status = local.run(
                wanted,
                [name],
                launch.environment(),
                again,
                program=PROGRAM,
                signals_to_forward=local.FORWARDED_SIGNALS if signals and is_main else (),
                report=said.append,
                while_waiting=log.take,
            )
        if status == 0:
            return pickle.loads((folder / "result").read_bytes())
        _raise_error(folder, len(wanted))
        how = "; ".join(line.strip() for line in said) or f"exit status {status}, without an error (see what the ranks printed)"
        raise TrainingError(f"ranks: expected {len(wanted)} ranks to come to their end, got {how}")


def _raise_error(folder: Path, size: int) -> None:
    """Raise what the first rank to fail has left, if any has."""
    found = [pickle.loads(path.read_bytes()) for path in folder.glob("error-*") if path.suffix != ".unfinished"]
    if not found:
        return
    _, rank, text, stored = min(found, key=lambda one: one[:2])
    error = pickle.loads(stored)
    if not isinstance(error, HvdtrainError):  # whose message says it all
        error.add_note(f"on rank {rank} of {size}")
        raise error from RankTraceback(text)
    raise error


class _Log:
    """Follows the file with rank 0's log; a context manager that takes what is left at its end."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open(encoding="utf-8")
        self._begun = ""

    def __enter__(self) -> _Log:
        return self

    def __exit__(self, *_: object) -> None:
        self.take()
        self._file.close()

    def take(self) -> None:
        """Log the lines that have come since the last call."""
        *lines, self._begun = (self._begun + self._file.read()).split("\n")
        for line in lines:
            level, message = json.loads(line)
            LOGGER.log(level, "%s", message)


class _ToProgram(logging.Handler):
    """Adds records to the file that the program follows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(json.dumps([record.levelno, record.getMessage()]) + "\n")
        self._file.flush()


def on_rank(name: str) -> int:
    """The main function of a rank. Returns its exit status, or exits at once if it fails alone.

    Args:
        name: of the folder that it shares with the program.
    """
    folder, launcher = Path(name), launch.launcher()
    rank = launcher.process.rank
    end_with(launcher.parent)
    try:
        job = pickle.loads((folder / "job").read_bytes())
        sys.path[:] = job.path
        LOGGER.propagate = False
        LOGGER.addHandler(logging.NullHandler() if rank else _ToProgram(folder / "log"))
        LOGGER.setLevel(job.level)
        value = resolve(job.function)(**_arguments(job))
        if rank == 0:
            _write(folder / "result", packed(value))
        launcher.on_success()
        return 0
    except PeerFailure:
        time.sleep(SECONDS_FOR_THE_CAUSE)
        os._exit(launcher.peer_status)
    except BaseException as error:
        _write(folder / f"error-{rank}", pickle.dumps((time.time(), rank, traceback.format_exc(), _stored(error))))
        sys.stdout.flush()
        status = error.status if isinstance(error, HvdtrainError) else 1
        if not (isinstance(error, HvdtrainError) and error.on_every_rank):
            os._exit(status)  # without disconnecting, so that those who wait for this rank are ended
        return status


def _arguments(job: _Job) -> dict[str, Any]:
    try:
        return dict(pickle.loads(job.arguments))
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(
            "cannot-import", f"ranks: expected functions and classes that each rank can import, got: {error}"
        ) from error


def _stored(error: BaseException) -> bytes:
    """The error for the program; one that cannot be packed as a RuntimeError with its type and message."""
    try:
        stored = packed(error)
        pickle.loads(stored)
        return stored
    except Exception:  # of a class of the config's, or one whose constructor takes other arguments
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _write(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f"{path.name}.unfinished")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
