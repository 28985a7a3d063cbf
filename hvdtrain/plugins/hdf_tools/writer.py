"""Writes HDF files in RETURNN's layout: sequence after sequence, contiguous unless compressed, whole or not at all."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, get_args

import h5py
import numpy

from hvdtrain.data.hdf.compression import hdf5plugin
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

Compression = Literal["gzip", "lzf", "zstd", "lz4", "blosc2"]

COMPRESSIONS: tuple[str, ...] = get_args(Compression)

LEAST, MOST = 16 << 10, 256 << 10
"""Limits of the bytes of a chunk. Finding a smaller one costs more than reading it; of a larger one, each sequence reads too
much."""

ALIGNMENT = 64
"""Every dataset begins at a multiple of this many bytes, so that memory-mapped numbers are aligned for numpy and for cache lines.
HDF5 itself does not align data."""

BYTES_AT_ONCE = 64 << 20
"""The number of bytes copied at once."""

TEXTS = 10_000
"""The number of strings copied at once."""

UNKNOWN_DIM = 1
"""The number of classes that RETURNN's SimpleHDFWriter writes if it does not know it."""


class HDFWriter:
    """Takes sequences one by one, and writes the file when its `with` block ends; after an exception it leaves nothing behind.

    The number of sequences need not be known: the frames of each key are collected in a temporary file next to the target and
    copied at the end, into contiguous datasets, as only those can be memory-mapped, or into compressed ones, whose chunks are
    about as long as a sequence and as wide as a frame.

    Args:
        path: of the new file. It must not exist, unless `overwrite` is set.
        labels: by key, the names of the classes. They give the dimension of sparse data.
        dims: by key, the dimension of sparse data without labels; `UNKNOWN_DIM`: any class. Default: the largest class
            index plus one.
        compression: 'gzip', 'lzf', 'zstd', 'lz4' or 'blosc2'; the last three need the package hdf5plugin, also for reading.

    Attributes:
        folder: where the frames are collected inside the `with` block. It is removed at the end, with all files in it.
    """

    def __init__(
        self,
        path: Path,
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        dims: Mapping[str, int] | None = None,
        compression: str | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = path
        self.folder = Path()
        self.num_sequences = 0
        self.num_frames: dict[str, int] = {}
        self._labels = {key: names for key, names in (labels or {}).items() if len(names)}
        self._dims = dict(dims or {})
        self._storage = compression_options(compression) if compression is not None else {}
        self._overwrite = overwrite
        self._tags: list[bytes] = []
        self._streams: dict[str, Numbers] = {}
        self._failure = ""

    def __enter__(self) -> HDFWriter:
        if self.path.exists() and not self._overwrite:
            raise DataError(
                f"{self.path}: expected a file that does not exist yet, got an existing one (--overwrite replaces it)"
            )
        try:
            self.folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        except OSError as error:
            raise DataError(f"{self.path}: expected a folder that can be written to, got: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            with self._readable_errors():
                with ExitStack() as closing:  # all are closed, even if the disk is full
                    for stream in self._streams.values():
                        closing.callback(stream.file.close)
                if kind is None:
                    self._finish()
        except DataError:
            if kind is None:
                raise  # else the exception that ended the block is more informative
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, tag: str, sequence: Mapping[str, Any]) -> None:
        """Append a sequence: arrays of shape (frames, ...) by data key, the same keys every time; key 'data' is the input.

        Raises:
            DataError: an array does not match those of the first sequence, or the disk is full.
        """
        arrays = self._arrays(tag, sequence)
        if not self._streams:
            self._begin(arrays)
        if not arrays or arrays.keys() != self._streams.keys():
            expected = f"the keys {list(self._streams)}" if self._streams else "at least one key"
            raise DataError(f"{self.path}: expected {expected} in sequence {tag!r}, got {list(arrays)}")
        for key, values in arrays.items():
            self._check_like_first(tag, key, values)
            self._check_classes(tag, key, values)
        name = _encode(self.path, tag)
        with self._readable_errors():
            for key, values in arrays.items():
                self._streams[key].append(values)
                self.num_frames[key] = self.num_frames.get(key, 0) + len(values)
        self._tags.append(name)
        self.num_sequences += 1

    def expect(self, tag: str, sequence: Mapping[str, Any]) -> None:
        """Use the types and shapes of a sequence as those of the first one, without adding it.

        Call it before `add`, so that the parts of several writers match. Raises: DataError.
        """
        self._begin(self._arrays(tag, sequence))

    def _arrays(self, tag: str, sequence: Mapping[str, Any]) -> dict[str, Array]:
        """The values as arrays, by key in order: all are checked before any is appended."""
        arrays = {}
        for key in sorted(sequence):
            if not isinstance(key, str) or "/" in key or key in ("", "."):  # HDF5 would take it for a path
                raise DataError(f"{self.path}: expected keys that are names without '/', got {key!r} in sequence {tag!r}")
            arrays[key] = self._numbers_or_texts(tag, key, numpy.asarray(sequence[key]))
        return arrays

    def _begin(self, arrays: Mapping[str, Array]) -> None:
        with self._readable_errors():
            for number, (key, values) in enumerate(arrays.items()):
                file = (self.folder / str(number)).open("wb")
                self._streams[key] = (Texts if values.dtype == object else Numbers)(file, values)

    @contextmanager
    def _readable_errors(self) -> Iterator[None]:
        """Turn an error of writing, such as a full disk, into a DataError."""
        try:
            yield
        except (OSError, RuntimeError) as error:  # h5py raises either
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            self._failure = f"{self.path}: expected to be able to write in {self.path.parent}, got: {reason}"
            raise DataError(self._failure) from None

    def _numbers_or_texts(self, tag: str, key: str, values: Array) -> Array:
        """The array to store: numbers unchanged, texts as objects. Raises: DataError."""
        if values.ndim == 1 and (values.dtype.kind in "US" or (values.dtype == object and len(values))):
            texts = [value.decode("utf-8", errors="replace") if isinstance(value, bytes) else value for value in values.tolist()]
            if all(isinstance(text, str) for text in texts):
                for text in texts:
                    _encode(self.path, text)
                    if "\0" in text:
                        raise DataError(
                            f"{self.path}: expected text without zero bytes for {key!r}, got some in sequence {tag!r}"
                        )
                return numpy.array(texts, dtype=object)
        if values.ndim == 0 or values.dtype.kind not in "biufc":
            if not (values.shape == (0,) and values.dtype == object):
                raise DataError(
                    f"{self.path}: expected numbers of shape (frames, ...) for {key!r}, got {values.dtype} of shape "
                    f"{values.shape} in sequence {tag!r}"
                )
        return values

    def _check_like_first(self, tag: str, key: str, values: Array) -> None:
        stream = self._streams[key]
        is_text = values.dtype == object
        casts = numpy.can_cast(values.dtype, stream.dtype, "same_kind") and is_text == (stream.dtype == object)
        if values.shape[1:] != stream.shape or not casts:
            raise DataError(
                f"{self.path}: expected {stream.dtype} frames of shape {stream.shape} for {key!r} as in the first sequence, "
                f"got {values.dtype} {values.shape[1:]} in sequence {tag!r}"
            )
        if values.dtype.kind in "iu" and stream.dtype.kind in "iu" and not numpy.array_equal(values, values.astype(stream.dtype)):
            raise DataError(
                f"{self.path}: expected {stream.dtype} for {key!r} as in the first sequence, "
                f"got {values.min()} to {values.max()} in sequence {tag!r}"
            )

    def _check_classes(self, tag: str, key: str, values: Array) -> None:
        dim = len(self._labels[key]) if key in self._labels else self._dims.get(key)
        if key not in self._labels and dim == UNKNOWN_DIM:
            return
        if dim is not None and values.ndim == 1 and values.dtype.kind in "iu" and len(values):
            if not 0 <= values.min() <= values.max() < dim:
                raise DataError(
                    f"{self.path}: expected classes from 0 to {dim - 1} for {key!r}, got {values.min()} to {values.max()} "
                    f"in sequence {tag!r}"
                )

    def _finish(self) -> None:
        if self._failure:  # the caller ignored an error: the last sequence is incomplete
            raise DataError(self._failure)
        if not self._streams:
            raise DataError(f"{self.path}: expected at least one sequence to write, got none")
        whole = self.folder / "whole.hdf"
        # Columns of /seqLengths: the input first, then the targets by name.
        keys = sorted(self._streams, key=lambda key: (key != "data", key))
        with h5py.File(whole, "w", alignment_threshold=1, alignment_interval=ALIGNMENT) as file:
            file["seqTags"] = numpy.array(self._tags, dtype=f"S{max(1, max(map(len, self._tags)))}")
            lengths = [numpy.asarray(self._streams[key].lengths, dtype=numpy.int32) for key in keys]
            file["seqLengths"] = numpy.stack(lengths, axis=1)
            for group in ("targets/data", "targets/size", "targets/labels"):
                file.create_group(group)
            for key in keys:
                name = "inputs" if key == "data" else f"targets/data/{key}"
                self._streams[key].write(file, name, self._storage)
                self._describe(file, key, self._streams[key])
        with whole.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(whole, self.path)

    def _describe(self, file: h5py.File, key: str, stream: Numbers) -> None:
        """Write the dimension of a key and the names of its classes."""
        labels = self._labels.get(key, ())
        dim = stream.shape[-1] if stream.shape else len(labels) or self._dims.get(key, stream.largest + 1)
        if key == "data":
            file.attrs["inputPattSize"] = dim
            if labels:
                file["labels"] = _strings(self.path, labels)
        else:
            file["targets/size"].attrs[key] = numpy.array([dim, 1 + len(stream.shape)], dtype=numpy.int64)
            file[f"targets/labels/{key}"] = _strings(self.path, labels or ["dummy-label"])


def _strings(path: Path, texts: Sequence[str]) -> Array:
    encoded = [_encode(path, text) for text in texts]
    return numpy.array(encoded, dtype=f"S{max(1, max(map(len, encoded)))}")


def _encode(path: Path, text: str) -> bytes:
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:  # file names that are not UTF-8
        raise DataError(f"{path}: expected a name that can be written as UTF-8, got {text!r}") from None


class Numbers:
    """The frames of one key until they are copied: values in a temporary file, lengths in memory."""

    def __init__(self, file: BinaryIO, first: Array) -> None:
        self.file = file
        self.shape = first.shape[1:]
        self.dtype = first.dtype.newbyteorder("=")
        self.lengths = array("i")
        self.largest = 0

    def append(self, values: Array) -> None:
        self.file.write(numpy.ascontiguousarray(values, dtype=self.dtype).tobytes())
        self.lengths.append(len(values))
        if not self.shape and self.dtype.kind in "iu" and len(values):
            self.largest = max(self.largest, int(values.max()))

    def write(self, file: h5py.File, name: str, storage: Mapping[str, Any]) -> None:
        """Copy the frames into a dataset."""
        total = sum(self.lengths)
        row = math.prod(self.shape)
        step = max(1, BYTES_AT_ONCE // max(1, row * self.dtype.itemsize))
        if storage and total * row:
            length = chunk_length(total, len(self.lengths), row * self.dtype.itemsize)
            step = max(1, step // length) * length  # whole chunks, so that none is compressed twice
            storage = {**storage, "chunks": (length, *self.shape)}
        else:
            storage = {}
        dataset = file.create_dataset(name, (total, *self.shape), self.dtype, **storage)
        with open(self.file.name, "rb") as collected:
            for start in range(0, total, step):
                rows = min(step, total - start)
                block = numpy.fromfile(collected, self.dtype, rows * row)
                dataset[start : start + rows] = block.reshape(rows, *self.shape)


class Texts(Numbers):
    """The strings of one key until they are copied, in a temporary file, each terminated by a zero byte."""

    def append(self, values: Array) -> None:
        self.file.write(b"".join(text.encode("utf-8") + b"\0" for text in values.tolist()))
        self.lengths.append(len(values))

    def write(self, file: h5py.File, name: str, storage: Mapping[str, Any]) -> None:
        """Copy the strings into a dataset of strings of variable length, as RETURNN writes them.

        HDF5 stores references in the dataset and the strings elsewhere, so compression would gain nothing.
        """
        total = sum(self.lengths)
        dataset = file.create_dataset(name, (total,), h5py.string_dtype("utf-8"))
        texts = _read_texts(self.file.name)
        for start in range(0, total, TEXTS):
            block = list(islice(texts, TEXTS))
            dataset[start : start + len(block)] = numpy.array(block, dtype=object)


def _read_texts(path: str) -> Iterator[bytes]:
    unfinished = b""
    with open(path, "rb") as collected:
        while block := collected.read(1 << 20):
            *whole, unfinished = (unfinished + block).split(b"\0")
            yield from whole


def compression_options(compression: str) -> dict[str, Any]:
    """The arguments of h5py's `create_dataset` for a compression.

    Raises:
        DataError: its name is unknown, or the package that it needs is not installed.
    """
    if compression in ("gzip", "lzf"):
        return {"compression": compression}
    if compression not in COMPRESSIONS:
        raise DataError(f"compression: expected one of {', '.join(COMPRESSIONS)}, got {compression!r}")
    plugin = hdf5plugin()
    if plugin is None:
        raise DataError(f"compression: expected the package hdf5plugin for {compression}, got none (pip install hdf5plugin)")
    if compression == "zstd":
        return dict(plugin.Zstd(clevel=3))
    if compression == "lz4":
        return dict(plugin.LZ4())
    return dict(plugin.Blosc2(cname="zstd", clevel=5, filters=plugin.Blosc2.SHUFFLE))


def chunk_length(total: int, num_sequences: int, frame_bytes: int) -> int:
    """The number of frames of a chunk: about one sequence, within `LEAST` and `MOST`.

    >>> chunk_length(800_000, 1000, 160), chunk_length(8_000_000, 1_000_000, 4), chunk_length(5, 1, 1 << 20)
    (800, 4096, 1)
    """
    mean = round(total / num_sequences)
    return max(1, min(total, max(LEAST // frame_bytes, min(mean, MOST // frame_bytes))))
