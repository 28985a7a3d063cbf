"""Files on object storage and web servers, through fsspec.

A remote file is only ever read to make a local copy of it (the plug-in copies, `mirror.py`). It is fetched in blocks. Each
block is complete or an error: what a server sends for it is compared with the requested size, as a cut connection may look like
the end of a file. A failed block is fetched again, alone, after a pause.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

from hvdtrain.data.remote import Storage, scheme_of, without_query
from hvdtrain.errors import DataError, Problem, problem
from hvdtrain.plugins.copies.originals import BYTES_AT_ONCE, SYNC, Progress

T = TypeVar("T")

AT_ONCE = 4
"""The number of blocks that a process fetches at the same time."""

LOOK_UPS = 16
"""The number of files that a process asks a server for at the same time."""

TIMEOUT = 60.0
"""Seconds in which a block, or what the server knows about a file, has to arrive."""

SLOWEST = 1e6
"""Bytes per second: an upload that is slower is started again."""

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
"""Seconds before each further attempt."""

PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
}
"""The package, besides fsspec, that reads URLs of a scheme. Other schemes are fsspec's own, or it says what they need."""

VERSION = tuple(
    "etag lastmodified versionid contentmd5 digest md5hash generation blobid sha256 xethash mtime modified created modify "
    "modificationtime updated sha lastwritetime clientmodified servermodified contenthash rev crc32c".split()
)
"""What file systems call what they know about a file's content, by letters and digits alone (`Last-Modified`, `last_modified`).
They report some of it, which changes if the file does."""

REFUSED = (400, 401, 403, 404, 405, 410, 416, 501)
"""HTTP statuses of requests that would be answered in the same way again."""

FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, ImportError, NotImplementedError, TypeError, ValueError)
"""Errors that another attempt would not change."""


def package_problems(where: str, urls: Iterable[str]) -> list[Problem]:
    """Problems with packages that reading or writing URLs needs and that are not installed.

    Args:
        where: the config key.
    """
    schemes = dict.fromkeys(scheme_of(url) for url in urls)
    wanted = dict.fromkeys(name for scheme in schemes for name in ("fsspec", PACKAGES.get(scheme, "fsspec")))
    missing = [name for name in wanted if find_spec(name) is None]
    if not missing:
        return []
    return problem(
        "missing-package",
        f"{where}: expected the {'packages' if len(missing) > 1 else 'package'} {' and '.join(missing)} for "
        f"{', '.join(f'{scheme}://' for scheme in schemes)}, got none (pip install {' '.join(missing)})",
    )


@dataclass(frozen=True)
class RemoteFile:
    """A file on object storage or a web server, to be copied.

    Attributes:
        url: its address, as the config has it.
        looked_up: its size and version, if the server was asked already.
    """

    url: str
    looked_up: tuple[int, int] | None = None

    def __str__(self) -> str:
        return without_query(self.url)

    @property
    def name(self) -> str:
        """The last part of its path."""
        return str(self).rstrip("/").rpartition("/")[2]

    @property
    def origin(self) -> str:
        """What distinguishes it from other files, for the name of its copy."""
        return self.url

    def size_and_version(self) -> tuple[int, int]:
        """Its size in bytes, and a number that changes with its content, as far as the server reports. Raises: DataError."""
        return self.looked_up or self._look_up()

    def _look_up(self) -> tuple[int, int]:
        """Ask the server for size and version. Raises: DataError."""
        filesystem, path = open_filesystem(self.url, str(self))

        def ask() -> dict[str, Any]:
            filesystem.invalidate_cache()
            return dict(_call(filesystem, "info", path))

        about = _retry(str(self), ask)
        if about.get("type") == "directory":
            raise DataError(f"{self}: expected a file, got a folder")
        size = about.get("size")
        if not isinstance(size, int):
            raise DataError(f"{self}: expected a server that reports the size of a file, got none (download the file yourself)")
        names = {re.sub("[^a-z0-9]", "", name.lower()): name for name in about if about[name]}
        version = repr([(names[plain], str(about[names[plain]])) for plain in VERSION if plain in names])
        # Seven bytes: the number is also the copy's time of modification in nanoseconds.
        return size, int.from_bytes(hashlib.sha256(version.encode()).digest()[:7], "big")

    def transfer(self, copy: int, size: int, version: int, progress: Progress) -> None:
        """Copy all bytes and flush them to the disk, as `LocalFile.transfer` does.

        Raises:
            DataError: the file cannot be read, or changed while it was copied.
            OSError: the copy cannot be written.
        """
        filesystem, path = open_filesystem(self.url, str(self))
        ranges = [(start, min(start + BYTES_AT_ONCE, size)) for start in range(0, size, BYTES_AT_ONCE)]
        written = 0
        for first in range(0, len(ranges), AT_ONCE):
            some = ranges[first : first + AT_ONCE]
            for (start, _), block in zip(some, self._fetch(filesystem, path, some), strict=True):
                rest = memoryview(block)
                place = start
                while rest:
                    number = os.pwrite(copy, rest, place)
                    rest = rest[number:]
                    place = place + number
                written += len(block)
                progress(written)
            if first % SYNC == 0:
                os.fdatasync(copy)
        if self._look_up() != (size, version):
            raise DataError(f"{self}: expected a file that does not change while it is copied, got one that was changed")
        os.fsync(copy)
        os.utime(copy, ns=(time.time_ns(), version))

    def _fetch(self, filesystem: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Some blocks, each complete. Raises: DataError."""
        content: dict[tuple[int, int], bytes] = {}

        def fetch_missing() -> None:
            missing = [each for each in ranges if each not in content]
            failures = []
            for (start, end), got in zip(missing, _blocks(filesystem, path, missing), strict=True):
                if isinstance(got, Exception):
                    failures.append(got)
                elif len(got) > end - start:
                    raise DataError(
                        f"{self}: expected a server that sends parts of a file (Range), got {len(got)} bytes for {end - start} "
                        "(download the file yourself)"
                    )
                elif len(got) != end - start:
                    failures.append(OSError(f"{len(got)} bytes of the {end - start} from byte {start}"))
                else:
                    content[start, end] = got
            if failures:
                raise failures[0]

        _retry(str(self), fetch_missing)
        return [content[each] for each in ranges]


def look_up(urls: Iterable[str]) -> dict[str, RemoteFile]:
    """By URL, the files with their sizes and versions, found for several at the same time. Raises: DataError."""
    files = [RemoteFile(url) for url in urls]
    if not files:
        return {}
    from concurrent.futures import ThreadPoolExecutor  # here, as `--help` imports this file

    with ThreadPoolExecutor(LOOK_UPS, "remote files") as threads:
        return {
            file.url: RemoteFile(file.url, looked_up)
            for file, looked_up in zip(files, threads.map(RemoteFile.size_and_version, files), strict=True)
        }


FSSPEC = Storage(package_problems, look_up)


def open_filesystem(url: str, name: str) -> tuple[Any, str]:
    """fsspec's file system for a URL, and the path in it.

    Args:
        name: of the file or folder, for messages.

    Raises:
        DataError: a package is missing, or there is no such scheme.
    """
    if missing := package_problems(name, [url]):
        raise DataError(str(missing[0]))
    from fsspec.core import url_to_fs

    try:
        filesystem, path = url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:  # the last of a URL in another one
        raise DataError(f"{name}: expected a URL that fsspec can read, got: {error}") from None
    return filesystem, str(path)


def upload(file: Path, url: str) -> None:
    """Store a file at a URL, whole or not at all. Raises: DataError."""
    filesystem, path = open_filesystem(url, url)
    size = file.stat().st_size

    def put() -> None:
        _call(filesystem, "put_file", str(file), path, seconds=TIMEOUT + size / SLOWEST)
        filesystem.invalidate_cache()
        stored = _call(filesystem, "info", path).get("size")
        if stored != size:
            raise OSError(f"{stored} bytes of {size}")

    _retry(url, put, "to store a file")


def remove(url: str) -> None:
    """Remove a file, if it is there. Raises: DataError."""
    filesystem, path = open_filesystem(url, url)

    def delete() -> None:
        with suppress(FileNotFoundError):
            _call(filesystem, "rm_file", path)

    _retry(url, delete, "to remove a file")


def list_names(url: str) -> list[str]:
    """The names of the files in a folder; none if there is no such folder. Raises: DataError."""
    filesystem, path = open_filesystem(url, url)

    def find() -> list[str]:
        filesystem.invalidate_cache()
        try:
            return [str(name).rstrip("/").rpartition("/")[2] for name in _call(filesystem, "ls", path, detail=False)]
        except FileNotFoundError:
            return []

    return _retry(url, find, "to list a folder")


def _call(filesystem: Any, method: str, *arguments: Any, seconds: float | None = None, **options: Any) -> Any:
    """Call a method of a file system, with a limit on its time if it is an asynchronous one; others have their own limits."""
    limit = {"timeout": seconds or TIMEOUT} if filesystem.async_impl else {}
    return getattr(filesystem, method)(*arguments, **options, **limit)


def _blocks(filesystem: Any, path: str, ranges: Sequence[tuple[int, int]]) -> list[bytes | Exception]:
    """The bytes of some ranges, or for each the error instead."""
    if not filesystem.async_impl:
        return [_block(filesystem, path, *each) for each in ranges]
    import asyncio  # here, as `--help` imports this file

    from fsspec.asyn import sync

    async def gather() -> list[Any]:
        calls = (asyncio.wait_for(filesystem._cat_file(path, start=start, end=end), TIMEOUT) for start, end in ranges)
        return await asyncio.gather(*calls, return_exceptions=True)

    return list(sync(filesystem.loop, gather))


def _block(filesystem: Any, path: str, start: int, end: int) -> bytes | Exception:
    try:
        return bytes(filesystem.cat_file(path, start=start, end=end))
    except Exception as error:
        return error


def _retry(name: str, attempt: Callable[[], T], expected: str = "a file that can be read") -> T:
    """Call a function until it succeeds, with pauses between the attempts. Raises: DataError, after the last one."""
    pauses = iter(PAUSES)
    while True:
        try:
            return attempt()
        except DataError:
            raise
        except Exception as raised:  # the libraries of file systems have different errors
            error = _actual(raised)
            pause = None if _is_final(error) else next(pauses, None)
            if pause is None:
                tried = "" if _is_final(error) else f" (tried {len(PAUSES) + 1} times)"
                raise DataError(f"{name}: expected {expected}, got: {_describe(error)}{tried}") from error
        time.sleep(pause)


def _actual(error: Exception) -> Exception:
    """fsspec's file system of web servers says of any error that there is no such file; its cause is the actual error."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception):
        if getattr(cause, "status", None) is not None or type(cause).__module__.startswith(("aiohttp", "asyncio")):
            return cause
    return error


def _is_final(error: Exception) -> bool:
    """Whether another attempt would fail in the same way."""
    has_no_login = "Credentials" in type(error).__name__
    return isinstance(error, FINAL) or has_no_login or getattr(error, "status", None) in REFUSED


def _describe(error: Exception) -> str:
    status = getattr(error, "status", None)
    if isinstance(error, FileNotFoundError) or status == 404:
        return "no such file"
    if isinstance(status, int):  # its text would have the whole URL
        return f"status {status} ({getattr(error, 'message', '')})"
    if isinstance(error, TimeoutError):
        return f"nothing within {TIMEOUT:g} s"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
