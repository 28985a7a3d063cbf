"""Compression in HDF5 files: the filters of h5py, and those of the package hdf5plugin, imported only if a file needs it."""

from __future__ import annotations

import importlib
from typing import Any

import h5py

from hvdtrain.errors import DataError

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
        if h5py.h5z.filter_avail(number) or (hdf5plugin() is not None and h5py.h5z.filter_avail(number)):
            continue
        raise DataError(
            f"{path}: expected a compression that can be read in {dataset.name}, got {name} ({number}) ({_provider(number)})"
        )


def _provider(number: int) -> str:
    """How to get a filter that is missing."""
    if number in IN_PLUGIN:
        return (
            "pip install hdf5plugin"
            if hdf5plugin() is None
            else "pip install --upgrade hdf5plugin: this version does not have it"
        )
    if number in FILTERS:
        return "the HDF5 library of this h5py was built without it; pip install --force-reinstall h5py installs one with it"
    return (
        "it is not in hdf5plugin; HDF5's list of registered filters names its provider by number: set HDF5_PLUGIN_PATH to the "
        "folder where it is installed, or write the file with another compression"
    )


def hdf5plugin() -> Any:
    """The package hdf5plugin, or None if it is not installed. Importing it registers its filters with h5py."""
    try:
        return importlib.import_module("hdf5plugin")
    except ImportError:
        return None
