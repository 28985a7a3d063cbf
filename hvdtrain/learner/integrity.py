"""Checks that a checkpoint's file is bit for bit as it was written, and that files belong together.

PyTorch's files and numpy's .npz are zip archives with a CRC-32 of each entry, which torch.load does not check. Our PyTorch files
also have a checksum that takes a fifth of the time: in the archive's comment, or in the header of a safetensors file. Threads
check a file while it is read, so a start does not wait for checks if there are idle cores.
"""

from __future__ import annotations

import errno
import mmap
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.errors import DamagedCheckpoint

SAVE_ID = "save_id"
"""An entry in all files of a checkpoint, random for each checkpoint. Files of earlier releases and other programs have none."""

CHECKSUM = "hvdtrain_checksum"
"""The name of the checksum, eight hexadecimal digits, in the header of a safetensors file and in the comment of an archive."""

BLANK = "0" * 8

COMMENT = f"{CHECKSUM} ".encode()

OTHER_BYTES = "other bytes, whose checksum differs from that in the file"

PIECE = 1 << 24
"""The number of bytes that a thread handles at a time."""

ROW = 1 << 15
"""The number of bytes in a row. The checksum is the CRC of the rows' sums, which is five times as fast as a CRC of all bytes.
It changes with any flipped bit, any burst of up to 64 bits, and any row that moves."""


def new_save_id() -> str:
    """A unique name for a checkpoint."""
    return os.urandom(8).hex()


@contextmanager
def check_while_reading(path: Path) -> Iterator[None]:
    """Check a file for damage while the code in the `with` block reads it.

    Raises:
        DamagedCheckpoint: it is damaged. This replaces an error of the code in the block, which is then only a consequence.
    """
    with ThreadPoolExecutor(1, "checking a checkpoint") as pool:
        check = pool.submit(damage, path)
        try:
            yield
        except Exception:
            if (damaged := check.result()) is not None:
                raise DamagedCheckpoint(f"{path}: expected the file as it was written, got {damaged}") from None
            raise
        damaged = check.result()
    if damaged is not None:
        raise DamagedCheckpoint(f"{path}: expected the file as it was written, got {damaged}")


def damage(path: Path) -> str | None:
    """The damage to a file; None: none is detected, or the file has no checksum. Does not check whether it can be opened."""
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
            memoryview(data) as view,
        ):
            is_zip = zipfile.is_zipfile(file)
            stored = _stored_checksum(view, is_zip)
            if stored is not None:
                return None if _checksum(view, stored[0]) == stored[1] else OTHER_BYTES
            return _zip_damage(path, view) if is_zip else None
    except (OSError, ValueError):  # not there, or empty
        return None


OF_PROCESS = ("start new thread", "memory", "CUDA", "cuda")
"""Words in errors about a process that has too little of something."""


def is_of_process(error: Exception) -> bool:
    """Whether an error says that this process lacks memory, threads, open files or rights, and nothing about what it reads."""
    by_system = isinstance(error, OSError) and error.errno not in (None, errno.EINVAL)  # EINVAL: an impossible position in a file
    return isinstance(error, MemoryError) or by_system or any(word in str(error) for word in OF_PROCESS)


def is_proven(path: Path) -> bool:
    """Whether a file has a checksum, which is right."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            stored = _stored_checksum(view, zipfile.is_zipfile(file))
            return stored is not None and _checksum(view, stored[0]) == stored[1]
    except (OSError, ValueError, RuntimeError):
        return False


def _zip_damage(path: Path, view: memoryview) -> str | None:
    """Compare the CRC-32 of each entry: several in parallel, as zlib releases Python's lock."""
    try:
        with zipfile.ZipFile(path) as archive, ThreadPoolExecutor(_threads(), "checking a checkpoint") as pool:
            entries = archive.infolist()
            whole = pool.map(lambda entry: _is_intact(archive, entry, view), entries)
            wrong = [entry.filename for entry, ok in zip(entries, whole, strict=True) if not ok]
    except (zipfile.BadZipFile, NotImplementedError, OSError, RuntimeError, struct.error, zlib.error) as error:
        if is_of_process(error):
            raise
        return f"an archive that is damaged: {error}"
    return f"other bytes in {wrong[0]!r}, whose CRC-32 differs" if wrong else None


def _is_intact(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, view: memoryview) -> bool:
    if entry.compress_type != zipfile.ZIP_STORED:
        try:
            archive.read(entry)  # compares the CRC-32
        except (zipfile.BadZipFile, zlib.error):
            return False
        return True
    name, extra = struct.unpack_from("<HH", view, entry.header_offset + 26)
    start = entry.header_offset + 30 + name + extra
    checksum = 0
    for piece_start in range(start, start + entry.file_size, PIECE):
        checksum = zlib.crc32(view[piece_start : min(piece_start + PIECE, start + entry.file_size)], checksum)
    return entry.compress_size == entry.file_size <= len(view) - start and checksum == entry.CRC


def _stored_checksum(view: memoryview, is_zip: bool) -> tuple[int, str] | None:
    """The position of our checksum in a file, and the checksum; None: there is none."""
    if is_zip:
        position = len(view) - len(BLANK)
        if view[position - len(COMMENT) : position] != COMMENT:
            return None
        return position, bytes(view[position:]).decode(errors="replace")
    if len(view) < 8:
        return None
    [size] = struct.unpack_from("<Q", view)
    match = re.search(rf'"{CHECKSUM}":"(\w{{8}})"'.encode(), bytes(view[8 : 8 + min(size, len(view))]))
    return None if match is None else (8 + match.start(1), match.group(1).decode())


def _checksum(view: memoryview, position: int) -> str:
    """The checksum of a file, computed without its own eight digits.

    Args:
        position: that of the digits: in the header of a safetensors file, or at the end of an archive.
    """
    start = 0
    end = position
    header = b""
    if position + len(BLANK) < len(view):
        [size] = struct.unpack_from("<Q", view)
        start, end = min(8 + size, len(view)), len(view)
        header = bytes(view[:position]) + BLANK.encode() + bytes(view[position + len(BLANK) : start])
    with ThreadPoolExecutor(_threads(), "checking a checkpoint") as pool:
        sums = pool.map(lambda first: _sums(view[first : min(first + PIECE, end)]), range(start, end, PIECE))
        total = zlib.crc32(header)
        for piece_sums in sums:
            total = zlib.crc32(piece_sums, total)
    return f"{total:08x}"


def _sums(piece: memoryview) -> bytes:
    """The sums of the rows of a piece as 64-bit integers, followed by the bytes after the last complete row."""
    import numpy  # here, as every command imports this file, also those that need no numpy

    whole = len(piece) // ROW * ROW
    words = numpy.frombuffer(piece[:whole], "<u8").reshape(-1, ROW // 8)
    sums = words.sum(axis=1, dtype=numpy.uint64)
    return bytes(sums.astype("<u8").tobytes()) + bytes(piece[whole:])


def write_checksum(path: Path) -> None:
    """Write the checksum in place of the blank one of a safetensors file, or into the comment of a PyTorch archive.

    It is computed while the file is flushed to disk, for which a checkpoint waits in any case. Raises: OSError.
    """
    with path.open("r+b") as file:
        if zipfile.is_zipfile(file):
            file.seek(-2, os.SEEK_END)  # the length of the comment, which is still empty
            file.write(struct.pack("<H", len(COMMENT) + len(BLANK)) + COMMENT + BLANK.encode())
            file.flush()
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data, memoryview(data) as view:
            if (stored := _stored_checksum(view, zipfile.is_zipfile(file))) is None:
                raise OSError(f"the header has no {CHECKSUM}")
            with ThreadPoolExecutor(1, "checksum") as pool:
                digits = pool.submit(_checksum, view, stored[0])
                os.fsync(file.fileno())
                text = digits.result()
        file.seek(stored[0])
        file.write(text.encode())


def _threads() -> int:
    return max(1, min(4, len(os.sched_getaffinity(0))))


def check_same_save(model_file: Path, model: Mapping[str, Any], file: Path, entries: Mapping[str, Any]) -> None:
    """Check that two files belong to the same checkpoint: a backup may have restored only one of them.

    Raises:
        DamagedCheckpoint: they were not saved together.
    """
    if any(not isinstance(model.get(name), int) for name in ("epoch", "step")):
        return  # the caller that reads these entries reports the problem
    both = [name for name in ("epoch", "step") if name in entries]
    differing = [name for name in both if model[name] != entries[name]]
    if differing or model.get(SAVE_ID) != entries.get(SAVE_ID):
        said = ", ".join(f"{name} {entries[name]}" for name in both)
        wanted = ", ".join(f"{name} {model[name]}" for name in both)
        raise DamagedCheckpoint(
            f"{file}: expected the state that was saved together with {model_file.name} ({wanted}), got that of another "
            f"checkpoint ({said})"
        )


def check_rank_file(file: Path, stored: Mapping[str, Any], parts: Collection[str], marks: Mapping[str, Any]) -> None:
    """Check that a rank's file belongs to the same checkpoint as the model's, and is complete.

    Args:
        parts: the names that have to be in the file.
        marks: as in the model's file; earlier releases have none.

    Raises:
        DamagedCheckpoint: it belongs to another checkpoint, or a part is missing.
    """
    if missing := [name for name in parts if name not in stored]:
        raise DamagedCheckpoint(f"{file}: expected this rank's {', '.join(parts)}, got a file without {', '.join(missing)}")
    if differing := [name for name, value in marks.items() if stored.get(name) != value]:
        raise DamagedCheckpoint(
            f"{file}: expected the state that was saved together with the model, got that of another checkpoint (another "
            f"{differing[0]})"
        )


def shapes_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """The shapes of the tensors in nested dicts and lists, by their path, and the types of other values.

    >>> shapes_of({"optimizer": {"state": {3: {"step": 5, "steps": [1.0]}}}})
    {'optimizer.state.3.step': 'int', 'optimizer.state.3.steps.0': 'float'}
    """
    return dict(_shapes(entries, ""))


def _shapes(value: Any, path: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, member in value.items():
            yield from _shapes(member, f"{path}.{name}" if path else str(name))
    else:
        shape = getattr(value, "shape", None)
        yield path, type(value).__name__ if shape is None else str(tuple(int(size) for size in shape))


def check_shapes(file: Path, expected: object, entries: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Compare what a file holds with the shapes that were saved with it.

    An optimizer begins anew for a parameter without a state, as it does for all parameters at first. That a state is missing is
    seen here only.

    Args:
        expected: as `shapes_of` returned it.
        names: the parameters that numbers in the paths of the optimizer's state stand for.

    Raises:
        DamagedCheckpoint: something is missing, or has another shape.
    """
    shapes_here = shapes_of(entries)
    for path, shape in expected.items() if isinstance(expected, Mapping) else ():
        if (got := shapes_here.get(path)) != shape:
            entry, *inner = path.split(".")
            numbers = [name for name in inner if name in names] if entry == "optimizer" else []
            of = f" of the parameter {names[numbers[0]]}" if numbers else ""
            is_shape = shape.startswith("(")
            raise DamagedCheckpoint(
                f"{file}: expected {path}{of} as it was saved, {'of the shape' if is_shape else 'of type'} {shape}, got "
                f"{got or 'a file without it'}"
            )
