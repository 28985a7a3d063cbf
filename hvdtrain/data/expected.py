"""What batches must look like according to the dataset, the plan, and `extern_data` of the config.

The thread that reads ahead checks every batch before the model sees it. Otherwise a model would fail with a traceback that names
no file, or carry on with data that was cut, repeated, or of another kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, DatasetPart
from hvdtrain.data.types import Array, Batch, Items, Packed, Stream
from hvdtrain.errors import DataError, Problem, problem

IGNORED_CLASSES = (-1, -100)
"""Numbers that mark frames without a class: the usual values of `ignore_index`."""


@dataclass(frozen=True)
class Expected:
    """An entry of `extern_data`. What is None is not checked.

    Attributes:
        shape: of a frame; () for class indices.
        dim: the number of classes of sparse data.
        exact: whether floating-point numbers must have exactly this type; otherwise any floating-point type will do.
    """

    sparse: bool
    shape: tuple[int | None, ...] | None = None
    dim: int | None = None
    dtype: numpy.dtype[Any] | None = None
    exact: bool = True

    def misfit(self, stream: Stream) -> str | None:
        """What does not match, as 'expected ..., got ...'; None: everything matches."""
        kind = stream.dtype.kind
        if self.sparse and kind not in "iu":
            return f"expected class indices, got {stream.dtype}"
        if self.dtype is not None and self.dtype.kind in "fc" and kind != self.dtype.kind:
            return f"expected {self.dtype}, got {stream.dtype}"
        if self.dtype is not None and self.dtype.kind in "fc" and self.exact and stream.dtype != self.dtype:
            return f"expected {self.dtype}, got {stream.dtype}"
        if self.dtype is not None and self.dtype.kind in "iu" and kind not in "iu":
            return f"expected {self.dtype}, got {stream.dtype}"
        if self.shape is not None and (
            len(self.shape) != len(stream.shape)
            or any(size not in (None, real) for size, real in zip(self.shape, stream.shape, strict=True))
        ):
            return f"expected frames of shape {_text(self.shape)}, got {_text(stream.shape)}"
        return None


def _text(shape: Sequence[int | None]) -> str:
    return f"({', '.join('any' if size is None else str(size) for size in shape)}{',' if len(shape) == 1 else ''})"


def expected_of(extern_data: Any, exact: bool = True) -> tuple[dict[str, Expected], list[Problem]]:
    """The entries of `extern_data` by data key, and the problems with it.

    All forms of an entry are accepted; what an entry leaves open is not checked.

    Args:
        exact: as in `Expected`.

    >>> expected_of({"data": {"dim": 9}})[0]["data"].shape, expected_of({"classes": {"dim": 5, "sparse": True}})[0]["classes"].dim
    ((9,), 5)
    >>> [str(problem) for problem in expected_of({"data": 9})[1]]
    ["extern_data.data: expected a dict such as {'dim': 9}, got 9"]
    """
    if extern_data is None:
        return {}, []
    if not isinstance(extern_data, Mapping):
        return {}, problem("wrong-type", f"extern_data: expected a dict of dicts by data key, got {extern_data!r}")
    expected = {}
    problems = []
    for name, entry in extern_data.items():
        if name == "seq_tag":
            continue
        if not isinstance(entry, Mapping):
            if getattr(entry, "dims", None) is None:  # not a Tensor either, whose dims describe it
                problems += problem("wrong-type", f"extern_data.{name}: expected a dict such as {{'dim': 9}}, got {entry!r}")
                continue
            entry = {name: getattr(entry, name, None) for name in ("dims", "dtype", "sparse_dim")}
        try:
            expected[name] = _parse_entry(entry, exact)
        except (TypeError, ValueError) as error:
            problems += problem("wrong-type", f"extern_data.{name}: {error}")
    return expected, problems


def _parse_entry(entry: Mapping[str, Any], exact: bool) -> Expected:
    """Raises: TypeError, ValueError."""
    sparse_dim = _size(entry.get("sparse_dim"))
    sparse = bool(entry.get("sparse", entry.get("sparse_dim") is not None))
    dim = _size(entry.get("dim"))
    dtype = entry.get("dtype")
    is_number = isinstance(dtype, str) and dtype != "string"
    try:
        numpy_type = numpy.dtype(dtype) if is_number else None
    except TypeError:
        if dtype != "bfloat16":
            raise ValueError(f"dtype: expected numpy's name of a type, got {dtype!r}") from None
        numpy_type = None
    sparse_dim = sparse_dim if sparse_dim is not None else dim if sparse else None
    return Expected(sparse, _frame_shape(entry, sparse, dim), sparse_dim, numpy_type, exact)


def _frame_shape(entry: Mapping[str, Any], sparse: bool, dim: int | None) -> tuple[int | None, ...] | None:
    """The shape of a frame; None: the entry has no time axis after the batch axis, or leaves it open."""
    dims = entry.get("dims", entry.get("dim_tags"))
    shape = entry.get("shape")
    if dims is not None:
        sizes = [_size(dim) for dim in dims]
        return tuple(sizes[2:]) if len(sizes) > 1 and sizes[1] is None else None
    if entry.get("time_dim_axis", 1) != 1 or entry.get("batch_dim_axis", 0) != 0:
        return None
    if shape is not None:
        sizes = [_size(size) for size in shape]
        return tuple(sizes[1:]) if sizes and sizes[0] is None else None
    if sparse:
        return ()
    if dim is None and _size(entry.get("feature_dim")) is None:
        return None
    return (dim if dim is not None else _size(entry.get("feature_dim")),)


def _size(value: Any) -> int | None:
    """A number, or the size of a Dim; None: it is variable. Raises: ValueError."""
    value = getattr(value, "dimension", value)
    if value is None or (isinstance(value, (int, numpy.integer)) and not isinstance(value, bool) and value >= 0):
        return None if value is None else int(value)
    raise ValueError(f"expected sizes that are numbers or None, got {value!r}")


def check_streams(name: str, streams: Mapping[str, Stream], files: Sequence[str], expected: Mapping[str, Expected]) -> None:
    """Compare the streams of a dataset with what tensors can hold, and with `extern_data`. Raises: DataError."""
    for key, stream in streams.items():
        if stream.dtype.kind not in "biufcOU" or stream.dtype.itemsize > {"f": 8, "c": 16}.get(stream.dtype.kind, math.inf):
            what = "numbers of a type that tensors have, such as float64, or texts"
            raise DataError(f"{source_of(name, files)}: expected {what}, got {stream.dtype} in {key!r}")
    for key, wanted in expected.items():
        if key in streams and (misfit := wanted.misfit(streams[key])) is not None:
            raise DataError(f"{source_of(name, files)}: {misfit} in {key!r} (according to extern_data.{key})")


def check_lengths(name: str, dataset: Dataset) -> None:
    """Check that batches can be planned with the lengths. Raises: DataError."""
    number = dataset.num_sequences
    if set(dataset.lengths) != set(dataset.streams):
        raise DataError(
            f"{name}: expected lengths of {_keys_text(dataset.streams)}, as of streams, got {_keys_text(dataset.lengths)}"
        )
    for key, column in dataset.lengths.items():
        if not isinstance(column, numpy.ndarray) or column.dtype.kind not in "iu" or column.shape != (number,):
            got = f"{column.dtype} of shape {column.shape}" if isinstance(column, numpy.ndarray) else type(column).__name__
            raise DataError(f"{name}: expected lengths of {key!r} as an array of {number} integers, got {got}")
        if number and int(column.min()) < 0:
            raise DataError(
                f"{name}: expected lengths of {key!r} of 0 or more, got {int(column.min())} for sequence {int(column.argmin())}"
            )


def _keys_text(names: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, names)) or "nothing"


def source_of(name: str, files: Sequence[str]) -> str:
    """The dataset, and its files if it has any: `train (a.hdf, b.hdf)`."""
    more = f" and {len(files) - 3} more files" if len(files) > 3 else ""
    return f"{name} ({', '.join(files[:3])}{more})" if files else name


@dataclass(frozen=True)
class BatchCheck:
    """Checks every batch.

    Attributes:
        name: of the dataset, for messages.
        dataset: the source of the batches.
        lengths: the lengths that the batches were planned with.
        parts: the datasets inside it, for messages.
        expected: the entries of `extern_data`, by data key.
        has_classes_of_files: whether all data comes unchanged from files, so that their numbers of classes apply.
    """

    name: str
    dataset: Dataset
    lengths: Mapping[str, Array]
    parts: Sequence[DatasetPart] = ()
    expected: Mapping[str, Expected] = field(default_factory=dict)
    has_classes_of_files: bool = False

    @cached_property
    def _streams(self) -> Mapping[str, Stream]:
        return self.dataset.streams

    def __call__(self, batch: Batch, indices: Array) -> Batch:
        """The batch, if it is as expected.

        Args:
            indices: of the sequences (or chunks) that were requested, or their pieces.

        Raises:
            DataError: it is not as expected.
        """
        for key, stream in self._streams.items():
            if key not in batch.data:
                raise self._error(batch, indices, 0, key, f"expected it in every batch, got only {_keys_text(batch.data)}")
            values, seq_lens = batch.data[key].values, batch.data[key].seq_lens
            planned = self.lengths[key][indices] if batch.joined is None else batch.joined.sum(keepdims=True)
            is_packed, is_items = isinstance(batch.data[key], Packed), isinstance(batch.data[key], Items)
            number = len(seq_lens) if is_packed else len(values)
            if number != len(planned) or len(seq_lens) != len(planned):
                raise self._error(batch, indices, 0, key, f"expected {len(planned)} sequences in a batch, got {number}")
            if not _are_equal(seq_lens, planned):
                row = int(numpy.flatnonzero(numpy.asarray(seq_lens) != planned)[0])
                raise self._error(
                    batch,
                    indices,
                    row,
                    key,
                    f"expected {int(planned[row])} frames, as the batches were planned with, got {int(seq_lens[row])}",
                )
            if is_items:  # whatever they are
                continue
            frames, shape = (len(values), values.shape[1:]) if is_packed else (values.shape[1], values.shape[2:])
            is_short = frames != int(planned.sum(dtype=numpy.int64)) if is_packed else frames < max(planned.tolist())
            if is_short or shape != stream.shape:
                got = f"frames of shape {shape}" if shape != stream.shape else f"{frames} frames"
                raise self._error(batch, indices, 0, key, f"expected frames of shape {stream.shape}, got {got}")
            if values.dtype != stream.dtype and not numpy.can_cast(values.dtype, stream.dtype, "same_kind"):
                raise self._error(batch, indices, 0, key, f"expected {stream.dtype}, got {values.dtype}")
            if stream.sparse:
                self._check_classes(batch, indices, key)
        return batch

    def _check_classes(self, batch: Batch, indices: Array, key: str) -> None:
        """Check that all class indices are in range. Raises: DataError."""
        dim = self._streams[key].dim
        source = "the file"
        is_known = dim > 1 and self.has_classes_of_files
        if (wanted := self.expected.get(key)) is not None and wanted.dim is not None:
            dim = wanted.dim
            source = f"extern_data.{key}"
            is_known = True
        values = batch.data[key].values
        if not is_known or not values.size or (int(values.max()) < dim and int(values.min()) >= 0):
            return
        seq_lens = numpy.asarray(batch.data[key].seq_lens)
        wrong = (values >= dim) | ((values < 0) & ~numpy.isin(values, IGNORED_CLASSES))
        if not isinstance(batch.data[key], Packed):
            wrong &= numpy.arange(values.shape[1]) < seq_lens[:, None]
        if wrong.any():
            position = tuple(numpy.argwhere(wrong)[0].tolist())
            row, frame = position if len(position) == 2 else _place_in_sequence(position[0], seq_lens)
            if batch.joined is not None:  # the piece of a sequence, and the frame in this sequence
                row, frame = _place_in_sequence(frame, batch.joined)
                frame += int(indices[row, 1])
            mistake = f"expected classes from 0 to {dim - 1}, as {source} says, got {values[position]} in frame {frame}"
            raise self._error(batch, indices, row, key, mistake)

    def _error(self, batch: Batch, indices: Array, row: int, key: str, mistake: str) -> DataError:
        try:
            [tag] = self.dataset.tags([int(indices[row])] if batch.joined is None else [int(indices[row, 0])])
        except Exception:  # the part that is broken may be the one that reads tags
            tag = f"number {indices[row].tolist()}"
        files = list(dict.fromkeys(path for source in self.parts for path in source.files))
        if len(self.parts) == 1 and (file := self.parts[0].file_of(int(batch.indices[row]))) is not None:
            files = [file]
        return DataError(f"{source_of(self.name, files)}: sequence {tag!r}, data key {key!r}: {mistake}")


def _are_equal(seq_lens: Array, planned: Array) -> bool:
    """Whether lengths are equal. (`numpy.array_equal` takes several times as long for those of a batch.)"""
    if seq_lens.dtype == planned.dtype and seq_lens.shape == planned.shape:
        return seq_lens.tobytes() == planned.tobytes()
    return numpy.array_equal(seq_lens, planned)


def _place_in_sequence(frame: int, seq_lens: Array) -> tuple[int, int]:
    """The sequence of a frame of packed sequences, and the number of the frame in this sequence.

    >>> _place_in_sequence(4, numpy.array([3, 0, 2]))
    (2, 1)
    """
    ends = numpy.cumsum(seq_lens)
    row = int(numpy.searchsorted(ends, frame, side="right"))
    return row, frame - int(ends[row] - seq_lens[row])
