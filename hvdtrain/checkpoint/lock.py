"""One training at a time for a model: a second one would overwrite the first one's checkpoints."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hvdtrain.comm.this_process import place
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.runtime import log

PATIENCE = 5.0
"""Seconds to wait for a training that is about to end."""

HEARTBEAT = 10.0
"""Seconds between heartbeats, which change the file's time. If the file system has no locks, a job without one for three times as
long is dead. Otherwise they are for reports (report/ends.py)."""

CHECK_INTERVAL = 1.0
"""Seconds between checks that a lock's file still exists."""

HELD = (errno.EAGAIN, errno.EACCES)
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The process that trains a model.

    Attributes:
        started: its start, in local time.
        launcher: the process id of a launcher that ends all its ranks before it restarts them; 0: there is none.
    """

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))
    launcher: int = 0

    def is_predecessor_of(self, later: Holder) -> bool:
        """Whether both have the same launcher, which restarted the job: this process has then ended."""
        return self.launcher != 0 and (self.host, self.launcher) == (later.host, later.launcher)


@contextmanager
def lock_model(model: Path, patience: float = PATIENCE, beat: float = HEARTBEAT) -> Iterator[None]:
    """Inside the `with` block, no other process that uses this function trains the model.

    MODEL.lock has a POSIX lock: the system releases it however this process ends, child processes do not hold it, and NFS
    supports it. A thread touches the file periodically as a heartbeat; on a file system without locks, a job without one is dead.

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
        release = _start_heartbeat(path, beat) if file is None else LockGuard(path, file).release
    except OSError as error:
        raise ConfigError.of(
            "not-writable", f"model: expected a folder that can be written to, got {path.parent}: {error.strerror}"
        ) from None
    try:
        yield
    finally:
        release()


def other_locks(model: Path) -> list[Path]:
    """The locks of the folder's other trainings. Other programs may have files of such names."""
    lock = f"{model.name}.lock"
    return [path for path in model.parent.glob("*.lock") if path.name != lock and _holder(path) is not None]


def _acquire(path: Path, patience: float) -> int | None:
    """The file, locked; None: the file system has no locks. Raises: CheckpointError, OSError."""
    deadline = time.monotonic() + patience
    while True:
        file = _open(path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                _write(file, _own_holder())
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
                raise _held_error(path) from None
            time.sleep(0.1)
        os.close(file)


class LockGuard:
    """Holds a lock, and acquires it again if its file is deleted or replaced, as a second job would then lock a new file.

    Args:
        file: the locked file that is at `path`.
    """

    def __init__(self, path: Path, file: int, beat: float = CHECK_INTERVAL) -> None:
        self._path = path
        self._files = [file]  # POSIX releases a file's lock when any of its descriptors is closed, so all stay open
        self._warned = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, args=(beat,), name="model lock", daemon=True)
        self._thread.start()

    def _watch(self, beat: float) -> None:
        last = time.monotonic()
        while not self._stop.wait(beat):
            with suppress(OSError, CheckpointError):
                if not _is_at(self._files[-1], self._path):
                    self._take_again()
                elif time.monotonic() - last >= HEARTBEAT:
                    last = time.monotonic()
                    os.utime(self._files[-1])

    def _take_again(self) -> None:
        """Lock the file that now has the name; log it if another job holds that lock. Raises: OSError, CheckpointError."""
        file = _open(self._path)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(file)
            if error.errno in HELD and not self._warned:
                self._warned = True
                log.result(
                    f"{self._path} was deleted while this job held it, and another job now also trains the model: "
                    f"{_held_error(self._path)}"
                )
            return
        _write(file, _own_holder())
        self._files.append(file)
        log.warning(f"{self._path} was deleted or replaced; this job, which trains the model, has recreated it")

    def release(self) -> None:
        """Remove the file, unless it belongs to another job, and release the lock."""
        self._stop.set()
        self._thread.join()
        with suppress(OSError):
            if _is_at(self._files[-1], self._path):
                self._path.unlink()
        for file in self._files:
            os.close(file)


def _open(path: Path) -> int:
    """Open the existing file or a new one.

    Raises:
        CheckpointError: it is not a regular file: writing to a link would overwrite its target, and opening a pipe would block.
        OSError
    """
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO, errno.EISDIR):
            raise
        raise _not_a_file(path) from None
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise _not_a_file(path)
    return file


def _not_a_file(path: Path) -> CheckpointError:
    mode = path.lstat().st_mode
    file_type = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a pipe, socket or device"
    return CheckpointError(f"model: expected {path} to be a file, got {file_type} (remove it)")


def _write(file: int, holder: Holder) -> None:
    """Replace what is in the file. Raises: OSError."""
    os.ftruncate(file, 0)
    os.write(file, _text(holder).encode())


def _is_at(file: int, path: Path) -> bool:
    """Whether a file still has its name: the previous holder removes it when it ends."""
    try:
        return os.path.samestat(os.fstat(file), path.lstat())
    except FileNotFoundError:
        return False


def _start_heartbeat(path: Path, beat: float) -> Callable[[], None]:
    """Without locks: check that no other job has a heartbeat, then keep one up until the returned function removes the file.

    Raises:
        CheckpointError, OSError
    """
    holder, own_holder = _holder(path), _own_holder()
    if holder is not None and not holder.is_predecessor_of(own_holder):
        before = path.stat().st_mtime_ns
        deadline = time.monotonic() + 3 * beat
        while time.monotonic() < deadline:
            time.sleep(beat / 10)
            if path.exists() and path.stat().st_mtime_ns != before:
                raise _held_error(path)
    with open(_open(path), "r+b", buffering=0) as file:
        _write(file.fileno(), own_holder)
    time.sleep(beat / 10)
    if path.read_text(encoding="utf-8") != _text(own_holder):  # another job started at the same moment
        raise _held_error(path)
    stop = threading.Event()

    def touch() -> None:
        while not stop.wait(beat):
            with suppress(OSError):
                os.utime(path)

    def release() -> None:
        stop.set()
        with suppress(OSError):
            path.unlink()

    threading.Thread(target=touch, name="model lock", daemon=True).start()
    return release


def _own_holder() -> Holder:
    restarts = place().launcher in ("hvdtrain", "torchrun")
    return Holder(launcher=os.getppid() if restarts else 0)


def _text(holder: Holder) -> str:
    return json.dumps(asdict(holder)) + "\n"


def _holder(path: Path) -> Holder | None:
    """The process that wrote the file; None if it cannot be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            return Holder(**json.loads(os.read(file, 4096).decode()))
        finally:
            os.close(file)
    except (OSError, ValueError, TypeError, RecursionError):
        return None


def _held_error(path: Path) -> CheckpointError:
    holder = _holder(path)
    who = "one" if holder is None else f"process {holder.pid} on {holder.host}, started {holder.started}"
    return CheckpointError(
        f"model: expected no other job that trains {path.with_suffix('')}, got {who} "
        f"(wait until it ends, or choose another model; {path} identifies it)"
    )
