"""Compression of HDF files that are written."""

from __future__ import annotations

from typing import Any, Literal, get_args

from hvdtrain.data.hdf.compression import hdf5plugin
from hvdtrain.errors import DataError

Compression = Literal["gzip", "lzf", "zstd", "lz4", "blosc2"]

NAMES: tuple[str, ...] = get_args(Compression)

LEAST, MOST = 16 << 10, 256 << 10
"""Limits of the bytes of a chunk. Finding a smaller one costs more than reading it; of a larger one, each sequence reads too
much."""


def options(compression: str) -> dict[str, Any]:
    """The arguments of h5py's `create_dataset` for a compression.

    Raises:
        DataError: its name is unknown, or the package that it needs is not installed.
    """
    if compression in ("gzip", "lzf"):
        return {"compression": compression}
    if compression not in NAMES:
        raise DataError(f"compression: expected one of {', '.join(NAMES)}, got {compression!r}")
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
