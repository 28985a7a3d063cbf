"""One training at a time for a model: a second one would overwrite the first one's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.comm.launch import launch
from hvdtrain.errors import CheckpointError, ConfigError

PATIENCE = 5.0
"""Seconds to wait for a training that is just ending."""

BEAT = 10.0
"""Seconds between two signs of life, where the file system has no locks. Without one for three times as long, a job is dead."""

HELD = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """Who trains a model.

    Attributes:
        started: the local time.
        launcher: the process id of a launcher that ends all its ranks before it starts them again; 0: there is none.
    """

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    launcher: int = 0

    def was_before(self, other: Holder) -> bool:
        """Whether this one's launcher has started the other one, so that this one has ended."""
        return self.launcher != 0 and (self.host, self.launcher) == (other.host, other.launcher)


@contextmanager
def only_training_of(model: Path, patience: float = PATIENCE, beat: float = BEAT) -> Iterator[None]:
    """Inside the `with` block, no other process that uses this function trains the model.

    MODEL.lock is locked in the way of POSIX: the system frees it when this process ends in any way, processes that it started do
    not hold it, and NFS knows it, too. On a file system without locks, a thread writes to the file from time to time; a job that
    does not is dead.

    Args:
        model: the prefix of the checkpoints' names.

    Raises:
        CheckpointError: another process trains the model.
        ConfigError: the folder cannot be written to.
    """
    path = model.with_name(f"{model.name}.lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _acquire(path, patience)
        stop = _beat(path, beat) if file is None else None
    except OSError as error:
        raise ConfigError([f"model: expected a folder that can be written to, got {path.parent}: {error.strerror}"]) from None
    try:
        yield
    finally:
        if stop is not None:
            stop.set()
        with suppress(OSError):
            path.unlink()
        if file is not None:
            os.close(file)


def _acquire(path: Path, patience: float) -> int | None:
    """The file, locked; None: the file system has no locks. Raises: CheckpointError, OSError."""
    deadline = time.monotonic() + patience
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                os.ftruncate(file, 0)
                os.write(file, _text(_own_holder()).encode())
                return file
        except OSError as error:
            if error.errno in NO_LOCKS:
                os.close(file)
                return None
            if error.errno not in HELD:
                os.close(file)
                raise
            if time.monotonic() > deadline:
                os.close(file)
                raise _refused(path) from None
            time.sleep(0.1)
        os.close(file)


def _is_at(file: int, path: Path) -> bool:
    """Whether a file still has its name: the one who held it removes it at the end."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def _beat(path: Path, beat: float) -> threading.Event:
    """Without locks: make sure that nobody gives signs of life, then give them until the event is set.

    Raises:
        CheckpointError, OSError
    """
    holder, own_holder = _holder(path), _own_holder()
    if holder is not None and not holder.was_before(own_holder):
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 3 * beat
        while time.monotonic() < deadline:
            time.sleep(beat / 10)
            if path.exists() and path.stat().st_mtime_ns != before:
                raise _refused(path)
    own = _text(own_holder)
    path.write_text(own, encoding="utf-8")
    time.sleep(beat / 10)
    if path.read_text(encoding="utf-8") != own:  # another job started at the same moment
        raise _refused(path)
    stop = threading.Event()

    def live() -> None:
        while not stop.wait(beat):
            with suppress(OSError):
                os.utime(path)

    threading.Thread(target=live, name="model lock", daemon=True).start()
    return stop


def _own_holder() -> Holder:
    restarts = launch().launcher in ("hvdtrain", "torchrun")
    return Holder(launcher=os.getppid() if restarts else 0)


def _text(holder: Holder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _holder(path: Path) -> Holder | None:
    """Who wrote the file, if that can be read."""
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _refused(path: Path) -> CheckpointError:
    holder = _holder(path)
    who = "one" if holder is None else f"process {holder.pid} on {holder.host}, started {holder.started}"
    return CheckpointError(
        f"model: expected no other job that trains {path.with_suffix('')}, got {who} "
        f"(wait for its end, or choose another model; {path} says who it is)"
    )
