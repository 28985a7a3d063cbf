"""Parquet and Arrow files, read by pyarrow: each row is a sequence.

A parquet file can only be decoded by row groups. The last ones are kept, as neighbouring rows are likely to be needed together.
Arrow files are memory-mapped: a row is read by its place.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.fingerprint import fingerprint_of
from hvdtrain.data.formats.conversions import Convert, sound
from hvdtrain.data.formats.shard_keys import ArrowDatasetKeys, ParquetDatasetKeys
from hvdtrain.data.formats.shards import Shards, check_vocabulary, text_conversions
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

KEPT = 512 << 20
"""Bytes of decoded row groups of parquet files that a rank keeps, besides the last one."""

END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"
"""The last bytes of an Arrow stream. pyarrow takes a stream without them for a complete one."""


@dataclass(frozen=True)
class Column:
    """A column of some consecutive rows.

    Attributes:
        values: the numbers of all rows, one after the other; or, for other types, pyarrow's array with an element per row.
        starts: the first number of every row, then the number of all; None: each row is a single one.
        width: the numbers per frame; None: the frames are numbers.
    """

    values: Any
    starts: Array | None = None
    width: int | None = None


class Group:
    """Consecutive rows of a file: a row group of parquet, or a record batch of Arrow. Columns are converted when needed.

    Attributes:
        num_bytes: its size in memory.
    """

    def __init__(self, where: str, first: int, table: Any) -> None:
        self._where = where
        self._first = first
        self._table = table
        self._columns: dict[str, Column] = {}
        self.num_bytes = int(table.nbytes)

    def value(self, name: str, row: int) -> Any:
        """The numbers of a row as an array; of other types, the value itself. Raises: DataError."""
        column = self._columns.get(name)
        if column is None:
            column = self._columns[name] = self._convert(name)
        if column.starts is None and isinstance(column.values, numpy.ndarray):
            return column.values[row : row + 1]
        if column.starts is None:
            return column.values[row].as_py()
        values = column.values[column.starts[row] : column.starts[row + 1]]
        return values if column.width is None else values.reshape(-1, column.width)

    def describe(self, name: str, row: int) -> str:
        """A value's place, for messages."""
        return f"{self._where}, column {name!r}, row {self._first + row}"

    def _convert(self, name: str) -> Column:
        """A column as arrays of numpy, if it holds numbers. Raises: DataError, if a value is missing."""
        import pyarrow

        values = self._table.column(name)
        values = _plain(values.combine_chunks() if isinstance(values, pyarrow.ChunkedArray) else values)
        self._require_values(name, values, None)
        if not _is_list(values.type):
            return Column(values.to_numpy(zero_copy_only=False) if _is_number(values.type) else values)
        starts = _starts(values)
        inner = _plain(values.flatten())
        self._require_values(name, inner, starts)
        if _is_text(inner.type):
            return Column(values)
        if not _is_list(inner.type):
            return Column(inner.to_numpy(zero_copy_only=False), starts)
        frames = _starts(inner)
        numbers = _plain(inner.flatten())
        widths = numpy.diff(frames)
        if len(widths) and (widths != widths[0]).any():
            row = int(numpy.searchsorted(starts, int(numpy.argmax(widths != widths[0])), side="right")) - 1
            raise DataError(f"{self.describe(name, row)}: expected frames of {widths[0]} numbers each, got frames of other sizes")
        if numbers.null_count:
            self._require_values(name, numbers, frames[starts])
        width = int(widths[0]) if len(widths) else 1
        return Column(numbers.to_numpy(zero_copy_only=False), frames[starts], width)

    def _require_values(self, name: str, values: Any, starts: Array | None) -> None:
        """Raises: DataError, if a value is missing."""
        if values.null_count:
            place = values.is_null().index(True).as_py()
            row = place if starts is None else int(numpy.searchsorted(starts, place, side="right")) - 1
            raise DataError(f"{self.describe(name, row)}: expected a value, got none")


class TableShards(Shards):
    """The rows of parquet or Arrow files.

    Args:
        where: the config key, for messages.

    Raises:
        DataError: pyarrow is missing, or a file is damaged or has other columns than the first one.
    """

    def __init__(self, where: str, keys: ParquetDatasetKeys) -> None:
        paths = keys.data_files()
        files = [_open_file(path, is_arrow=isinstance(keys, ArrowDatasetKeys)) for path in paths]
        names = files[0].schema.names
        self._columns = dict(keys.columns) or {name: name for name in names if name != keys.tag}
        used = {f"columns.{key}": name for key, name in self._columns.items()} | ({"tag": keys.tag} if keys.tag else {})
        for path, file in zip(paths, files, strict=True):
            for option, name in used.items():
                _check_column(f"{where}.{option}", path, file.schema, files[0].schema, paths[0], str(name))
        types = {key: _plain_type(files[0].schema.field(name).type) for key, name in self._columns.items()}
        check_vocabulary(where, keys.vocabulary, [key for key, kind in types.items() if _is_texts(kind)], list(types))
        texts = text_conversions(where, keys.vocabulary, keys.units)
        self._convert: dict[str, Convert] = {key: convert for key, (convert, _) in texts.items()}
        self._convert |= {key: sound(None) for key, kind in types.items() if _is_sound(kind)}
        self.labels = _class_names(files[0].schema, self._columns) | {key: labels for key, (_, labels) in texts.items()}
        self._files = files
        self._groups: OrderedDict[tuple[int, int], Group] = OrderedDict()
        self._lock = threading.Lock()
        self._used = sorted(set(self._columns.values()))
        tags = None if keys.tag is None else [_tags(path, file, keys.tag) for path, file in zip(paths, files, strict=True)]
        super().__init__(paths, [file.bounds[-1] for file in files], tags)

    def item(self, shard: int, row: int) -> dict[str, Array]:
        file = self._files[shard]
        number = int(numpy.searchsorted(file.bounds, row, side="right")) - 1
        group, row = self._group(shard, number), row - int(file.bounds[number])
        arrays = {}
        for key, name in self._columns.items():
            value = group.value(name, row)
            arrays[key] = self._convert[key](value, group.describe(name, row)) if key in self._convert else value
        return arrays

    def identity(self) -> str:
        return f"{super().identity()} {fingerprint_of([self._columns])}"

    def _group(self, shard: int, number: int) -> Group:
        """Some rows of a file, which stay in memory for a while. Raises: DataError."""
        with self._lock:  # pyarrow's readers of parquet are for one thread at a time
            group = self._groups.get((shard, number))
            if group is not None:
                self._groups.move_to_end((shard, number))
                return group
            file = self._files[shard]
            group = Group(self.paths[shard], int(file.bounds[number]), file.read(number, self._used))
            self._groups[shard, number] = group
            while len(self._groups) > 1 and sum(each.num_bytes for each in self._groups.values()) > KEPT:
                self._groups.popitem(last=False)
            return group


class ParquetFile:
    """A parquet file.

    Attributes:
        schema: pyarrow's.
        bounds: the first row of every row group, then the number of rows.
    """

    def __init__(self, path: str) -> None:
        import pyarrow.parquet

        self._path = path
        self._file = pyarrow.parquet.ParquetFile(path, memory_map=True)
        self.schema = self._file.schema_arrow
        about = self._file.metadata
        self.bounds = numpy.cumsum([0, *(about.row_group(number).num_rows for number in range(about.num_row_groups))])

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """A row group. Raises: DataError."""
        import pyarrow

        try:
            # Without threads, as pyarrow's do not survive a fork into the processes that read.
            return self._file.read_row_group(number, columns=list(columns), use_threads=False)
        except (OSError, pyarrow.ArrowException) as error:
            raise DataError(f"{self._path}: expected a whole row group {number}, got: {error}") from None


class ArrowFile:
    """An Arrow file in IPC format, a file or a stream, memory-mapped. Attributes as in `ParquetFile`."""

    def __init__(self, path: str) -> None:
        import pyarrow

        mapped = pyarrow.memory_map(path)
        if mapped.size() >= 8 and mapped.read_at(6, 0) == b"ARROW1":
            reader = pyarrow.ipc.open_file(mapped)
            self._batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
        else:
            reader = pyarrow.ipc.open_stream(mapped)
            self._batches = list(reader)
            if mapped.read_at(8, mapped.size() - 8) != END_OF_STREAM:
                raise DataError(f"{path}: expected the end mark of an Arrow stream, got the end of the file (was it cut off?)")
        self.schema = reader.schema
        self.bounds = numpy.cumsum([0, *(batch.num_rows for batch in self._batches)])

    def read(self, number: int, columns: Sequence[str]) -> Any:
        """A record batch."""
        return self._batches[number]


def open_tables(where: str, keys: ParquetDatasetKeys, datasets: Mapping[str, Dataset]) -> TableShards:
    """Open a ParquetDataset or an ArrowDataset. Raises: DataError."""
    return TableShards(where, keys)


def _open_file(path: str, is_arrow: bool) -> ParquetFile | ArrowFile:
    what = "an Arrow file" if is_arrow else "a parquet file"
    try:
        import pyarrow
    except ImportError:
        raise DataError(f"{path}: expected the package pyarrow to read it, got none (pip install pyarrow)") from None
    try:
        return ArrowFile(path) if is_arrow else ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"{path}: expected {what}, got: {str(error) or type(error).__name__}") from None


def _check_column(option: str, path: str, schema: Any, first: Any, first_path: str, name: str) -> None:
    """Raises: DataError, unless a file has a column, of a type that can be read and is that of the first file."""
    if schema.names.count(name) != 1:
        raise DataError(f"{option}: expected a column of {path} ({', '.join(schema.names)}), got {name!r}")
    kind = _plain_type(schema.field(name).type)
    if kind != _plain_type(first.field(name).type):
        raise DataError(f"{path}: expected {first.field(name).type} in column {name!r}, as in {first_path}, got {kind}")
    is_readable = _is_texts(kind) or _is_sound(kind) or _is_number(_innermost(kind))
    if not (_is_text(kind) if option.endswith(".tag") else is_readable):
        wanted = "texts" if option.endswith(".tag") else "numbers, lists and lists of lists of numbers, texts, or sound in bytes"
        raise DataError(f"{option}: expected a column of {wanted}, got {kind} in column {name!r} of {path}")


def _tags(path: str, file: ParquetFile | ArrowFile, name: str) -> Array:
    """The tags of a file, as UTF-8. Raises: DataError, if one is missing."""
    tags: list[bytes] = []
    for number, first in enumerate(file.bounds[:-1].tolist()):
        group = Group(path, first, file.read(number, [name]))
        tags += [str(group.value(name, row)).encode("utf-8") for row in range(int(file.bounds[number + 1]) - first)]
    return numpy.array(tags, dtype=bytes)


def _class_names(schema: Any, columns: Mapping[str, str]) -> dict[str, list[str]]:
    """By data key, the names of the classes, which the package `datasets` notes in its files."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        classes = {key: features[name] for key, name in columns.items() if features.get(name, {}).get("_type") == "ClassLabel"}
        return {key: list(feature["names"]) for key, feature in classes.items()}
    except (AttributeError, KeyError, TypeError, ValueError):  # of other programs
        return {}


def _plain(values: Any) -> Any:
    """An array without extension types and dictionaries."""
    import pyarrow

    if isinstance(values, pyarrow.ExtensionArray):
        values = values.storage
    return values.dictionary_decode() if isinstance(values, pyarrow.DictionaryArray) else values


def _plain_type(kind: Any) -> Any:
    import pyarrow

    kind = kind.storage_type if isinstance(kind, pyarrow.BaseExtensionType) else kind
    return kind.value_type if pyarrow.types.is_dictionary(kind) else kind


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind))


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_texts(kind: Any) -> bool:
    """Whether a value is a text, or a list of them."""
    return _is_text(kind) or (_is_list(kind) and _is_text(kind.value_type))


def _is_sound(kind: Any) -> bool:
    """Whether a value is an encoded file, as the package `datasets` stores sound."""
    from pyarrow import types

    names = {field.name for field in kind} if types.is_struct(kind) else set()
    return names == {"bytes", "path"} and types.is_binary(kind.field("bytes").type)


def _innermost(kind: Any) -> Any:
    """The type in up to two lists."""
    for _ in range(2):
        kind = _plain_type(kind.value_type) if _is_list(kind) else kind
    return kind


def _starts(values: Any) -> Array:
    """The first element of every list in an array's flat values, then the number of these: int64."""
    from pyarrow import types

    if types.is_fixed_size_list(values.type):
        return numpy.arange(len(values) + 1, dtype=numpy.int64) * int(values.type.list_size)
    if not len(values):
        return numpy.zeros(1, numpy.int64)
    starts: Array = values.offsets.to_numpy().astype(numpy.int64)
    starts -= starts[0]
    return starts
