"""NextGenHDFDataset: HDF files with a dataset for every sequence, under `/streams/<name>/data/<sequence>`.

The attribute `parser` of a stream describes its datasets: `feature_sequence` vectors, `sparse` class indices,
`segment_alignment` rows of (class, number of frames). A '/' in a sequence's name is stored as a backslash.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.combine.files import open_files
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.handles import Handles, Opened
from hvdtrain.data.hdf import layouts
from hvdtrain.data.indexed import IndexedDataset
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.returnn.keys import NextGenHDFDatasetKeys

PARSERS = {"feature_sequence": 2, "sparse": 1, "segment_alignment": 2}
"""The kinds of streams, and the number of axes of their datasets."""


class NextGenFile(IndexedDataset):
    """One file: opened, checked and indexed. Each dataset is opened once for its length.

    The data key 'data' is the input stream; the other streams have their own names.
    """

    def __init__(self, path: Path, input_stream_name: str, handles: Handles) -> None:
        self.path = path
        self._handles = handles
        self._size = 0  # of the file in bytes
        self._stream_names: dict[str, str] = {}
        self._parsers: dict[str, str] = {}
        self._names: list[str] = []
        with self._readable_errors(), self.open() as file:
            streams, lengths = self._index(file, input_stream_name)
        super().__init__(streams, numpy.array([name.encode("utf-8") for name in self._names], dtype=bytes), lengths)

    def open(self) -> Opened:
        """The file, opened again."""
        opened = Opened()
        opened.handle = opened.enter_context(layouts.open_file(self.path))
        return opened

    def row(self, number: int) -> dict[str, Array]:
        file = self._handles.opened(self)
        with self._readable_errors():
            return {key: _values(self._parsers[key], self._dataset(file, key, number)[:]) for key in self.streams}

    def where(self, number: int) -> str:
        return f"{self.path}, {self._names[number]!r}"

    def close(self) -> None:
        self._handles.close(self)

    def how_read(self) -> str:
        return "read through h5py, a dataset for every sequence"

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Turn what h5py raises for a damaged file into a DataError."""
        try:
            yield
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise layouts.damage_error(self.path, error) from None

    def _dataset(self, file: Opened, key: str, index: int) -> h5py.Dataset:
        name = f"streams/{self._stream_names[key]}/data"
        if name not in file.members:  # the group with the datasets: checked once for all of them
            layouts.check_links(self.path, file.handle, name, "refuse")
            file.members[name] = layouts.member(self.path, file.handle, name)
            self._size = layouts.file_size(file.members[name])
        parent = file.members[name]
        last = self._names[index].replace("/", "\\")
        try:
            dataset = layouts.follow_link(self.path, parent, last, f"{name}/{last}", "refuse")
        except KeyError:
            raise DataError(f"{self.path}: expected /{name}/{last}, got only {layouts.names_in(parent)} in /{name}") from None
        return layouts.check_stored(self.path, f"{name}/{last}", dataset, self._size)

    def _index(self, opened: Opened, input_stream_name: str) -> tuple[dict[str, Stream], dict[str, Array]]:
        """The streams and the lengths of their sequences. Checks that they are consistent."""
        file = opened.handle
        for name in ("seq_names", "streams"):
            if name not in file:
                raise DataError(f"{self.path}: expected /{name} (the layout of RETURNN's NextGenHDFDataset), got {list(file)}")
            layouts.check_links(self.path, file, name, "refuse")
        self._names = layouts.texts_of(self.path, "/seq_names", layouts.strings_in(self.path, file, "seq_names")[:])
        names = sorted(layouts.member(self.path, file, "streams"))
        if input_stream_name not in names:
            raise DataError(f"{self.path}: expected a stream {input_stream_name!r} (input_stream_name), got {', '.join(names)}")
        if "data" in names and input_stream_name != "data":
            raise DataError(f"{self.path}: expected 'data' to be the input stream, got {input_stream_name!r} and a stream 'data'")
        streams = {}
        lengths = {}
        for name in [input_stream_name, *(name for name in names if name != input_stream_name)]:
            for inside in ("", "/data", "/feature_names"):
                layouts.check_links(self.path, file, f"streams/{name}{inside}", "refuse")
            parser = layouts.member(self.path, file, f"streams/{name}").attrs.get("parser")
            parser = parser.decode() if isinstance(parser, bytes) else parser
            if parser not in PARSERS:
                parsers = ", ".join(PARSERS)
                raise DataError(
                    f"{self.path}: expected attribute parser of /streams/{name} to be one of {parsers}, got {parser!r}"
                )
            key = "data" if name == input_stream_name else name
            self._stream_names[key] = name
            self._parsers[key] = parser
            streams[key], lengths[key] = self._inspect_stream(opened, key)
        return streams, lengths

    def _inspect_stream(self, file: Opened, key: str) -> tuple[Stream, Array]:
        parser = self._parsers[key]
        lengths = numpy.zeros(len(self._names), dtype=numpy.int32)
        first: tuple[Any, ...] | None = None
        for index in range(len(self._names)):
            dataset = self._dataset(file, key, index)
            shape = dataset.shape
            kind = (dataset.dtype, shape[1:])
            first = first or kind
            if len(shape) != PARSERS[parser] or kind != first:
                raise DataError(
                    f"{self.path}: expected {PARSERS[parser]} axes ({parser}), dtype and width as in the first "
                    f"sequence in {dataset.name}, got {dataset.dtype} {dataset.shape}"
                )
            if parser == "segment_alignment":
                segments = dataset[:]
                if segments.shape[1] != 2 or segments[:, 1].min(initial=0) < 0:
                    rule = f"{self.path}: expected rows of (class, number of frames)"
                    raise DataError(f"{rule} in {dataset.name}, got {segments[:3].tolist()}...")
                lengths[index] = 2 * segments[:, 1].sum(dtype=numpy.int64)
            else:
                lengths[index] = len(dataset)
        dtype, width = first or (numpy.dtype(numpy.float32), (0,))
        if parser == "feature_sequence":
            return Stream(dtype, width, width[0], sparse=False), lengths
        place = f"streams/{self._stream_names[key]}/feature_names"
        labels = tuple(layouts.texts_of(self.path, f"/{place}", layouts.strings_in(self.path, file.handle, place)[:]))
        if dtype.kind not in "iu":
            raise DataError(f"{self.path}: expected integers in /streams/{self._stream_names[key]} ({parser}), got {dtype}")
        return Stream(dtype, (), len(labels), sparse=True, labels=labels), lengths


def _values(parser: str, stored: Array) -> Array:
    """A sequence as stored; an alignment as class, end of segment (1 or 0), class, end, ... for every frame."""
    if parser != "segment_alignment":
        return stored
    lengths = stored[:, 1].astype(numpy.int64)
    frames = numpy.zeros((int(lengths.sum()), 2), dtype=stored.dtype)
    frames[:, 0] = numpy.repeat(stored[:, 0], lengths)
    frames[numpy.cumsum(lengths)[lengths > 0] - 1, 1] = 1
    return frames.reshape(-1)


def open_next_gen(where: str, keys: NextGenHDFDatasetKeys, datasets: Mapping[str, Dataset]) -> Dataset:
    """Open files as one dataset. Raises: DataError, if one is bad or does not match the first one."""
    handles = Handles()
    return open_files(where, keys.data_files(), lambda path: NextGenFile(Path(path), keys.input_stream_name, handles))
