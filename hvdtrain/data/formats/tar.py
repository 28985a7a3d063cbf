"""Tar files as WebDataset writes them: consecutive files whose names differ only in their suffixes form a sample.

Tar files have no index. Opening one reads its headers, after which every file in it can be read by its place. Python's tarfile
takes a damaged header, or the end of a file that was cut off, for the end of the archive. What follows the last header is
therefore checked here: the end mark, and nothing else.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.formats.conversions import Convert, sound
from hvdtrain.data.formats.found_lengths import identity_of
from hvdtrain.data.formats.shard_keys import TarDatasetKeys
from hvdtrain.data.formats.shards import Shards, check_vocabulary, text_conversions
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]+)")
"""The name of a file in an archive: the sample, then the suffix."""

IGNORED = re.compile(r"(.*/)?__[^/]*__(/.*)?")
"""The names of files about the archive itself, as in WebDataset."""

NUMBERS = ("cls", "cls2", "class", "count", "index", "inx", "id")
TEXTS = ("txt", "text", "transcript")
SOUNDS = ("wav", "flac", "ogg", "mp3", "opus")
READABLE = ("npy", "json", *NUMBERS, *TEXTS, *SOUNDS)
"""The last parts of suffixes whose files can be read without a function of the config."""

BLOCK = 512
"""The unit of tar files in bytes."""

HEADER = 256
"""The number of bytes that hold the header of nearly every .npy file."""

OPEN_FILES = 64
"""The number of archives that are open at a time."""


@dataclass(frozen=True)
class TarIndex:
    """The samples of an archive.

    Attributes:
        tags: as UTF-8; numpy bytes of shape (samples,).
        starts, sizes: the place of every file, in bytes: int64 of shape (samples, suffixes).
    """

    tags: Array
    starts: Array
    sizes: Array


class TarShards(Shards):
    """The samples of tar files.

    Args:
        where: the config key, for messages.

    Raises:
        DataError: a file is damaged, or a sample lacks a file.
    """

    def __init__(self, where: str, keys: TarDatasetKeys) -> None:
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
        texts = text_conversions(where, keys.vocabulary, keys.units)
        self.labels = {key: labels for key, (_, labels) in texts.items()}
        self._convert = {key: _conversion(kind, texts[key][0] if key in texts else None) for key, kind in kinds.items()}
        self._decode = dict(keys.decode)
        suffixes = list(self._entries.values())
        self._indices = [read_index(path, suffixes) for path in paths]
        self._open: OrderedDict[int, BinaryIO] = OrderedDict()
        super().__init__(paths, [len(index.tags) for index in self._indices], [index.tags for index in self._indices])
        if set(kinds.values()) <= {"npy", *NUMBERS} and not self._decode:
            self._measure(kinds)

    def item(self, shard: int, row: int) -> dict[str, Array]:
        arrays = {}
        for column, (key, suffix) in enumerate(self._entries.items()):
            content = self._bytes(shard, row, column)
            where = f"{self.paths[shard]}, {self._name(shard, row)}.{suffix}"
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
        return f"{super().identity()} {identity_of([self._entries, self._decode])}"

    def _bytes(self, shard: int, row: int, column: int, most: int | None = None) -> bytes:
        """The content of a file, or its beginning. Raises: DataError."""
        index = self._indices[shard]
        start, size = int(index.starts[row, column]), int(index.sizes[row, column])
        size = size if most is None else min(size, most)
        try:
            content = os.pread(self._file(shard).fileno(), size, start)
        except OSError as error:
            raise DataError(f"{self.paths[shard]}: expected a tar file that can be read, got: {error.strerror}") from None
        if len(content) != size:
            raise DataError(
                f"{self.paths[shard]}: expected {size} bytes of {self._name(shard, row)} at byte {start}, got {len(content)} "
                "(was it cut off meanwhile?)"
            )
        return content

    def _file(self, shard: int) -> BinaryIO:
        """An archive; a file that is closed while another thread reads from it stays open until that thread is done."""
        file = self._open.pop(shard, None) or open(self.paths[shard], "rb", buffering=0)  # noqa: SIM115
        self._open[shard] = file
        if len(self._open) > OPEN_FILES:
            self._open.popitem(last=False)
        return file

    def _name(self, shard: int, row: int) -> str:
        return bytes(self._indices[shard].tags[row]).decode("utf-8")

    def _measure(self, kinds: Mapping[str, str]) -> None:
        """Find the lengths and the numbers of classes from headers and numbers, unless there are classes in arrays."""
        lengths = {key: numpy.ones(len(self), numpy.int32) for key in kinds}
        dims: dict[str, int] = {}
        for column, (key, kind) in enumerate(kinds.items()):
            for shard, start in enumerate(self.bounds[:-1].tolist()):
                for row in range(len(self._indices[shard].tags)):
                    if kind in NUMBERS:
                        dims[key] = max(dims.get(key, 1), int(self._array(shard, row, column, key)[0]) + 1)
                        continue
                    shape, dtype = self._npy_header(shard, row, column)
                    if len(shape) < 2 and dtype.kind in "iub":
                        return  # only reading the classes shows how many there are
                    lengths[key][start + row] = shape[0] if shape else 1
        self.lengths, self.dims = lengths, dims

    def _array(self, shard: int, row: int, column: int, key: str) -> Array:
        """One array of an item. Raises: DataError."""
        where = f"{self.paths[shard]}, {self._name(shard, row)}.{self._entries[key]}"
        return self._convert[key](self._bytes(shard, row, column), where)

    def _npy_header(self, shard: int, row: int, column: int) -> tuple[tuple[int, ...], numpy.dtype[Any]]:
        """Shape and type of an array. Raises: DataError, also if its size does not fit them."""
        where = f"{self.paths[shard]}, {self._name(shard, row)}"
        size = int(self._indices[shard].sizes[row, column])
        for most in (HEADER, None):
            stream = io.BytesIO(self._bytes(shard, row, column, most))
            try:
                version = numpy.lib.format.read_magic(stream)
                read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else numpy.lib.format.read_array_header_2_0
                shape, _, dtype = read(stream)
            except ValueError as error:
                if most is not None and size > most:
                    continue
                raise DataError(f"{where}: expected a .npy file of numbers, got: {error}") from None
            break
        expected = stream.tell() + int(numpy.prod(shape, dtype=numpy.int64)) * dtype.itemsize
        if not dtype.hasobject and size != expected:
            raise DataError(f"{where}: expected a .npy file of {expected} bytes, as its header says, got {size}")
        return shape, dtype


def open_tar(where: str, keys: TarDatasetKeys, datasets: Mapping[str, Dataset]) -> TarShards:
    """Open a TarDataset. Raises: DataError."""
    return TarShards(where, keys)


def read_index(path: str, suffixes: Sequence[str]) -> TarIndex:
    """The samples of an archive, with the places of their files with certain suffixes; other files are ignored.

    Raises:
        DataError: the file is no tar file, it is damaged, or a sample lacks one of the files.
    """
    tags: list[bytes] = []
    places: list[list[tuple[int, int]]] = []
    for sample, files in _samples(path):
        missing = [suffix for suffix in suffixes if suffix not in files]
        if missing:
            raise DataError(
                f"{path}: expected files with the suffixes {', '.join(suffixes)} of every sample, got none with {missing[0]} of "
                f"{sample!r}, which has {', '.join(files)}"
            )
        tags.append(sample.encode("utf-8"))
        places.append([files[suffix] for suffix in suffixes])
    if len(set(tags)) < len(tags):
        twice = next(tag for number, tag in enumerate(tags) if tag in tags[:number])
        raise DataError(f"{path}: expected the files of a sample one after the other, got sample {twice.decode()!r} again")
    both = numpy.array(places, dtype=numpy.int64).reshape(len(tags), len(suffixes), 2)
    return TarIndex(numpy.array(tags, dtype=bytes), both[:, :, 0].copy(), both[:, :, 1].copy())


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
    current, files = "", dict[str, tuple[int, int]]()
    for name, start, size in _files(path):
        found = NAME.fullmatch(name)
        if found is None or IGNORED.fullmatch(name):
            continue
        sample, suffix = found.group(1), found.group(2).lower()
        if sample != current:
            if files:
                yield current, files
            current, files = sample, {}
        if suffix in files:
            raise DataError(f"{path}: expected each file of a sample once, got {name!r} again at byte {start}")
        files[suffix] = start, size
    if files:
        yield current, files


def _files(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every regular file in an archive. Raises: DataError."""
    last = "its beginning"
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
                            yield member.name, member.offset_data, member.size
                    end = archive.offset
            except (tarfile.TarError, UnicodeDecodeError, EOFError, ValueError) as error:
                raise _damaged(path, file, last, error) from None
            _check_end(path, file, end, last)
    except OSError as error:
        raise DataError(f"{path}: expected a tar file, got: {error.strerror or error}") from None


def _damaged(path: str, file: BinaryIO, last: str, error: Exception) -> DataError:
    """The error for an archive whose headers cannot be read behind a file."""
    file.seek(0)
    is_compressed = file.read(2) in COMPRESSED
    hint = "decompress it: files in a compressed archive cannot be read by their place" if is_compressed else "was it cut off?"
    return DataError(f"{path}: expected a whole tar file, got a damaged one behind {last}: {error} ({hint})")


COMPRESSED = (b"\x1f\x8b", b"BZ", b"\xfd7", b"(\xb5")
"""The first two bytes of files that are compressed with gzip, bzip2, xz and zstd."""


def _check_end(path: str, file: BinaryIO, end: int, last: str) -> None:
    """Raises: DataError, unless an archive ends with zeros from byte `end` on."""
    file.seek(end)
    mark = file.read(BLOCK)
    if len(mark) < BLOCK:
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
        decode = sound(None)
        return lambda content, where: decode({"bytes": content, "path": None}, where)
    if text is not None:
        return lambda content, where: text(_text(content, where), where)
    return {"npy": _npy, "json": _json}.get(kind, _number)


def _npy(content: bytes, where: str) -> Array:
    try:
        values: Any = numpy.load(io.BytesIO(content), allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{where}: expected a .npy file of numbers, got: {error}") from None
    if not isinstance(values, numpy.ndarray):
        raise DataError(f"{where}: expected a .npy file of numbers, got an archive of several arrays")
    return values


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
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: expected text in UTF-8, got: {error}") from None
