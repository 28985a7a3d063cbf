"""Inspects an HDF file: how its data is stored, reasons for slow reading, and bad values."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.compression import FILTERS, filters_of
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.writer import UNKNOWN_DIM

LARGE = 1 << 20
"""Bytes of a chunk. Reading a random sequence from a larger one reads much data that is not needed."""

MANY_CHUNKS = 8
"""A sequence in more chunks than this takes longer to look up than to read."""

BYTES_AT_ONCE = 16 << 20
"""The number of bytes checked at once."""

SAMPLE = 300
"""The number of sequences checked, unless all are."""

TAGS = 10_000
"""The number of tags read at once."""

READ = ("inputs", "labels", "seqLengths", "seqTags", "targets", "streams", "seq_names")
"""The members of a file's top level that the trainer reads."""


def storage(path: Path) -> dict[str, dict[str, Any]]:
    """By data key of a valid file, how it is stored, in words (contiguous, or chunks and compression), and its bytes there."""
    stored: dict[str, dict[str, Any]] = {}
    with h5py.File(path, "r") as file:
        for key, dataset in _datasets(file):
            words = "contiguous" if dataset.chunks is None else ", ".join([f"chunks {dataset.chunks}", *_filters(dataset)])
            stored[key] = {"storage": words, "stored_bytes": int(dataset.id.get_storage_size())}
    return stored


def _filters(dataset: h5py.Dataset) -> list[str]:
    """The names of the filters that compress or rearrange, in order."""
    return [name for _, name in filters_of(dataset)]


def slow_parts(path: Path, lengths: Mapping[str, Array]) -> list[str]:
    """The reasons why a file is slow to read.

    Args:
        lengths: by data key, number of frames of every sequence.
    """
    remarks: list[str] = []
    with h5py.File(path, "r") as file:
        for key, dataset in _datasets(file):
            frames = lengths[key].mean() if key in lengths and len(lengths[key]) else 0.0
            remarks += _slow_storage(dataset, float(frames))
        tags = h5py.check_string_dtype(file["seqTags"].dtype) if "seqTags" in file else None
        if tags is not None and tags.length is None:
            remarks.append("/seqTags are strings of variable length, which take longer to read than strings of a fixed width")
        if "streams" in file:
            remarks.append("one HDF5 dataset per sequence: opening the file and finding a sequence is slow")
        unread = sorted(set(file) - set(READ))
        if unread:
            remarks.append(f"/{', /'.join(unread)}: not read by the trainer (--repack leaves it out)")
    return remarks


def extremes(path: Path, key: str) -> tuple[int, int] | None:
    """The smallest and the largest integer of a key; None if there is no data.

    Raises:
        DataError: the data cannot be read.
    """
    with h5py.File(path, "r") as file:
        dataset = dict(_datasets(file)).get(key)
        if dataset is None or not dataset.size:
            return None
        length = dataset.chunks[0] if dataset.chunks else 1
        step = max(1, BYTES_AT_ONCE // (length * dataset.dtype.itemsize)) * length
        ends: list[int] = []
        for start in range(0, len(dataset), step):
            try:
                block = dataset[start : start + step]
            except OSError as error:
                raise DataError(f"{path}: cannot read {dataset.name} from frame {start} on: {error}") from None
            ends += [int(block.min()), int(block.max())]
        return min(ends), max(ends)


def _datasets(file: h5py.File) -> Iterator[tuple[str, h5py.Dataset]]:
    if isinstance(file.get("inputs"), h5py.Dataset):
        yield "data", file["inputs"]
    for key, dataset in sorted(file["targets/data"].items()) if "targets/data" in file else ():
        if isinstance(dataset, h5py.Dataset):
            yield key, dataset


def _num_unwritten(dataset: h5py.Dataset) -> int:
    """The number of a dataset's chunks that are not in the file."""
    if dataset.chunks is None or dataset.external or dataset.is_virtual:
        return 0
    number = math.prod(math.ceil(size / chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    return number - int(dataset.id.get_num_chunks()) if number else 0


def _slow_storage(dataset: h5py.Dataset, frames: float) -> Iterator[str]:
    """The reasons why a dataset is slow to read whose sequences have this mean number of frames."""
    name = dataset.name
    chunks = dataset.chunks
    dtype = dataset.dtype
    is_text = dtype.kind in "OS"
    offset = dataset.id.get_offset() if chunks is None else None
    if not dtype.isnative:
        yield f"{name}: {dtype.str.lstrip('<|=')} is not the byte order of this machine: every read converts numbers"
    if offset is not None and not is_text and offset % dtype.itemsize:
        yield f"{name}: begins at byte {offset}, not a multiple of {dtype.itemsize}: gathering short sequences is slower"
    if chunks is None or 0 in dataset.shape:
        return
    frame_shape = dataset.shape[1:]
    chunk_bytes = math.prod(chunks) * dtype.itemsize
    across = math.prod(math.ceil(size / chunk) for size, chunk in zip(frame_shape, chunks[1:], strict=True))
    pieces = max(1, math.ceil(frames / chunks[0])) * across
    # A sequence begins anywhere in a chunk: on average it touches (frames - 1) / length + 1 of them along time.
    touched = max(0.0, frames - 1) + chunks[0]
    excess = touched * math.prod(-(-s // c) * c for s, c in zip(frame_shape, chunks[1:], strict=True))
    excess /= max(1.0, frames) * math.prod(frame_shape)
    if across > 1:
        features = " x ".join(map(str, frame_shape))
        yield (
            f"{name}: chunks {chunks} cut the feature axis of {features}: a sequence of {frames:.0f} frames is read from "
            f"{pieces} chunks, which hold {excess:.1f} times as much data"
        )
    elif pieces > MANY_CHUNKS:
        yield f"{name}: chunks {chunks} are small: a sequence of {frames:.0f} frames is read from {pieces} chunks"
    if chunk_bytes > LARGE:
        sequence_bytes = frames * math.prod(frame_shape) * dtype.itemsize
        yield (
            f"{name}: chunks {chunks} hold {chunk_bytes / LARGE:.1f} MiB, a sequence {sequence_bytes / LARGE:.2f} MiB: "
            "whole chunks are read for each sequence"
        )
    filters = _filters(dataset)
    slow = [filter_name for filter_name in filters if filter_name in ("gzip", "lzf", "szip")]
    if slow:
        yield f"{name}: {slow[0]} is slow to decompress in random access (zstd, lz4, blosc2 and no compression are faster)"
    if not set(filters) & set(FILTERS.values()) and not is_text:
        yield f"{name}: chunked but not compressed: it cannot be memory-mapped"


def check_values(path: Path, dataset: Dataset, everything: bool) -> tuple[list[str], list[str]]:
    """Check the values of a file. Returns problems, which prevent a conversion, and warnings.

    All class indices are checked; other values in a sample of sequences spread over the file, or in all with `everything`.
    """
    count = dataset.num_sequences
    sample = range(count) if everything else numpy.unique(numpy.linspace(0, count - 1, SAMPLE, dtype=numpy.int64)).tolist()
    sparse = [key for key, stream in dataset.streams.items() if stream.sparse and key != "sizes"]
    odd: Counter[str] = Counter()
    where: dict[str, int] = {}
    try:
        classes = {key: extremes(path, key) for key in sparse}
        for index in sample:
            for key, values in dataset.sequence(index).items():
                if values.dtype.kind in "fc" and not numpy.isfinite(values).all():
                    odd[key] += 1
                    where.setdefault(key, index)
    except DataError as error:
        return [str(error)], []
    problems: list[str] = []
    warnings: list[str] = []
    for key, limits in classes.items():
        dim = dataset.streams[key].dim
        if limits is not None and not 0 <= limits[0] <= limits[1] < dim:
            message = f"{path}: expected classes from 0 to {dim - 1} for {key!r}, got {limits[0]} to {limits[1]}"
            (warnings if dim == UNKNOWN_DIM else problems).append(message)
    with h5py.File(path, "r") as file:
        for _, stored in _datasets(file):
            if unwritten := _num_unwritten(stored):
                warnings.append(f"{stored.name}: {unwritten} of its chunks were never written: they are read as zeros")
    for key, number in sorted(odd.items()):
        tag = dataset.tags([where[key]])[0]
        warnings.append(f"NaN or infinity for {key!r} in {number} of {len(sample)} checked sequences, the first is {tag!r}")
    twice = _repeated_tags(dataset)
    if twice:
        some = ", ".join(repr(tag) for tag in twice[:3])
        warnings.append(f"{len(twice)} tags occur more than once, such as {some}: they do not identify a sequence")
    return problems, warnings


def _repeated_tags(dataset: Dataset) -> list[str]:
    """Tags of more than one sequence, found with eight bytes of memory per sequence."""
    hashes = numpy.fromiter((hash(tag) for tag in _tags(dataset)), numpy.int64, dataset.num_sequences)
    values, counts = numpy.unique(hashes, return_counts=True)
    suspects = values[counts > 1]
    if not len(suspects):
        return []
    suspect: set[int] = set(suspects.tolist())
    times = Counter(tag for tag in _tags(dataset) if hash(tag) in suspect)
    return [tag for tag, number in times.items() if number > 1]


def _tags(dataset: Dataset) -> Iterator[str]:
    for start in range(0, dataset.num_sequences, TAGS):
        yield from dataset.tags(range(start, min(start + TAGS, dataset.num_sequences)))


def spread(lengths: Array) -> dict[str, float]:
    """Statistics of the lengths of sequences.

    >>> spread(numpy.array([1, 2, 9]))
    {'least': 1, 'most': 9, 'mean': 4.0, 'median': 2.0}
    """
    return {
        "least": int(lengths.min()),
        "most": int(lengths.max()),
        "mean": float(lengths.mean()),
        "median": float(numpy.median(lengths)),
    }
