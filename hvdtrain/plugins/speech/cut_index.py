"""An index of the cuts of a manifest or of a folder in Shar format, with which any of them can be read at once.

A file of all cuts, a line of JSON each, and the places of their lines, lengths and data are made once and kept in `lengths_dir`.
Later starts map them: they take no longer for a million cuts than for a few.
"""

from __future__ import annotations

import gzip
import json
import mmap
import os
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy

from hvdtrain.data.dataset import Scanning
from hvdtrain.data.formats.found import fingerprint_of
from hvdtrain.data.indexed import UNREADABLE
from hvdtrain.data.types import Array
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.lengths.index import IndexFile, Stored

Member = tuple[int, int, int, int, int]
"""The data of a cut in a tar file: offset and size of the data and of its description, and 1 if it is a .npy file."""

NO_MEMBER = (0, 0, 0, 0, 0)

PROGRESS = 256
"""Cuts between two reports of progress."""

Lengths = Callable[[Any, str], Mapping[str, int]]
"""The lengths of a cut, given its place for messages. Raises: BrokenSequence."""


@dataclass(frozen=True)
class Shard:
    """Attributes:
    cuts: the manifest.
    data: the tar file, or a manifest, with the field that is read; None: the cuts describe it themselves.
    """

    cuts: str
    data: str | None = None


class CutIndex:
    """Cuts by number.

    Args:
        origin: the config key, or the manifest of cuts that are in memory.
        field: what is read of a cut: 'recording' or 'features'.
        shards: the files; empty: the cuts were made by a function, or are in memory.
        held: the cuts that are in memory; None: their lines are.
        stored: what `_build` returns.

    Attributes:
        tags: of all cuts, as UTF-8.
        lengths: by data key, of all cuts.
        broken: a message for every broken cut.
    """

    def __init__(self, origin: str, field: str, shards: list[Shard], held: list[Any] | None, stored: Stored) -> None:
        self._origin = origin
        self._field = field
        self._shards = shards
        self._held = held
        about, arrays = stored
        self._lines = arrays["lines"].data
        self._offsets = arrays["offsets"]
        self._shard = arrays["shard"]
        self._row = arrays["row"]
        self._members = arrays.get("members")
        self.tags = arrays["tags"]
        self.lengths = {name.removeprefix(LENGTHS): column for name, column in arrays.items() if name.startswith(LENGTHS)}
        self.broken: list[str] = about["broken"]

    def describe(self, number: int) -> str:
        """The place of a cut, for messages."""
        shard = self._shards[self._shard[number]] if self._shards else None
        return _describe(self._origin, shard, int(self._row[number]), self.tags[number].decode("utf-8"))

    def cut(self, number: int) -> Any:
        """A cut, with its data if that is in a tar file. Raises: BrokenSequence."""
        if self._held is not None:
            return self._held[number]
        from lhotse.serialization import deserialize_item

        line = bytes(self._lines[int(self._offsets[number]) : int(self._offsets[number + 1])])
        cut = deserialize_item(json.loads(line))
        if self._members is not None:
            self._attach(number, cut)
        return cut

    def _attach(self, number: int, cut: Any) -> None:
        from lhotse.serialization import deserialize_item
        from lhotse.shar.utils import fill_shar_placeholder

        path = self._shards[self._shard[number]].data or ""
        offset, size, about_offset, about_size, is_npy = self._members[number].tolist()  # type: ignore[index]  # the caller checked
        try:
            with open(path, "rb", buffering=0) as file:
                data = os.pread(file.fileno(), size, offset)
                about = os.pread(file.fileno(), about_size, about_offset)
            if len(data) < size or len(about) < about_size:
                raise BrokenSequence(
                    f"{self.describe(number)}: expected {size} bytes of it, got {len(data)}: the file is cut off"
                )
            manifest = deserialize_item(json.loads(about))
            fill_shar_placeholder(manifest=manifest, data=data, tarpath=f"data.{'npy' if is_npy else 'llc'}")
        except BrokenSequence:
            raise
        except Exception as error:  # of a damaged file, json's and Lhotse's own: it takes the keys for arguments
            raise BrokenSequence(f"{self.describe(number)}: expected it in {path}, got: {error}") from None
        setattr(cut, self._field, manifest)


def _describe(origin: str, shard: Shard | None, row: int, tag: str) -> str:
    if shard is None:
        return f"{origin}, cut {tag!r}"
    return f"{shard.cuts}, line {row}, cut {tag!r}" + (f" of {shard.data}" if shard.data else "")


def index_cuts(
    where: str, origin: str, cuts: Any, field: str, described: Any, lengths_of: Lengths, keys: list[str], scanning: Scanning
) -> CutIndex:
    """The index of a CutSet, from `lengths_dir` if it is one of files and was made before.

    Args:
        origin, field: as of `CutIndex`.
        described: values that determine the lengths.
        keys: the data keys.

    Raises:
        DataError: the cuts cannot be indexed.
    """
    shards = shards_of(where, cuts.data, field)
    held = None if cuts.is_lazy else list(cuts)

    def make() -> Stored:
        with scanning.progress(f"{where}: cuts", None) as advance:
            if shards is not None:
                entries = _cuts_of_shards(shards)
            elif held is None:
                entries = _cuts_of_functions(where, cuts)
            else:
                entries = (_Entry(cut, b"", 0, number) for number, cut in enumerate(held, start=1))
            return _build(origin, field, shards or [], entries, lengths_of, keys, advance)

    if shards is None:  # functions may change
        return CutIndex(origin, field, [], held, make())
    files = [path for shard in shards for path in (shard.cuts, shard.data) if path]
    file = IndexFile(scanning.folder, f"cuts 3 {field} {fingerprint_of([files, described])}")
    stored = file.get("cuts", scanning, make, f"{where}: the index of the cuts is made", mapped=True)
    return CutIndex(origin, field, shards, held, stored)


LENGTHS = "lengths/"
"""What the name of an array of lengths begins with, before the data key."""


def first_cut(where: str, origin: str, cuts: Any) -> Any:
    """The first cut of a CutSet, of Shar without its data. Raises: DataError."""
    shards = shards_of(where, cuts.data, "")
    first = next(iter(cuts), None) if shards is None else next((entry.cut for entry in _cuts_of_shards(shards)), None)
    if first is None:
        raise DataError(f"{shards[0].cuts if shards else origin}: expected at least one cut, got none")
    return first


def shards_of(where: str, data: Any, field: str) -> list[Shard] | None:
    """The files of a lazy CutSet; None: it is made by a function of other cuts. Raises: DataError."""
    kind = type(data).__name__
    if kind in ("LazyManifestIterator", "LazyJsonlIterator"):
        return [Shard(str(data.path))]
    if kind == "LazySharIterator":
        if any(data.cut_map_fns):
            raise DataError(
                f"{where}.cuts: expected Shar cuts without cut_map_fns, which change them while they are read, got some"
            )
        shards = [Shard(str(shard["cuts"]), str(shard[field]) if field in shard else None) for shard in data.shards]
        for path in [path for shard in shards for path in (shard.cuts, shard.data) if path]:
            if not Path(path).is_file():
                raise DataError(f"{where}.cuts: expected files in Shar format, got {path!r}, which is not one here")
        return shards
    if _is_infinite(data):
        raise DataError(
            f"{where}.cuts: expected a CutSet with an end, got one that repeats forever (the epochs of the training repeat it: "
            "leave out .repeat() and infinite_mux)"
        )
    return None


def _is_infinite(data: Any) -> bool:
    kind = type(data).__name__
    if not type(data).__module__.startswith("lhotse."):
        return False
    if kind == "LazyInfiniteApproximateMultiplexer" or (kind == "LazyRepeater" and data.times is None):
        return True
    inner = [value for member in vars(data).values() for value in (member if isinstance(member, (list, tuple)) else [member])]
    is_any = any if kind != "LazyIteratorMultiplexer" or not data.stop_early else all
    nested = [_is_infinite(value) for value in inner if type(value).__module__.startswith("lhotse.")]
    return bool(nested) and is_any(nested)


@dataclass(frozen=True)
class _Entry:
    """A cut while the index is made. `problem`: why its data cannot be read; '' if it can."""

    cut: Any
    line: bytes
    shard: int
    row: int
    member: Member = NO_MEMBER
    problem: str = ""


def _cuts_of_shards(shards: Sequence[Shard]) -> Iterator[_Entry]:
    from lhotse.serialization import deserialize_item

    for number, shard in enumerate(shards):
        members = None if shard.data is None else _members(shard.data)
        row = 0
        try:
            with _open(shard.cuts) as file:
                for row, line in enumerate(file, start=1):
                    cut = deserialize_item(json.loads(line))
                    if getattr(cut, "supervisions", None) is None:
                        raise ValueError(f"a manifest of {type(cut).__name__}")
                    member = NO_MEMBER
                    problem = ""
                    if members is not None:
                        member, name, problem = next(members, (NO_MEMBER, cut.id, "the file ends before it"))
                        if name != cut.id and not problem:
                            raise ValueError(f"cut {cut.id!r}, whose place in {shard.data} has the data of {name!r}")
                    yield _Entry(cut, line.strip(), number, row, member, problem)
        except DataError:
            raise
        except Exception as error:  # of a damaged file, gzip's, zlib's, json's and Lhotse's own
            raise DataError(f"{shard.cuts}, line {row}: expected a cut of Lhotse, got: {error}") from None


def _open(path: str) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.endswith(".gz") else open(path, "rb")  # noqa: SIM115  # the caller closes it


def _members(path: str) -> Iterator[tuple[Member, str, str]]:
    """Where the data of each cut lies in a tar file, its name, and why it cannot be read."""
    if not path.endswith(".tar"):
        raise DataError(f"{path}: expected a .tar file, got another one (of compressed tar files no part can be read by itself)")
    size = os.path.getsize(path)
    try:
        with tarfile.open(path, "r:") as tar:
            pair: list[tarfile.TarInfo] = []
            for member in tar:
                pair.append(member)
                if len(pair) == 2:
                    data, about = pair
                    pair = []
                    ends = max(data.offset_data + data.size, about.offset_data + about.size)
                    problem = "the file is cut off within it" if ends > size else ""
                    if about.name.endswith(".nometa"):
                        problem = "the cut has none"
                    is_npy = int(data.name.endswith(".npy"))
                    place = data.offset_data, data.size, about.offset_data, about.size, is_npy
                    yield place, os.path.splitext(data.name)[0], problem
    except (tarfile.TarError, OSError, EOFError) as error:
        yield NO_MEMBER, "", f"the file cannot be read further: {error}"


def _cuts_of_functions(where: str, cuts: Any) -> Iterator[_Entry]:
    for number, cut in enumerate(cuts):
        try:
            line = json.dumps(cut.to_dict()).encode("utf-8")
        except TypeError:
            raise DataError(
                f"{where}.cuts: expected cuts whose data lies in files, got cut {cut.id!r} with data in memory (functions of "
                "Shar cuts: .to_eager() keeps all of it in memory, or give the folder itself)"
            ) from None
        yield _Entry(cut, line, 0, number + 1)


def _build(
    origin: str,
    field: str,
    shards: list[Shard],
    entries: Iterable[_Entry],
    lengths_of: Lengths,
    keys: list[str],
    advance: Callable[[int], None],
) -> Stored:
    """The messages about broken cuts; and by name, the lines of all cuts as JSON, in a temporary file; where the line of each
    begins, and the end; the numbers of its shard and of its line there, from 1; tags and lengths; and `members`, int64 of shape
    (cuts, 5), as `Member`, unless the cuts describe their data themselves."""
    with tempfile.TemporaryFile() as file:
        offsets = [0]
        rows = []
        tags = []
        members = []
        lengths: dict[str, list[int]] = {key: [] for key in keys}
        broken = []
        for number, entry in enumerate(entries):
            file.write(entry.line + b"\n")
            offsets.append(offsets[-1] + len(entry.line) + 1)
            rows.append((entry.shard, entry.row))
            tags.append(str(entry.cut.id).encode("utf-8"))
            members.append(entry.member)
            place = _describe(origin, shards[entry.shard] if shards else None, entry.row, str(entry.cut.id))
            by_key = dict.fromkeys(keys, UNREADABLE)
            try:
                if entry.problem:
                    raise BrokenSequence(f"{place}: expected its {field}, got none: {entry.problem}")
                by_key = dict(lengths_of(entry.cut, place))
            except BrokenSequence as error:
                broken.append(str(error))
            for key in keys:
                lengths[key].append(by_key[key])
            if number % PROGRESS == 0:
                advance(PROGRESS)
        file.flush()
        lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    where = numpy.array(rows, numpy.int64)
    arrays: dict[str, Array] = {
        "lines": numpy.frombuffer(lines, numpy.uint8),
        "offsets": numpy.array(offsets, numpy.int64),
        "shard": where[:, 0],
        "row": where[:, 1],
        "tags": numpy.array(tags, dtype=bytes),
        **{f"{LENGTHS}{key}": numpy.array(column, numpy.int32) for key, column in lengths.items()},
    }
    if any(shard.data for shard in shards):
        arrays["members"] = numpy.array(members, numpy.int64)
    return {"broken": broken}, arrays
