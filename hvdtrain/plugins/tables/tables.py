"""Parquet and Arrow files, read by pyarrow: each row is a sequence.

A parquet file can only be decoded by row groups. The last ones are kept, as neighbouring rows are likely to be needed together.
Arrow files are memory-mapped: a row is read by its place.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.missing import import_package
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.files import check_same, file_stamp, why_not_opened
from hvdtrain.data.formats.found import fingerprint_of
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError
from hvdtrain.plugins.tables.conversions import Convert, sound
from hvdtrain.plugins.tables.keys import ArrowDatasetKeys, ParquetDatasetKeys
from hvdtrain.plugins.tables.shards import Shards, check_vocabulary, text_conversions

pyarrow = import_package("pyarrow", "ParquetDataset, ArrowDataset, HuggingFaceDataset")
for submodule in ("compute", "parquet"):
    import_package(f"pyarrow.{submodule}", "ParquetDataset, ArrowDataset, HuggingFaceDataset")

CACHE_BYTES = 512 << 20
"""Bytes of decoded row groups of parquet files that a rank keeps, besides the last one."""

FEW = 256
"""The rows that are read at once of a row group that pyarrow cannot read as a whole, or of a table that is open."""

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream. pyarrow takes a stream without them for a complete one."""


@dataclass(frozen=True)
class Column:
    """A column of some consecutive rows.

    Attributes:
        values: the numbers of all rows, one after the other; or, for other types, pyarrow's array with an element per row.
        starts: the first number of every row, then the number of all; None: each row is a single one.
        width: the numbers per frame, 0 if there are no frames; None: the frames are numbers.
        problems: by row, why it cannot be read.
    """

    values: Any
    starts: Array | None = None
    width: int | None = None
    problems: Mapping[int, str] = field(default_factory=dict)


class Group:
    """Consecutive rows of a file: a row group of parquet, or a record batch of Arrow. Columns are converted when needed.

    Args:
        where: the file, for messages.
        first: the number of the first row.
        table: pyarrow's table or record batch. Parts of a table stay apart: together they may have more text than an array can.

    Attributes:
        num_bytes: its size in memory.
    """

    def __init__(self, where: str, first: int, table: Any) -> None:
        self._where = where
        self._batches = table.to_batches() if hasattr(table, "to_batches") else [table]
        self._bounds = numpy.cumsum([first, *(batch.num_rows for batch in self._batches)]).tolist()
        self._columns: dict[tuple[str, int], Column] = {}
        self.num_bytes = int(table.nbytes)

    def value(self, name: str, row: int) -> Any:
        """The numbers of a row of the file as an array; of other types, the value itself. Raises: DataError."""
        batch = bisect_right(self._bounds, row) - 1
        column = self._column(name, batch)
        if (problem := column.problems.get(row - self._bounds[batch])) is not None:
            raise DataError(f"{self.describe(name, row)}: {problem}")
        row -= self._bounds[batch]
        if column.starts is None and isinstance(column.values, numpy.ndarray):
            return column.values[row : row + 1]
        if column.starts is None:
            return column.values[row].as_py()
        values = column.values[column.starts[row] : column.starts[row + 1]]
        return values if column.width is None else values.reshape(-1 if column.width else 0, column.width)

    def width(self, name: str) -> int:
        """The numbers per frame of a column of frames; 0: it has none."""
        return max(self._column(name, batch).width or 0 for batch in range(len(self._batches)))

    def describe(self, name: str, row: int) -> str:
        """A value's place, for messages."""
        return f"{self._where}, column {name!r}, row {row}"

    def _column(self, name: str, batch: int) -> Column:
        if (name, batch) not in self._columns:
            self._columns[name, batch] = self._convert(name, batch)
        return self._columns[name, batch]

    def _convert(self, name: str, batch: int) -> Column:
        """A column as arrays of numpy, if it holds numbers."""
        values = _plain(self._batches[batch].column(name))
        problems = _missing(values)
        if not _is(values.type, LISTS):
            return Column(_numbers(values) if _is(values.type, NUMBERS) else values, problems=problems)
        starts = _starts(values)
        inner = _plain(values.flatten())
        problems |= _missing(inner, starts)
        if _is(inner.type, TEXTS):
            return Column(values, problems=problems)
        if not _is(inner.type, LISTS):
            return Column(_numbers(inner), starts, problems=problems)
        frames = _starts(inner)
        numbers = _plain(inner.flatten())
        problems |= _missing(numbers, frames[starts])
        widths = numpy.diff(frames)
        width = int(widths[numpy.argmax(widths > 0)]) if len(widths) else getattr(inner.type, "list_size", 0)
        for row in _rows(starts, (widths != width) | (widths == 0)):
            problems.setdefault(row, f"expected frames of {width or 'some'} numbers each, got frames of other sizes")
        return Column(_numbers(numbers), frames[starts], width, problems)


class RowShards(Shards):
    """Rows of tables. A subclass sets what follows.

    Attributes:
        columns: by data key, the name of the column.
        convert: by data key, turns the value of a row into an array, given its place for messages; without an entry, it is one.
        rows: of all shards.
    """

    columns: Mapping[str, str]
    convert: Mapping[str, Convert]
    rows: Rows

    def row(self, shard: int, row: int) -> dict[str, Array]:
        group = self.rows.group(shard, row)
        arrays = {}
        for key, name in self.columns.items():
            value = self.rows.value(shard, row, name)
            arrays[key] = self.convert[key](value, group.describe(name, row)) if key in self.convert else value
        return arrays

    def identity(self) -> str:
        return f"{super().identity()} {fingerprint_of([self.columns])}"


class TableShards(RowShards):
    """The rows of parquet or Arrow files.

    Args:
        where: the config key, for messages.

    Raises:
        DataError: pyarrow is missing, or a file is damaged or has other columns than the first one.
    """

    def __init__(self, where: str, keys: ParquetDatasetKeys, datasets: Mapping[str, Dataset]) -> None:
        paths = keys.data_files()
        files = [_open_file(path, is_arrow=isinstance(keys, ArrowDatasetKeys)) for path in paths]
        names = files[0].schema.names
        self.columns = dict(keys.columns) or {name: name for name in names if name != keys.tag}
        used = {f"columns.{key}": name for key, name in self.columns.items()} | ({"tag": keys.tag} if keys.tag else {})
        for path, file in zip(paths, files, strict=True):
            for option, name in used.items():
                _check_column(f"{where}.{option}", path, file.schema, files[0].schema, paths[0], str(name))
        types = {key: _plain_type(files[0].schema.field(name).type) for key, name in self.columns.items()}
        check_vocabulary(where, keys.vocabulary, [key for key, kind in types.items() if _is_texts(kind)], list(types))
        self.texts = text_conversions(keys.vocabulary, keys.units)
        self.convert: dict[str, Convert] = {**self.texts, **{key: sound() for key, kind in types.items() if _is_sound(kind)}}
        self.labels: dict[str, list[str]] = {}
        for key, feature in _features(files, self.columns).items():
            if feature["names"] is not None:
                self.labels[key] = list(feature["names"])
            elif key in self.convert and key not in self.texts:
                self.convert[key] = sound(feature["sampling_rate"], feature["num_channels"])
        self.labels |= {key: text.labels for key, text in self.texts.items()}
        self.rows = Rows(files, sorted(set(self.columns.values())))
        tags = None if keys.tag is None else [_tags(path, file, keys.tag) for path, file in zip(paths, files, strict=True)]
        super().__init__(paths, [file.bounds[-1] for file in files], tags)


class Rows:
    """Groups of rows of some files, of which the last ones stay in memory for a while."""

    def __init__(self, files: Sequence[RowFile], columns: Sequence[str]) -> None:
        self._files = files
        self._columns = columns
        self._groups: OrderedDict[tuple[int, int], Group] = OrderedDict()
        self._widths: dict[str, int] = {}

    def value(self, number: int, row: int, name: str) -> Any:
        """As `Group.value`; a row without frames has the width that others have. Raises: DataError."""
        value = self.group(number, row).value(name, row)
        if not (isinstance(value, numpy.ndarray) and value.ndim == 2 and not value.shape[1]):
            return value
        if name not in self._widths:
            starts = ((file, first) for file, each in enumerate(self._files) for first in numpy.unique(each.bounds)[:-1].tolist())
            self._widths[name] = next(filter(None, (self.group(*start).width(name) for start in starts)), 1)
        return numpy.zeros((0, self._widths[name]), value.dtype)

    def group(self, number: int, row: int) -> Group:
        """The group with a row of a file. Raises: DataError."""
        file = self._files[number]
        place = number, int(numpy.searchsorted(file.bounds, row, side="right")) - 1
        group = self._groups.get(place)
        if group is None:
            group = Group(file.path, int(file.bounds[place[1]]), file.read(place[1], self._columns))
            self._groups[place] = group
            while len(self._groups) > 1 and sum(each.num_bytes for each in self._groups.values()) > CACHE_BYTES:
                self._groups.popitem(last=False)
        self._groups.move_to_end(place)
        return group


class RowFile(ABC):
    """A file of rows, opened whenever some are read, as there may be more files than a process may open.

    Attributes:
        schema: pyarrow's.
        bounds: the first row of every group, then the number of rows: int64.
    """

    schema: Any
    bounds: Array

    def __init__(self, path: str) -> None:
        self.path = path
        self._stamp = file_stamp(os.stat(path))

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """A group. Raises: DataError."""
        try:
            check_same(Path(self.path), self._stamp, file_stamp(os.stat(self.path)))
            return self._read(number, columns)
        except (OSError, pyarrow.ArrowException) as error:
            got = why_not_opened(error) if isinstance(error, OSError) else ""
            raise DataError(f"{self.path}: expected a whole row group {number}, got: {got or error}") from None

    @abstractmethod
    def _read(self, number: int, columns: Sequence[str]) -> Any: ...


class ParquetFile(RowFile):
    """A parquet file, whose groups are row groups."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        with self._open() as file:
            self.schema = file.schema_arrow
            self._about = file.metadata
        numbers = range(self._about.num_row_groups)
        self.bounds = numpy.cumsum([0, *(self._about.row_group(number).num_rows for number in numbers)])

    def _open(self, about: Any = None) -> Any:
        return pyarrow.parquet.ParquetFile(self.path, memory_map=True, metadata=about, page_checksum_verification=True)

    def _read(self, number: int, columns: Sequence[str]) -> Any:
        with self._open(self._about) as file:
            # Without threads, as pyarrow's do not survive a fork into the processes that read.
            options = {"columns": list(columns), "use_threads": False}
            with suppress(pyarrow.ArrowNotImplementedError):  # lists of more than 2 GiB of texts, or so much sound
                return file.read_row_group(number, **options)
            for rows in (FEW, FEW // 16, 1):
                with suppress(pyarrow.ArrowNotImplementedError):
                    return pyarrow.Table.from_batches(file.iter_batches(rows, row_groups=[number], **options))
            raise DataError(f"{self.path}: expected rows of less than 2 GiB, got a larger one in row group {number}")


class ArrowFile(RowFile):
    """An Arrow file in IPC format, a file or a stream, memory-mapped, whose groups are record batches."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._places: list[int] = []
        self._before: list[tuple[int, int]] = []  # a stream's schema and dictionaries: the first byte, the one after the last
        self._has_dictionaries = False  # a file
        sizes: list[int] = []
        with pyarrow.memory_map(path) as mapped:
            is_file = mapped.size() >= 8 and mapped.read_at(6, 0) == b"ARROW1"
            reader = (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped)
            self.schema = reader.schema
            if not is_file and mapped.read_at(8, mapped.size() - 8) != END_OF_STREAM:
                raise DataError(f"{path}: expected the end mark of an Arrow stream, got the end of the file (was it cut off?)")
            if is_file:
                # Not message by message: polars begins its files with something else, and they need not follow one another.
                self._has_dictionaries, self._places = _blocks(mapped, reader.num_record_batches)
                for place in self._places:
                    mapped.seek(place)
                    sizes.append(_num_rows(pyarrow.ipc.read_message(mapped)))
            else:
                for place, end, message in _messages(mapped):
                    if message.type == "record batch":
                        self._places.append(place)
                        sizes.append(_num_rows(message))
                    else:
                        self._before.append((place, end))
        self.bounds = numpy.cumsum([0, *sizes])

    def _read(self, number: int, columns: Sequence[str]) -> Any:
        with pyarrow.memory_map(self.path) as mapped:
            if self._has_dictionaries:
                return pyarrow.ipc.open_file(mapped).get_batch(number)
            place = self._places[number]
            mapped.seek(place)
            message = pyarrow.ipc.read_message(mapped)
            if len(self._before) <= 1:
                return pyarrow.ipc.read_record_batch(message, self.schema)
            # pyarrow reads dictionaries with all of a stream: with one of them, those before the batch, and the batch
            content = [mapped.read_at(end - start, start) for start, end in self._before if start < place]
            return next(iter(pyarrow.ipc.open_stream(b"".join([*content, message.serialize().to_pybytes()]))))


def _messages(mapped: Any) -> Iterator[tuple[int, int, Any]]:
    """The messages of an Arrow stream, each with its first byte and the one after its last, without decompressing them."""
    mapped.seek(0)
    while True:
        place = mapped.tell()
        try:
            message = pyarrow.ipc.read_message(mapped)
        except EOFError:
            return
        yield place, mapped.tell(), message


class FlatBuffer:
    """Arrow's metadata, of which pyarrow does not give every field."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.root = self.number(0, 4)

    def number(self, place: int, size: int, signed: bool = False) -> int:
        return int.from_bytes(self._content[place : place + size], "little", signed=signed)

    def field(self, table: int, index: int) -> int:
        """The place of a table's field; 0: it has the default value."""
        fields = table - self.number(table, 4, signed=True)
        offset = self.number(fields + 4 + 2 * index, 2) if 4 + 2 * index < self.number(fields, 2) else 0
        return table + offset if offset else 0


def _num_rows(message: Any) -> int:
    """The number of rows of a record batch: `Message.header.length`."""
    flat = FlatBuffer(message.metadata.to_pybytes())
    header = flat.field(flat.root, 2)
    length = flat.field(header + flat.number(header, 4), 0)
    return flat.number(length, 8) if length else 0


def _blocks(mapped: Any, num_batches: int) -> tuple[bool, list[int]]:
    """Whether an Arrow file has dictionaries, and the first byte of every record batch: both as its footer says."""
    end = mapped.size() - 10  # behind the footer are its size and a mark
    size = int.from_bytes(mapped.read_at(4, end), "little")
    flat = FlatBuffer(mapped.read_at(size, end - size))
    dictionaries, batches = (flat.field(flat.root, index) for index in (2, 3))
    first = batches + flat.number(batches, 4) + 4
    has_dictionaries = bool(dictionaries and flat.number(dictionaries + flat.number(dictionaries, 4), 4))
    return has_dictionaries, [flat.number(first + 24 * number, 8) for number in range(num_batches)]


def _open_file(path: str, is_arrow: bool) -> RowFile:
    expected = "an Arrow file" if is_arrow else "a parquet file"
    try:
        return ArrowFile(path) if is_arrow else ParquetFile(path)
    except (OSError, EOFError, pyarrow.ArrowException) as error:
        got = why_not_opened(error) if isinstance(error, OSError) else ""
        raise DataError(f"{path}: expected {expected}, got: {got or str(error) or type(error).__name__}") from None


def _check_column(option: str, path: str, schema: Any, first: Any, first_path: str, name: str) -> None:
    """Raises: DataError, unless a file has a column, of a type that can be read and is that of the first file."""
    if schema.names.count(name) != 1:
        raise DataError(f"{option}: expected a column of {path} ({', '.join(schema.names)}), got {name!r}")
    kind = _plain_type(schema.field(name).type)
    if kind != _plain_type(first.field(name).type):
        raise DataError(f"{path}: expected {first.field(name).type} in column {name!r}, as in {first_path}, got {kind}")
    is_readable = _is_texts(kind) or _is_sound(kind) or _is(_innermost(kind), NUMBERS)
    if not (_is(kind, TEXTS) if option.endswith(".tag") else is_readable):
        wanted = "texts" if option.endswith(".tag") else "numbers, lists and lists of lists of numbers, texts, or sound in bytes"
        raise DataError(f"{option}: expected a column of {wanted}, got {kind} in column {name!r} of {path}")


def _tags(path: str, file: RowFile, name: str) -> Array:
    tags: list[bytes] = []
    for number, first in enumerate(file.bounds[:-1].tolist()):
        group = Group(path, first, file.read(number, [name]))
        tags += [str(group.value(name, row)).encode("utf-8") for row in range(first, int(file.bounds[number + 1]))]
    return numpy.array(tags, dtype=bytes)


def _features(files: Sequence[RowFile], columns: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """By data key, what the package `datasets` notes in its files of a column: of classes, or lists of them, their names, and of
    sound its rate and the number of channels. Raises: DataError, if files differ: class 0 of one may be class 1 of another."""
    kinds: dict[str, tuple[str, dict[str, Any]]] = {}
    for file in files:
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # of other programs
            features = json.loads((file.schema.metadata or {})[b"huggingface"])["info"]["features"]
            for key, name in columns.items():
                feature = features.get(name, {})
                feature = feature.get("feature", feature)
                kind = {about: feature.get(about) for about in ("names", "sampling_rate", "num_channels")}
                first, expected = kinds.setdefault(key, (file.path, kind))
                if kind != expected:
                    raise DataError(f"{file.path}: expected {expected} in column {name!r}, as in {first}, got {kind}")
    return {key: kind for key, (_, kind) in kinds.items()}


def _plain(values: Any) -> Any:
    """An array without extension types, dictionaries and views."""
    if isinstance(values, pyarrow.FixedShapeTensorArray) and len(shape := values.type.shape) == 2:
        frames = pyarrow.FixedSizeListArray.from_arrays(values.storage.flatten(), shape[1])
        return pyarrow.LargeListArray.from_arrays(_starts(values.storage) // shape[1], frames, mask=values.is_null())
    if isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    if isinstance(values, pyarrow.DictionaryArray):  # Polars' have views, which pyarrow cannot take from
        values = pyarrow.DictionaryArray.from_arrays(values.indices, _plain(values.dictionary)).dictionary_decode()
    plain = {pyarrow.string_view(): pyarrow.large_string(), pyarrow.binary_view(): pyarrow.large_binary()}.get(values.type)
    return values if plain is None else values.cast(plain)


def _plain_type(kind: Any) -> Any:
    if isinstance(kind, pyarrow.FixedShapeTensorType):
        if len(kind.shape) > 2 or kind.permutation not in (None, [0], [0, 1]):
            return kind  # which is refused
        if len(kind.shape) == 2:
            return pyarrow.list_(pyarrow.list_(kind.value_type, kind.shape[1]), kind.shape[0])
    kind = kind.storage_type if isinstance(kind, pyarrow.BaseExtensionType) else kind
    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


LISTS = ("list", "large_list", "fixed_size_list")
NUMBERS = ("integer", "floating", "boolean")
TEXTS = ("string", "large_string", "string_view")
BYTES = ("binary", "large_binary", "binary_view")


def _is(kind: Any, names: Sequence[str]) -> bool:
    """Whether a type is one of these, by pyarrow's words."""
    return any(getattr(pyarrow.types, f"is_{name}")(kind) for name in names)


def _is_texts(kind: Any) -> bool:
    return _is(kind, TEXTS) or (_is(kind, LISTS) and _is(kind.value_type, TEXTS))


def _is_sound(kind: Any) -> bool:
    """Whether a value is an encoded file: its bytes, or a struct with them, as the package `datasets` stores sound."""
    names = {field.name for field in kind} if pyarrow.types.is_struct(kind) else set()
    return _is(kind, BYTES) or ({"bytes"} <= names <= {"bytes", "path", "sampling_rate"} and _is(kind.field("bytes").type, BYTES))


def _innermost(kind: Any) -> Any:
    for _ in range(2):
        kind = _plain_type(kind.value_type) if _is(kind, LISTS) else kind
    return kind


def _starts(values: Any) -> Array:
    """The first element of every list in an array's flat values, then the number of these: int64."""
    lengths = pyarrow.compute.list_value_length(values).fill_null(0).to_numpy()
    return numpy.concatenate([[0], lengths.cumsum(dtype=numpy.int64)])


def _numbers(values: Any) -> Array:
    """The numbers of an array; 0 where one is missing, as numpy has no missing ones."""
    numbers: Array = (values.fill_null(False if values.type == "bool" else 0) if values.null_count else values).to_numpy(
        zero_copy_only=False
    )
    return numbers


def _missing(values: Any, starts: Array | None = None) -> dict[int, str]:
    """By row, what to say of a missing value; without `starts`, the first value of every row, a row is a value."""
    if not values.null_count:
        return {}
    is_missing = values.is_null().to_numpy(zero_copy_only=False)
    rows = _rows(numpy.arange(len(values) + 1) if starts is None else starts, is_missing)
    return dict.fromkeys(rows, "expected a value, got none")


def _rows(starts: Array, chosen: Array) -> list[int]:
    """The rows with some of the chosen values."""
    groups: list[int] = numpy.unique(numpy.searchsorted(starts, numpy.flatnonzero(chosen), side="right") - 1).tolist()
    return groups
