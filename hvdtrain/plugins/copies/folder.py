"""Copies of data files on a local disk, for files on a network or on object storage: `cache_dir`.

All processes and jobs of a host may share a folder. They coordinate by locks (flock) on files in it, which the system releases
when a process ends in any way:

    .lock                     locked for moments by a process that lists or changes the folder
    DIGEST-NAME               a complete copy; its access time is that of its last use
    partial-DIGEST-NAME       a copy in progress, already of the final size; locked by the process that writes it
    process-NAME              lists the copies that a process uses; locked while the process lives

The digest covers the path, size and modification time of the original, or of a remote file the version that the server reports. A
changed file is therefore copied again.
A file that is neither a complete copy nor locked was left by a process that was killed, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.data.files import A_COPY, size_text
from hvdtrain.data.remote import STORAGES, is_remote, without_query
from hvdtrain.errors import DataError
from hvdtrain.plugins.copies.originals import LocalFile, Progress, RemoteFile

PAUSE = 0.05
"""Seconds between two attempts to get a lock that another process holds."""

LEAST_FREE = 10 << 30
"""Bytes of the disk that stay free, or a twentieth of the disk if that is less."""

PARTIAL = "partial-"


class NotCopied(Exception):
    """A file is not copied but read from its original path: there is no room for a copy, or the folder cannot be used."""


@dataclass(frozen=True)
class Copy:
    """A complete copy: its path, its size in bytes, and whether this process made it."""

    path: Path
    size: int
    is_new: bool


class CopyFolder:
    """A folder of copies, as used by one process. Copies in use are not removed until the process closes the folder or ends.

    Args:
        budget: limit in bytes of all copies in the folder; None: the size of the disk.
    """

    def __init__(self, folder: Path, budget: int | None) -> None:
        self._folder = folder
        self._budget = budget
        self._lock: int | None = None
        self._process_file: int | None = None
        self._process_name = f"process-{socket.gethostname()}-{os.getpid()}-{os.urandom(4).hex()}"

    def open(self) -> None:
        """Create the folder if necessary, and register this process in it. Raises: NotCopied."""
        with self._folder_errors():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_to_lock(self._folder / ".lock", os.O_CREAT)
            with self._hold_lock():
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND
                self._process_file = os.open(self._folder / self._process_name, flags, 0o666)
                fcntl.flock(self._process_file, fcntl.LOCK_EX)

    def close(self) -> None:
        """Unregister, so that other processes may remove the copies that only this process used."""
        if self._process_file is not None:
            self._remove(self._process_name)
            os.close(self._process_file)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._process_file = None

    def copy(self, original: Path | RemoteFile, progress: Progress) -> Copy:
        """The copy of a file; makes it if necessary, and waits if another process is making it.

        Raises:
            DataError: the file cannot be read, or changed while it was copied.
            NotCopied: there is no room, or the folder cannot be used.
        """
        source = LocalFile(original) if isinstance(original, Path) else original
        size, version = source.size_and_version()
        name = copy_name(source, size, version)
        with self._folder_errors():
            # First of all: from now on, no other process removes it.
            os.write(_require_open(self._process_file), os.fsencode(f"{name}\0"))
            while True:
                with self._hold_lock():
                    if (self._folder / name).exists():
                        with suppress(PermissionError):  # it may be another user's
                            os.utime(self._folder / name, ns=(time.time_ns(), version))
                        return Copy(self._folder / name, size, is_new=False)
                    partial = self._begin(name, size)
                if partial is not None:
                    break
                with suppress(FileNotFoundError):  # the other process has just finished it
                    progress((self._folder / f"{PARTIAL}{name}").stat().st_blocks * 512)
                time.sleep(PAUSE)
            try:
                source.transfer(partial, size, version, progress)
                with self._hold_lock():
                    (self._folder / f"{PARTIAL}{name}").rename(self._folder / name)
            except BaseException:
                self._remove(f"{PARTIAL}{name}")
                raise
            finally:
                os.close(partial)
        return Copy(self._folder / name, size, is_new=True)

    def _remove(self, name: str) -> None:
        """Remove a file. Under the folder's lock: else another process may have found or opened it, but not locked it yet. A
        thread that copies does so also if another one has closed the folder."""
        with suppress(OSError):
            lock = open_to_lock(self._folder / ".lock", os.O_CREAT)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                (self._folder / name).unlink()
            finally:
                os.close(lock)

    def _begin(self, name: str, size: int) -> int | None:
        """Under the folder's lock: an open, locked file to copy to; None: another process has it. Raises: NotCopied."""
        path = self._folder / f"{PARTIAL}{name}"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(file):
                os.close(file)
                return None
            os.ftruncate(file, 0)  # drop what a killed process left
            self._make_room(size)
            os.ftruncate(file, size)  # reserves no blocks, but shows other processes how much room it will need
        except BaseException:
            path.unlink()
            os.close(file)
            raise
        return file

    def _make_room(self, size: int) -> None:
        """Under the folder's lock: remove what killed processes left, then unused copies, least recently used first.
        Raises: NotCopied."""
        used = self._names_in_use()
        spare: list[tuple[int, int, Path]] = []
        total = promised = 0
        for path in [path for path in self._folder.iterdir() if A_COPY.match(path.name)]:
            about = path.stat()
            if path.name.startswith(PARTIAL):
                if is_unlocked(path):
                    path.unlink()
                    continue
                promised += max(0, about.st_size - about.st_blocks * 512)  # a sparse file: the rest is still to be written
            elif path.name not in used:
                spare.append((about.st_atime_ns, about.st_size, path))
            total += about.st_size
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize - promised - min(LEAST_FREE, disk.f_blocks * disk.f_frsize // 20)
        missing = max(size - free, 0 if self._budget is None else total + size - self._budget)
        if missing > sum(bytes_of for _, bytes_of, _ in spare):
            why = (
                f"{size_text(total)} of {size_text(self._budget)} (cache_dir_size) are used"
                if self._budget is not None and total + size - self._budget >= size - free
                else f"the disk has {size_text(max(0, free))} left for copies"
            )
            raise NotCopied(f"no room for {size_text(size)} in {self._folder} (cache_dir): {why}")
        for _, bytes_of, path in sorted(spare):
            if missing <= 0:
                break
            path.unlink()
            missing -= bytes_of

    def _names_in_use(self) -> set[str]:
        used: set[str] = set()
        for path in self._folder.glob("process-*"):
            if is_unlocked(path):
                path.unlink()
            else:
                used.update(os.fsdecode(path.read_bytes()).split("\0"))
        return used

    @contextmanager
    def _hold_lock(self) -> Iterator[None]:
        while not try_lock(_require_open(self._lock)):
            time.sleep(PAUSE / 10)
        try:
            yield
        finally:
            fcntl.flock(_require_open(self._lock), fcntl.LOCK_UN)

    @contextmanager
    def _folder_errors(self) -> Iterator[None]:
        """Turn an OSError of the folder into NotCopied."""
        try:
            yield
        except OSError as error:
            raise NotCopied(f"cannot write to {self._folder} (cache_dir): {error.strerror or error}") from None


@dataclass
class Copies:
    """The copies of a job's files on one host, as one process sees them.

    Attributes:
        host: its name.
        places: by the path of a file in the config, the path of its copy.
        number: the number of files that are read from copies.
        num_new: the number of copies that this process made.
        new_size: their size in bytes.
        size: the size of all copies in bytes.
        seconds: the time it took, including waits for other processes.
        not_copied: by path of a file (or 'all files'), why it is read from its original path.
    """

    host: str = field(default_factory=socket.gethostname)
    places: dict[str, str] = field(default_factory=dict)
    number: int = 0
    num_new: int = 0
    new_size: int = 0
    size: int = 0
    seconds: float = 0.0
    not_copied: dict[str, str] = field(default_factory=dict)


def copy_files(folder: CopyFolder, paths: Iterable[str], progress: Progress, local_rank: int = 0, local_size: int = 1) -> Copies:
    """Copy files one after the other, first this process's share, then those that the other processes of the host did not copy.

    Args:
        paths: or URLs.
        local_rank, local_size: of the processes that copy the same files on this host.

    Raises:
        DataError: a file cannot be read, or there is no room for a remote one.
    """
    copies = Copies()
    started = time.monotonic()
    base = 0
    paths = list(paths)
    share = paths[local_rank::local_size]
    try:
        folder.open()
        urls = list(filter(is_remote, paths))
        storage = STORAGES.last if urls else None  # `url_problems` has refused URLs where there is none
        remote = {} if storage is None else storage.look_up(urls)
        for path in dict.fromkeys([*share, *paths]):
            try:
                original = remote.get(path) or Path(path)
                copy = folder.copy(original, lambda number, base=base: progress(base + number))  # type: ignore[misc]
            except NotCopied as problem:
                _require_local([path], problem)
                copies.not_copied[path] = str(problem)
                continue
            base += copy.size
            progress(base)
            copies.places[path] = str(copy.path)
            copies.number += 1
            copies.size += copy.size
            copies.num_new += copy.is_new
            copies.new_size += copy.size * copy.is_new
    except NotCopied as problem:
        _require_local(paths, problem)
        copies.not_copied["all files"] = str(problem)
    copies.seconds = time.monotonic() - started
    return copies


def _require_local(paths: Iterable[str], problem: NotCopied) -> None:
    """Raises: DataError, if one of the files is remote: it can only be read from a copy."""
    for path in filter(is_remote, paths):
        raise DataError(f"{without_query(path)}: expected a copy on a local disk, got none: {problem}") from None


def copy_name(original: LocalFile | RemoteFile, size: int, version: int) -> str:
    """The name of a file's copy. It ends with the name of the file, so that messages about the copy show it.

    >>> copy_name(LocalFile(Path("/data/train.hdf")), 1000, 1)
    'c2086792c8a752da-train.hdf'
    """
    text = f"{original.origin}\0{size}\0{version}"
    return f"{hashlib.sha256(text.encode(errors='surrogateescape')).hexdigest()[:16]}-{original.name[-200:]}"


def _require_open(file: int | None) -> int:
    """The descriptor. Raises: OSError, after `close`: the program may end while a thread is still copying."""
    if file is None:
        raise OSError(errno.EBADF, "the folder was closed")
    return file


def open_to_lock(path: Path, flags: int = 0) -> int:
    """Open a file, possibly another user's, to lock it. Writable if possible, as some network file systems require it."""
    try:
        return os.open(path, os.O_RDWR | flags, 0o666)
    except PermissionError:
        return os.open(path, os.O_RDONLY)


def try_lock(file: int) -> bool:
    """Take the lock of a file; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_unlocked(path: Path) -> bool:
    """Whether no process holds the lock of a file."""
    file = open_to_lock(path)
    try:
        return try_lock(file)
    finally:
        os.close(file)
