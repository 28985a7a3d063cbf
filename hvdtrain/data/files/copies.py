"""Copies of data files on a local disk, for files on a network: `cache_dir`.

All processes and jobs of a host may use one folder at the same time. They do not talk to each other, they hold locks (flock)
on files in it, which the system takes back when a process ends, however it does:

    .lock                     held for moments, by whoever looks at the folder or changes it
    DIGEST-NAME               a whole copy; its time of access says when it was last wanted
    partial-DIGEST-NAME       a copy that is being made, as long as the whole one will be; locked by who makes it
    process-NAME              a process and the copies that it uses; locked as long as the process lives

The digest is that of the original's path, size and time of change: of a file that was changed there is no copy yet.
What is not locked by anybody, and no whole copy, is garbage of a process that was killed, and is removed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.config.keys import Rule, Section, key, parsed_by
from hvdtrain.data.files.sizes import parse_size, size_text
from hvdtrain.data.files.transfer import Progress, is_unlocked, look_at, open_to_lock, transfer, try_lock

PAUSE = 0.05
"""Seconds between two looks at what another process holds."""

LEAST_FREE = 10 << 30
"""Bytes of the disk that are left free for others, or a twentieth of it where that is less."""

PARTIAL = "partial-"

A_COPY = re.compile(rf"({PARTIAL})?[0-9a-f]{{16}}-.")
"""What the names of copies begin with. Whatever else lies in the folder is not ours."""


class NotCopied(Exception):
    """A file is to be read where it is: there is no room for a copy, or the folder cannot be used."""


@dataclass(frozen=True, kw_only=True)
class CopyKeys(Section):
    """Copies of data files on a local disk."""

    cache_dir: str | None = key(
        None,
        "a folder on a local disk of every host: data files are copied there first, once a host, and read from there; "
        "None: they are read where they are",
    )
    cache_dir_size: int | str = key(
        -1,
        "what all copies in cache_dir may take together, with K, M or G; those that no running job uses make room for new ones; "
        "-1: as much as the disk has",
        Rule("a size such as '500G', or -1", parsed_by(parse_size)),
    )


@dataclass(frozen=True)
class Copy:
    """A whole copy: where it is, how many bytes it has, and whether this process made it."""

    path: Path
    size: int
    made: bool


class CopyFolder:
    """A folder of copies, as one process sees it. What the process asked for is not removed before it closes or ends.

    Args:
        budget: bytes that all copies in the folder may take together; None: as much as the disk has.
    """

    def __init__(self, folder: Path, budget: int | None) -> None:
        self._folder = folder
        self._budget = budget
        self._lock: int | None = None
        self._own: int | None = None
        self._own_name = f"process-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"

    def open(self) -> None:
        """Make the folder, if it is not there, and register as one that uses it. Raises: NotCopied."""
        with self._usable():
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = open_to_lock(self._folder / ".lock", os.O_CREAT)
            with self._locked():
                self._own = os.open(self._folder / self._own_name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o666)
                fcntl.flock(self._own, fcntl.LOCK_EX)

    def close(self) -> None:
        """Others may remove the copies that only this process used."""
        if self._own is not None:
            with suppress(OSError):
                (self._folder / self._own_name).unlink()
            os.close(self._own)
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._own = None

    def copy(self, original: Path, progress: Progress) -> Copy:
        """The copy of a file. It is made unless it is there; if another process is making it, it is waited for.

        Raises:
            DataError: the file cannot be read, or changed while it was copied.
            NotCopied: there is no room, or the folder cannot be used.
        """
        size, changed = look_at(original)
        name = copy_name(original, size, changed)
        with self._usable():
            os.write(_opened(self._own), os.fsencode(f"{name}\0"))  # first of all: from now on nobody removes it
            while True:
                with self._locked():
                    if (self._folder / name).exists():
                        with suppress(PermissionError):  # it may be another user's
                            os.utime(self._folder / name, ns=(time.time_ns(), changed))
                        return Copy(self._folder / name, size, made=False)
                    partial = self._begin(name, size)
                if partial is not None:
                    break
                progress(self._written(name))
                time.sleep(PAUSE)
            try:
                transfer(original, partial, size, changed, progress)
                with self._locked():
                    (self._folder / f"{PARTIAL}{name}").rename(self._folder / name)
            except BaseException:
                with suppress(OSError):
                    (self._folder / f"{PARTIAL}{name}").unlink()
                raise
            finally:
                os.close(partial)
        return Copy(self._folder / name, size, made=True)

    def _begin(self, name: str, size: int) -> int | None:
        """Under the folder's lock: a file to copy to, open and locked; None: another process has it. Raises: NotCopied."""
        path = self._folder / f"{PARTIAL}{name}"
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if not try_lock(file):
                os.close(file)
                return None
            os.ftruncate(file, 0)  # what a killed process left
            self._make_room(size)
            os.ftruncate(file, size)  # no bytes yet, but others see what is promised
        except BaseException:
            path.unlink()
            os.close(file)
            raise
        return file

    def _make_room(self, size: int) -> None:
        """Under the folder's lock: remove garbage, and copies that nobody uses, the longest unused first. Raises: NotCopied."""
        used = self._in_use()
        spare: list[tuple[int, int, Path]] = []
        total = promised = 0
        for path in [path for path in self._folder.iterdir() if A_COPY.match(path.name)]:
            about = path.stat()
            if path.name.startswith(PARTIAL):
                if is_unlocked(path):
                    path.unlink()
                    continue
                promised += max(0, about.st_size - about.st_blocks * 512)
            elif path.name not in used:
                spare.append((about.st_atime_ns, about.st_size, path))
            total += about.st_size
        disk = os.statvfs(self._folder)
        free = disk.f_bavail * disk.f_frsize - promised - min(LEAST_FREE, disk.f_blocks * disk.f_frsize // 20)
        missing = max(size - free, 0 if self._budget is None else total + size - self._budget)
        if missing > sum(bytes_of for _, bytes_of, _ in spare):
            why = (
                f"of {size_text(self._budget)} (cache_dir_size) {size_text(total)} are taken"
                if self._budget is not None and total + size - self._budget >= size - free
                else f"the disk has {size_text(max(0, free))} to give"
            )
            raise NotCopied(f"no room for {size_text(size)} in {self._folder} (cache_dir): {why}")
        for _, bytes_of, path in sorted(spare):
            if missing <= 0:
                break
            path.unlink()
            missing -= bytes_of

    def _in_use(self) -> set[str]:
        """Under the folder's lock: the names of the copies that a living process uses."""
        used: set[str] = set()
        for path in self._folder.glob("process-*"):
            if is_unlocked(path):
                path.unlink()
            else:
                used.update(os.fsdecode(path.read_bytes()).split("\0"))
        return used

    def _written(self, name: str) -> int:
        """How many bytes of a copy another process has made."""
        try:
            return (self._folder / f"{PARTIAL}{name}").stat().st_blocks * 512
        except FileNotFoundError:
            return 0

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the folder's lock."""
        while not try_lock(_opened(self._lock)):
            time.sleep(PAUSE / 10)
        try:
            yield
        finally:
            fcntl.flock(_opened(self._lock), fcntl.LOCK_UN)

    @contextmanager
    def _usable(self) -> Iterator[None]:
        """What the system says against writing into the folder, as NotCopied."""
        try:
            yield
        except OSError as error:
            raise NotCopied(f"cannot write to {self._folder} (cache_dir): {error.strerror or error}") from None


@dataclass
class Copies:
    """What became of the files of a job on one host, as one process sees it.

    Attributes:
        places: by a file's name as the config has it, that of its copy.
        made: how many of the copies this process made, and how many bytes these have.
        size: bytes of all copies.
        seconds: how long it took, waiting for others included.
        not_copied: by file name (or 'all files'), why it is read from where it is.
    """

    folder: str = ""
    places: dict[str, str] = field(default_factory=dict)
    made: int = 0
    made_size: int = 0
    size: int = 0
    seconds: float = 0.0
    not_copied: dict[str, str] = field(default_factory=dict)


def copy_files(folder: CopyFolder, paths: Iterable[str], progress: Progress) -> Copies:
    """Copy files, one after the other. Raises: DataError, if one cannot be read."""
    copies = Copies()
    started = time.monotonic()
    base = 0
    try:
        folder.open()
        for path in paths:
            try:
                copy = folder.copy(Path(path), lambda number, base=base: progress(base + number))  # type: ignore[misc]
            except NotCopied as problem:
                copies.not_copied[path] = str(problem)
                continue
            base += copy.size
            progress(base)
            copies.places[path] = str(copy.path)
            copies.size += copy.size
            copies.made += copy.made
            copies.made_size += copy.size * copy.made
    except NotCopied as problem:
        copies.not_copied["all files"] = str(problem)
    copies.seconds = time.monotonic() - started
    return copies


def copy_name(original: Path, size: int, changed: int) -> str:
    """The name of a file's copy. It ends like the file's own, which is what messages about the copy show.

    >>> copy_name(Path("/data/train.hdf"), 1000, 1)
    'c2086792c8a752da-train.hdf'
    """
    identity = f"{original.resolve()}\0{size}\0{changed}"
    return f"{hashlib.sha256(identity.encode(errors='surrogateescape')).hexdigest()[:16]}-{original.name[-200:]}"


def _opened(file: int | None) -> int:
    """Raises: OSError, after `close`: the program may end while a thread still copies."""
    if file is None:
        raise OSError(errno.EBADF, "the folder was closed")
    return file
