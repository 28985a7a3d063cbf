"""Writing HDF files in RETURNN's layout: contiguous, sequence after sequence, whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import h5py
import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

BLOCK = 64 << 20
"""Bytes copied at once."""


class HDFWriter:
    """Takes sequences one by one and writes the file when its `with` block ends; after an exception nothing is left behind.

    How much there will be need not be known: the frames of each key are collected in a file of their own beside the
    target and copied into contiguous datasets at the end, since only those can be mapped by a reader.

    Args:
        path: the file to be. It must not exist, unless `overwrite` is set.
        labels: by key, the classes' names. They give the dimension of sparse data.
        dims: by key, the dimension of sparse data without labels. Without either it is the largest class index plus one.
    """

    def __init__(
        self,
        path: Path,
        *,
        labels: Mapping[str, Sequence[str]] | None = None,
        dims: Mapping[str, int] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.path = path
        self.num_sequences = 0
        self.num_frames: dict[str, int] = {}
        self._labels = {key: names for key, names in (labels or {}).items() if len(names)}
        self._dims = dict(dims or {})
        self._overwrite = overwrite
        self._tags: list[bytes] = []
        self._streams: dict[str, _Collected] = {}
        self._folder = Path()

    def __enter__(self) -> HDFWriter:
        if self.path.exists() and not self._overwrite:
            raise DataError(
                f"{self.path}: expected a file that does not exist yet, got an existing one (--overwrite replaces it)"
            )
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        except OSError as error:
            raise DataError(f"{self.path}: expected a folder that can be written to, got: {error.strerror}") from None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            for stream in self._streams.values():
                stream.file.close()
            if kind is None:
                self._finish()
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def add(self, tag: str, sequence: Mapping[str, Array]) -> None:
        """Append a sequence: arrays of shape (frames, ...) by data key, the same keys every time; key 'data' is the input.

        Raises:
            DataError: an array does not go with those of the first sequence.
        """
        arrays = {key: numpy.asarray(sequence[key]) for key in sorted(sequence)}
        for key, values in arrays.items():  # all are checked before any is appended
            self._check_numbers(tag, key, values)
        if not self._streams:
            for number, (key, values) in enumerate(arrays.items()):
                self._streams[key] = _Collected((self._folder / str(number)).open("wb"), values)
        if not arrays or arrays.keys() != self._streams.keys():
            expected = f"the keys {list(self._streams)}" if self._streams else "at least one key"
            raise DataError(f"{self.path}: expected {expected} in sequence {tag!r}, got {list(arrays)}")
        for key, values in arrays.items():
            self._check_like_first(tag, key, values)
            self._check_classes(tag, key, values)
        for key, values in arrays.items():
            self._streams[key].append(values)
            self.num_frames[key] = self.num_frames.get(key, 0) + len(values)
        self._tags.append(tag.encode("utf-8"))
        self.num_sequences += 1

    def _check_numbers(self, tag: str, key: str, values: Array) -> None:
        if values.ndim == 0 or values.dtype.kind not in "biuf":
            raise DataError(
                f"{self.path}: expected numbers of shape (frames, ...) for {key!r}, got {values.dtype} of shape {values.shape} "
                f"in sequence {tag!r}"
            )

    def _check_like_first(self, tag: str, key: str, values: Array) -> None:
        stream = self._streams[key]
        if values.shape[1:] != stream.shape or not numpy.can_cast(values.dtype, stream.dtype, "same_kind"):
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
        if dim is not None and values.ndim == 1 and values.dtype.kind in "iu" and len(values):
            if not 0 <= values.min() <= values.max() < dim:
                raise DataError(
                    f"{self.path}: expected classes from 0 to {dim - 1} for {key!r}, got {values.min()} to {values.max()} "
                    f"in sequence {tag!r}"
                )

    def _finish(self) -> None:
        if not self._streams:
            raise DataError(f"{self.path}: expected at least one sequence to write, got none")
        whole = self._folder / "whole.hdf"
        # Columns of /seqLengths: the input first, then the targets by name.
        keys = sorted(self._streams, key=lambda key: (key != "data", key))
        with h5py.File(whole, "w") as file:
            file["seqTags"] = numpy.array(self._tags, dtype=f"S{max(1, max(map(len, self._tags)))}")
            file["seqLengths"] = numpy.stack(
                [numpy.asarray(self._streams[key].lengths, dtype=numpy.int32) for key in keys], axis=1
            )
            for group in ("targets/data", "targets/size", "targets/labels"):
                file.create_group(group)
            for key in keys:
                self._write_stream(file, key, self._streams[key])
        with whole.open("rb+") as written:
            os.fsync(written.fileno())
        os.replace(whole, self.path)

    def _write_stream(self, file: h5py.File, key: str, stream: _Collected) -> None:
        total = sum(stream.lengths)
        dataset = file.create_dataset("inputs" if key == "data" else f"targets/data/{key}", (total, *stream.shape), stream.dtype)
        row = int(numpy.prod(stream.shape, dtype=numpy.int64))
        step = max(1, BLOCK // max(1, row * stream.dtype.itemsize))
        with open(stream.file.name, "rb") as collected:
            for start in range(0, total, step):
                rows = min(step, total - start)
                block = numpy.fromfile(collected, stream.dtype, rows * row)
                dataset[start : start + rows] = block.reshape(rows, *stream.shape)
        labels = self._labels.get(key, ())
        dim = stream.shape[-1] if stream.shape else len(labels) or self._dims.get(key, stream.largest + 1)
        if key == "data":
            file.attrs["inputPattSize"] = dim
            if labels:
                file["labels"] = _strings(labels)
        else:
            file["targets/size"].attrs[key] = numpy.array([dim, 1 + len(stream.shape)], dtype=numpy.int64)
            file[f"targets/labels/{key}"] = _strings(labels or ["dummy-label"])


class _Collected:
    """The frames of one key so far: values in a file, lengths in memory."""

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


def _strings(texts: Sequence[str]) -> Array:
    encoded = [text.encode("utf-8") for text in texts]
    return numpy.array(encoded, dtype=f"S{max(1, max(map(len, encoded)))}")
