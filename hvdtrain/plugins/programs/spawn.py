"""Ranks for a calling program: a function runs on each of them, and rank 0's value, or an error, is returned.

The program and its ranks share a folder during the call: `job` holds the function and its arguments, rank 0 appends lines to
`log` and writes `result`, and a rank that fails writes `error-RANK`. `local_ranks` runs the processes, and ends all if one fails.
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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.comm.child import end_with
from hvdtrain.comm.launchers import SECONDS_FOR_THE_CAUSE, Place
from hvdtrain.config.references import resolve
from hvdtrain.config.source import MODULE_NAME
from hvdtrain.disk.atomic import UNFINISHED, write_atomically
from hvdtrain.errors import STOP_SIGNALS, ConfigError, HvdtrainError, PeerFailure, TrainingError
from hvdtrain.plugins.local_ranks.processes import RestartRule, launch

PROGRAM = ("-c", "import sys; from hvdtrain.plugins.programs.spawn import on_rank; sys.exit(on_rank(sys.argv[1]))")
"""Python's arguments that start a rank."""

NOT_IMPORTABLE = ("__main__", "__mp_main__", MODULE_NAME)
"""Modules that no other process can import."""

LOGGER = logging.getLogger("hvdtrain")


class NotImportable(Exception):
    """A value contains a function or a class that no other process can import; the message names it."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType | type) and (value.__module__ in NOT_IMPORTABLE or "<" in value.__qualname__):
            raise NotImportable(f"{value.__qualname__} of {value.__module__}")
        return NotImplemented


def pack(value: Any) -> bytes:
    """Pickle a value for another process. Raises: NotImportable."""
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    except NotImportable:
        raise
    except Exception as error:  # PicklingError, TypeError, AttributeError, ..., or what the value's own code raises
        raise NotImportable(f"{type(value).__name__} ({error})") from None
    return buffer.getvalue()


def pack_with_code(value: Any) -> bytes:
    """As `pack`; functions and classes that no other process can import, such as those of a notebook, are sent with their code,
    if the package cloudpickle is installed. Raises: NotImportable."""
    try:
        return pack(value)
    except NotImportable as error:
        if find_spec("cloudpickle") is None:
            raise NotImportable(f"{error}, without the package cloudpickle") from None
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps(value)
    except Exception as error:  # of any value in it
        raise NotImportable(f"{type(value).__name__} ({error})") from None
    return packed


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
    places: list[Place], function: str, arguments: Mapping[str, Any], restarts: RestartRule, signals: bool = False
) -> Any:
    """Start ranks that call a function, and wait until they end; return rank 0's value.

    Lines of rank 0's log go to this process's logger `hvdtrain`.

    Args:
        function: 'module:name'.
        arguments: its keyword arguments, which `pack_with_code` accepts.
        restarts: decides which ranks to restart after a failure.
        signals: forward SIGINT, SIGTERM and the like to the ranks; otherwise a KeyboardInterrupt here ends them at once.

    Raises:
        Exception: the first error of a rank, with that rank's traceback as its cause.
        TrainingError: a rank ended without an error, for example by a signal.
    """
    with tempfile.TemporaryDirectory(prefix="hvdtrain-call-") as name:
        folder = Path(name)
        job = _Job(sys.path, LOGGER.getEffectiveLevel(), function, pack_with_code(dict(arguments)))
        (folder / "job").write_bytes(pickle.dumps(job))
        reported: list[str] = []
        is_main = threading.current_thread() is threading.main_thread()  # Python sets signal handlers only there
        with _following(folder / "log") as forward:
            status = launch(
                places,
                [name],
                this_process.environment(),
                restarts,
                program=PROGRAM,
                signals_to_forward=STOP_SIGNALS if signals and is_main else (),
                report=reported.append,
                while_waiting=forward,
            )
        if status == 0:
            return pickle.loads((folder / "result").read_bytes())
        _raise_error(folder, len(places))
        ends = "; ".join(map(str.strip, reported)) or f"exit status {status}, without an error (see what the ranks printed)"
        raise TrainingError(f"ranks: expected {len(places)} ranks to complete, got {ends}")


def _raise_error(folder: Path, size: int) -> None:
    """Raise the error of the first rank that failed, if any left one."""
    errors = [pickle.loads(path.read_bytes()) for path in folder.glob("error-*") if path.suffix != UNFINISHED]
    if not errors:
        return
    _, rank, text, stored = min(errors, key=lambda error: error[:2])  # by time and rank
    error = pickle.loads(stored)
    if not isinstance(error, HvdtrainError):  # the message of an HvdtrainError is complete
        error.add_note(f"on rank {rank} of {size}")
        raise error from RankTraceback(text)
    raise error


@contextmanager
def _following(path: Path) -> Iterator[Callable[[], None]]:
    """Yields a function that logs the new lines in the file of rank 0's log; the rest are logged at the end."""
    path.touch()
    unfinished = ""
    with path.open(encoding="utf-8") as file:

        def forward() -> None:
            nonlocal unfinished
            *lines, unfinished = (unfinished + file.read()).split("\n")
            for line in lines:
                level, message = json.loads(line)
                LOGGER.log(level, "%s", message)

        try:
            yield forward
        finally:
            forward()


class _FileHandler(logging.Handler):
    """Appends records to the file that the program follows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._file = path.open("a", encoding="utf-8")

    def emit(self, record: logging.LogRecord) -> None:
        self._file.write(json.dumps([record.levelno, record.getMessage()]) + "\n")
        self._file.flush()


def on_rank(name: str) -> int:
    """The main function of a rank. Returns its exit status, or exits at once if it fails alone.

    Args:
        name: of the folder shared with the program.
    """
    folder = Path(name)
    launcher = this_process.launcher()
    rank = launcher.place.rank
    end_with(launcher.parent)
    try:
        job = pickle.loads((folder / "job").read_bytes())
        sys.path[:] = job.path
        LOGGER.propagate = False
        LOGGER.addHandler(logging.NullHandler() if rank else _FileHandler(folder / "log"))
        LOGGER.setLevel(job.level)
        value = resolve(job.function)(**_arguments(job))
        if rank == 0:
            write_atomically(folder / "result", pack(value))
        launcher.on_success()
        return 0
    except PeerFailure:
        time.sleep(SECONDS_FOR_THE_CAUSE)
        os._exit(launcher.peer_status)
    except BaseException as error:
        write_atomically(folder / f"error-{rank}", pickle.dumps((time.time(), rank, traceback.format_exc(), _pack_error(error))))
        sys.stdout.flush()
        status = error.status if isinstance(error, HvdtrainError) else 1
        if not (isinstance(error, HvdtrainError) and error.on_every_rank):
            os._exit(status)  # without disconnecting, so that ranks that wait for this one are ended
        return status


def _arguments(job: _Job) -> dict[str, Any]:
    try:
        return dict(pickle.loads(job.arguments))
    except (ImportError, AttributeError) as error:
        raise ConfigError.of(
            "cannot-import", f"ranks: expected functions and classes that each rank can import, got: {error}"
        ) from error


def _pack_error(error: BaseException) -> bytes:
    """Pickle an error for the program; one that cannot be pickled becomes a RuntimeError with its type and message."""
    try:
        packed = pack(error)
        pickle.loads(packed)
        return packed
    except Exception:  # its class is the config's, or has a constructor with other arguments
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
