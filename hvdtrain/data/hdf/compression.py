"""Compression in HDF5 files: the filters of h5py, and those of the package hdf5plugin, imported only if a file needs it."""

from __future__ import annotations

import importlib
from typing import Any, Literal, get_args

import h5py

from hvdtrain.errors import DataError

Compression = Literal["gzip", "lzf", "zstd", "lz4", "blosc2"]

NAMES: tuple[str, ...] = get_args(Compression)

IN_PLUGIN = {
    307: "bzip2",
    32001: "blosc",
    32004: "lz4",
    32008: "bitshuffle",
    32013: "zfp",
    32015: "zstd",
    32017: "sz",
    32018: "fcidecomp",
    32024: "sz3",
    32026: "blosc2",
    32028: "sperr",
    32033: "htj2k",
}
"""HDF5's numbers of the compression filters in the newest version of the package hdf5plugin."""

FILTERS = {1: "gzip", 4: "szip", 32000: "lzf", **IN_PLUGIN}
"""HDF5's numbers of compression filters, without those that only rearrange or check bytes (shuffle, Fletcher)."""

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
    plugin = _plugin()
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


def filters_of(dataset: h5py.Dataset) -> list[tuple[int, str]]:
    """The numbers and names of a dataset's filters, in order."""
    properties = dataset.id.get_create_plist()
    filters = [properties.get_filter(place) for place in range(properties.get_nfilters())]
    return [(number, FILTERS.get(number) or name.decode("utf-8", errors="replace") or "?") for number, _, _, name in filters]


def load_filters(path: object, dataset: h5py.Dataset) -> None:
    """Load the filters that a dataset needs.

    Raises:
        DataError: it is compressed with a filter that is not installed.
    """
    if dataset.chunks is None:
        return
    for number, name in filters_of(dataset):
        if h5py.h5z.filter_avail(number) or (_plugin() is not None and h5py.h5z.filter_avail(number)):
            continue
        raise DataError(
            f"{path}: expected a compression that can be read in {dataset.name}, got {name} ({number}) ({_provider(number)})"
        )


def _provider(number: int) -> str:
    """How to get a filter that is missing."""
    if number in IN_PLUGIN:
        return (
            "pip install hdf5plugin" if _plugin() is None else "pip install --upgrade hdf5plugin: this version does not have it"
        )
    if number in FILTERS:
        return "the HDF5 library of this h5py was built without it; pip install --force-reinstall h5py installs one with it"
    return (
        "it is not in hdf5plugin; HDF5's list of registered filters names its provider by number: set HDF5_PLUGIN_PATH to the "
        "folder where it is installed, or write the file with another compression"
    )


def _plugin() -> Any:
    """The package hdf5plugin, or None if it is not installed. Importing it registers its filters with h5py."""
    try:
        return importlib.import_module("hdf5plugin")
    except ImportError:
        return None
