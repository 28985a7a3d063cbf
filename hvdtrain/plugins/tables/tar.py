"""Tar files as WebDataset writes them: consecutive files whose names differ only in their suffixes form a sample.

Tar files have no index. One is made of their headers, and kept in `lengths_dir`; every file can then be read by its place.

Python's tarfile takes a damaged header, or the end of a file that was cut off, for the end of the archive. What follows the last
header is therefore checked here: the end mark, and nothing else.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

import numpy

from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.files import why_not_opened
from hvdtrain.data.handles import Handles, Opened
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError
from hvdtrain.plugins.lengths.fingerprint import fingerprint_of, fingerprint_of_file
from hvdtrain.plugins.lengths.index import IndexFile, Stored
from hvdtrain.plugins.tables.conversions import Convert, load_npy, sound
from hvdtrain.plugins.tables.keys import TarDatasetKeys
from hvdtrain.plugins.tables.shards import Shards, check_vocabulary, text_conversions

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""The name of a file in an archive: the sample, then the suffix."""

IGNORED = re.compile(r"(.*/)?__[^/]*__(/.*)?")
"""The names of files about the archive itself, as in WebDataset."""

NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript")
SOUNDS = ("wav", "flac", "ogg", "mp3", "opus")
READABLE = ("npy", "json", *NUMBERS, *TEXTS, *SOUNDS)
"""The last parts of suffixes whose files can be read without a function of the config."""

TAR_BLOCK = 512
"""The unit of tar files in bytes."""

HEADER = 256
"""The number of bytes that hold the header of nearly every .npy file."""

NOWHERE = (-1, 0)
"""The place of a link to what an archive does not have, which matters only if it is read."""


@dataclass(frozen=True)
class TarIndex:
    """The samples of an archive.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (samples,).
        starts, sizes: the place of every file, in bytes: int64 of shape (samples, entries).
        frames: the length of every array, int64 of the same shape; -1: only known from reading it.
        largest: the largest class of every entry, int64 of shape (entries,); -1: none, or only known from reading.
    """

    tags: Array
    starts: Array
    sizes: Array
    frames: Array
    largest: Array


@dataclass(frozen=True)
class _Archive:
    """An archive, which is open while files of it are read."""

    path: str

    def open(self) -> Opened:
        """Raises: OSError."""
        opened = Opened()
        opened.handle = opened.enter_context(open(self.path, "rb", buffering=0))  # noqa: SIM115
        return opened


class TarShards(Shards):
    """The samples of tar files.

    Args:
        where: the config key, for messages.
        scanning: where the indices of the files are kept.

    Raises:
        DataError: a file is damaged, or a sample has no file for a key.
    """

    def __init__(self, where: str, keys: TarDatasetKeys, datasets: Mapping[str, Dataset], scanning: Scanning) -> None:
        paths = keys.data_files()
        entries = keys.entries or _entries_of(where, paths[0])
        self._entries = {key: suffix.lstrip(".").lower() for key, suffix in entries.items()}
        kinds = {key: suffix.rpartition(".")[2] for key, suffix in self._entries.items() if key not in keys.decode}
        for key, kind in kinds.items():
            if kind not in READABLE:
                raise DataError(
                    f"{where}.entries: expected a suffix that ends in {', '.join(READABLE)}, got {self._entries[key]!r} for "
                    f'{key!r} (give a function in decode, or name the entries to read: "entries": {{"data": "npy", ...}})'
                )
        check_vocabulary(where, keys.vocabulary, [key for key, kind in kinds.items() if kind in TEXTS], list(self._entries))
        self.texts = text_conversions(keys.vocabulary, keys.units)
        self.labels = {key: text.labels for key, text in self.texts.items()}
        self._convert = {key: _conversion(kind, self.texts.get(key)) for key, kind in kinds.items()}
        self._decode = dict(keys.decode)
        read = {key: (suffix, kinds.get(key, "")) for key, suffix in self._entries.items()}
        indices: dict[str, TarIndex] = {}
        first = scanning.rank * len(paths) // scanning.size  # so that each rank begins with other archives
        for path in (*paths[first:], *paths[:first]):
            indices[path] = _stored_index(path, list(read.values()), scanning)
        self._indices = [indices[path] for path in paths]
        self._archives = [_Archive(path) for path in paths]
        self._handles = Handles()
        super().__init__(paths, [len(index.tags) for index in self._indices], [index.tags for index in self._indices])
        frames = numpy.concatenate([index.frames for index in self._indices])
        if (frames >= 0).all():
            self.lengths = {key: frames[:, column].astype(numpy.int32) for column, key in enumerate(read)}
            largest = numpy.max([index.largest for index in self._indices], axis=0).tolist()
            self.dims = {key: number + 1 for key, number in zip(read, largest, strict=True) if number >= 0}

    def row(self, shard: int, row: int) -> dict[str, Array]:
        arrays = {}
        for column, (key, suffix) in enumerate(self._entries.items()):
            content = self._bytes(shard, row, column)
            where = f"{self.paths[shard]}, {bytes(self._indices[shard].tags[row]).decode('utf-8')}.{suffix}"
            if key in self._convert:
                arrays[key] = self._convert[key](content, where)
                continue
            try:
                arrays[key] = self._decode[key](content)
            except Exception as error:
                error.add_note(f"(in decode[{key!r}] of {where})")
                raise
        return arrays

    def identity(self) -> str:
        return f"{super().identity()} {fingerprint_of([self._entries, self._decode])}"

    def _bytes(self, shard: int, row: int, column: int) -> bytes:
        index = self._indices[shard]
        try:
            file = self._handles.opened(self._archives[shard]).handle
        except OSError as error:
            got = why_not_opened(error) or error.strerror
            raise DataError(f"{self.paths[shard]}: expected a tar file that can be read, got: {got}") from None
        return _read(self.paths[shard], file, int(index.starts[row, column]), int(index.sizes[row, column]))


def _read(path: str, file: BinaryIO, start: int, size: int) -> bytes:
    """Some bytes of an archive. Raises: DataError."""
    try:
        content = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise DataError(f"{path}: expected a tar file that can be read, got: {error.strerror}") from None
    if len(content) != size:
        raise DataError(f"{path}: expected {size} bytes at byte {start}, got {len(content)} (was it cut off meanwhile?)")
    return content


def _stored_index(path: str, entries: Sequence[tuple[str, str]], scanning: Scanning) -> TarIndex:
    """As `read_index`, from the folder of lengths if it is there; else it is stored there."""
    try:
        fingerprint = fingerprint_of_file(path)
    except OSError as error:
        raise DataError(f"{path}: expected a tar file, got: {error.strerror}") from None

    def make() -> Stored:
        scanning.waiting()
        return {}, vars(read_index(path, entries))

    return TarIndex(**IndexFile(scanning.folder, f"tar {fingerprint} {list(entries)}").get("tar", scanning, make)[1])


def read_index(path: str, entries: Sequence[tuple[str, str]]) -> TarIndex:
    """The samples of an archive, with the places and lengths of some of their files.

    Args:
        entries: the suffixes of the files, each with its last part, or '' if a function of the config decodes them. Other files
            are ignored.

    Raises:
        DataError: the file is no tar file, it is damaged, or a sample does not have all files.
    """
    tags: list[bytes] = []
    places: list[list[tuple[int, int]]] = []
    suffixes = [suffix for suffix, _ in entries]
    for sample, files in _samples(path):
        missing = [suffix for suffix in suffixes if suffix not in files]
        if len(missing) == len(suffixes) and {*files.values()} == {NOWHERE}:
            continue
        if missing:
            raise DataError(
                f"{path}: expected files with the suffixes {', '.join(suffixes)} of every sample, got none with {missing[0]} of "
                f"{sample!r}, which has {', '.join(files)}"
            )
        if (link := next((suffix for suffix in suffixes if files[suffix] == NOWHERE), None)) is not None:
            raise DataError(
                f"{path}: expected a file of the archive before the link '{sample}.{link}' to it, got none (tar --dereference "
                "stores files in place of links)"
            )
        tags.append(sample.encode("utf-8"))
        places.append([files[suffix] for suffix in suffixes])
    if len(set(tags)) < len(tags):
        twice = next(tag for number, tag in enumerate(tags) if tag in tags[:number])
        raise DataError(f"{path}: expected the files of a sample one after the other, got sample {twice.decode()!r} again")
    both = numpy.array(places, dtype=numpy.int64).reshape(len(tags), len(suffixes), 2)
    frames = numpy.full((len(tags), len(suffixes)), -1, dtype=numpy.int64)
    largest = numpy.full(len(suffixes), -1, dtype=numpy.int64)
    if all(kind == "npy" or kind in NUMBERS for _, kind in entries):
        with open(path, "rb", buffering=0) as file:
            for row, (tag, of_sample) in enumerate(zip(tags, places, strict=True)):
                for column, ((suffix, kind), place) in enumerate(zip(entries, of_sample, strict=True)):
                    where = f"{path}, {tag.decode()}.{suffix}"
                    with suppress(DataError):  # reading all lengths names it, or leaves it out
                        if kind == "npy":
                            frames[row, column] = _npy_frames(path, file, *place, where)
                        else:
                            largest[column] = max(largest[column], _number(_read(path, file, *place), where)[0])
                            frames[row, column] = 1
    return TarIndex(numpy.array(tags, dtype=bytes), both[:, :, 0].copy(), both[:, :, 1].copy(), frames, largest)


def _npy_frames(path: str, file: BinaryIO, start: int, size: int, where: str) -> int:
    """The number of frames of an array, by its header; -1 for classes, of which only reading shows how many there are. Raises:
    DataError, if it is no array, or its size is not what the header says."""
    for most in (HEADER, size):
        stream = io.BytesIO(_read(path, file, start, min(most, size)))
        try:
            version = numpy.lib.format.read_magic(stream)
            read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
            shape, _, dtype = read(stream)
        except ValueError as error:
            if most < size:
                continue
            raise DataError(f"{where}: expected a .npy file of numbers, got: {error}") from None
        break
    expected = stream.tell() + math.prod(shape) * dtype.itemsize
    if not dtype.hasobject and size != expected:
        raise DataError(f"{where}: expected a .npy file of {expected} bytes, as its header says, got {size}")
    if len(shape) < 2 and dtype.kind in "iub":
        return -1
    return int(shape[0]) if shape else 1


def _entries_of(where: str, path: str) -> dict[str, str]:
    """By data key, the suffixes of the first sample: the data key is the first part of a suffix. Raises: DataError."""
    _, files = next(_samples(path), ("", {}))
    if not files:
        raise DataError(f"{path}: expected at least one sample, got none")
    entries = {suffix.partition(".")[0]: suffix for suffix in files}
    if len(entries) < len(files):
        raise DataError(
            f'{where}: expected "entries", as two suffixes begin in the same way, got none ({path} has {", ".join(files)})'
        )
    return entries


def _samples(path: str) -> Iterator[tuple[str, dict[str, tuple[int, int]]]]:
    """The samples of an archive, each with the places of its files by suffix. Raises: DataError."""
    current = ""
    files: dict[str, tuple[int, int]] = {}
    for name, start, size in _files(path):
        match = NAME.fullmatch(name)
        if match is None or IGNORED.fullmatch(name):
            continue
        sample = match.group(1)
        suffix = match.group(2).lower()
        if sample != current:
            if files:
                yield current, files
            current = sample
            files = {}
        if suffix in files:
            raise DataError(f"{path}: expected each file of a sample once, got {name!r} again at byte {start}")
        files[suffix] = start, size
    if files:
        yield current, files


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every regular file in an archive, and of every link to one before it. Raises: DataError."""
    last = "its beginning"
    places: dict[str, tuple[int, int]] = {}
    try:
        with open(path, "rb") as file:
            try:
                with tarfile.open(fileobj=file, mode="r:", encoding="utf-8", errors="strict") as archive:
                    while (member := archive.next()) is not None:
                        archive.members.clear()  # type: ignore[attr-defined]  # tarfile keeps all of them
                        last = repr(member.name)
                        if member.issparse():
                            raise DataError(f"{path}: expected plain files, got the sparse file {last}")
                        if member.isreg():
                            places[os.path.normpath(member.name)] = member.offset_data, member.size
                            yield member.name, member.offset_data, member.size
                        elif member.islnk() or member.issym():
                            folder = "" if member.islnk() else os.path.dirname(member.name)
                            target = os.path.normpath(os.path.join(folder, member.linkname))
                            place = places[os.path.normpath(member.name)] = places.get(target, NOWHERE)
                            yield member.name, *place
                    end = archive.offset
            except (tarfile.TarError, UnicodeDecodeError, EOFError, ValueError) as error:
                file.seek(0)
                is_compressed = file.read(2) in COMPRESSED
                cure = "decompress it: files in a compressed archive cannot be read by their place"
                hint = cure if is_compressed else "was it cut off?"
                raise DataError(f"{path}: expected a whole tar file, got a damaged one behind {last}: {error} ({hint})") from None
            _check_end(path, file, end, last)
    except OSError as error:
        raise DataError(f"{path}: expected a tar file, got: {error.strerror or error}") from None


COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5")
"""The first two bytes of files that are compressed with gzip, bzip2, xz and zstd."""


def _check_end(path: str, file: BinaryIO, end: int, last: str) -> None:
    """Raises: DataError, unless an archive ends with zeros from byte `end` on."""
    file.seek(end)
    mark = file.read(TAR_BLOCK)
    if len(mark) < TAR_BLOCK:
        raise DataError(f"{path}: expected the end mark of a tar file behind {last}, got the end of the file (was it cut off?)")
    if mark.strip(b"\0"):
        raise DataError(
            f"{path}: expected a header or the end mark behind {last}, at byte {end}, got other bytes (is it damaged?)"
        )
    while more := file.read(1 << 20):
        if more.strip(b"\0"):
            raise DataError(
                f"{path}: expected nothing behind the end mark at byte {end}, got more data (are these several tar files in one? "
                "tar --concatenate joins them)"
            )


def _conversion(kind: str, text: Convert | None) -> Callable[[bytes, str], Array]:
    """How the bytes of a file become an array, by the last part of its suffix."""
    if kind in SOUNDS:
        return sound()
    if text is not None:
        return lambda content, where: text(_text(content, where), where)
    return {"npy": _npy, "json": _json}.get(kind, _number)


def _npy(content: bytes, where: str) -> Array:
    if content.startswith(NPY_1_0):  # numpy.load takes several times as long, mostly for the header
        start = len(NPY_1_0) + 2 + int.from_bytes(content[len(NPY_1_0) : len(NPY_1_0) + 2], "little")
        with suppress(ValueError):
            shape, in_fortran_order, dtype = _npy_header(content[:start])
            if not in_fortran_order and not dtype.hasobject and len(content) == start + math.prod(shape) * dtype.itemsize:
                return numpy.frombuffer(content, dtype, offset=start).reshape(shape)
    if not content.startswith((b"\x93NUMPY", b"PK")):  # which numpy takes for a pickle
        raise DataError(f"{where}: expected a .npy file of numbers, got one that begins with {content[:8]!r}")
    stream = io.BytesIO(content)
    values = load_npy(stream, where)
    size = stream.tell()
    if size != len(content):
        raise DataError(f"{where}: expected a .npy file of {size} bytes, as its header says, got {len(content)}")
    return values


NPY_1_0 = b"\x93NUMPY\x01\x00"


@lru_cache(maxsize=4096)
def _npy_header(header: bytes) -> tuple[tuple[int, ...], bool, numpy.dtype[Any]]:
    """Shape, whether the order is Fortran's, and type, by the whole header of version 1.0. Raises: ValueError."""
    return numpy.lib.format.read_array_header_1_0(io.BytesIO(header[len(NPY_1_0) :]))


def _json(content: bytes, where: str) -> Array:
    try:
        values = numpy.asarray(json.loads(content))
    except ValueError as error:
        raise DataError(f"{where}: expected numbers as JSON, got: {error}") from None
    if values.dtype.kind not in "biuf":
        raise DataError(f"{where}: expected numbers as JSON, got {content[:40]!r}")
    return values.astype(numpy.float32) if values.dtype.kind == "f" else values


def _number(content: bytes, where: str) -> Array:
    try:
        return numpy.array([int(content)], dtype=numpy.int64)
    except (ValueError, OverflowError):
        raise DataError(f"{where}: expected an integer, got {content[:40]!r}") from None


def _text(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8-sig").rstrip()  # a mark of Windows' editors, and the end of the line
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text in UTF-8, got: {error}") from None
