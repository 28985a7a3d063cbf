"""Where an HDF file leads to other files: links, datasets whose values lie elsewhere, and datasets put together of others."""

from __future__ import annotations

from pathlib import Path

import h5py

from hvdtrain.data.types import External
from hvdtrain.errors import DataError

HINT = "allow_external in the dataset dict allows it"


def check_place(path: Path, file: h5py.File, name: str, external: External) -> None:
    """Look at the way to what lies under a name, if anything does.

    Raises:
        DataError: it leaves the file, which was not allowed, or it was, but what it leads to is not there.
    """
    parent: h5py.Group = file
    for part in name.split("/"):
        if not isinstance(parent, h5py.Group) or part not in parent:
            return
        link = parent.get(part, getlink=True)
        outside = isinstance(link, h5py.ExternalLink)
        if outside and external == "refuse":
            raise DataError(f"{path}: expected /{name} to be in this file, got a link to another file ({HINT})")
        try:
            found = parent[part]
        except (KeyError, OSError) as error:
            if outside:
                raise DataError(
                    f"{path}: expected {link.path} in {link.filename}, where the link /{name} leads, got: {error}"
                ) from None
            raise
        soft = isinstance(link, h5py.SoftLink)  # it may lead to a link that leaves the file
        if soft and external == "refuse" and found.file != file:
            raise DataError(f"{path}: expected /{name} to be in this file, got a link to another file ({HINT})")
        parent = found
    if isinstance(parent, h5py.Dataset) and (parent.external or parent.is_virtual):
        if external == "refuse":
            raise DataError(
                f"{path}: expected /{name} to be stored in this file, got a dataset whose values lie in other files ({HINT})"
            )
        _check_sources(path, parent)


def _check_sources(path: Path, dataset: h5py.Dataset) -> None:
    """HDF5 reads zeros where other files should have values: a missing file is to be noticed, and one that is too short."""
    for name, offset, size in dataset.external or ():
        there = Path(name).stat().st_size if Path(name).is_file() else None  # relative to the working directory, as by HDF5
        if there is None or (size != h5py.h5f.UNLIMITED and there < offset + size):
            got = "no such file" if there is None else f"{there} bytes"
            raise DataError(f"{path}: expected {name} with {offset + size} bytes, where {dataset.name} is stored, got: {got}")
    if not dataset.is_virtual:
        return
    folder = Path(dataset.file.filename).parent
    for _, file_name, source, _ in dataset.virtual_sources():
        if file_name == ".":
            there_is = source in dataset.file
        elif "%b" in file_name:  # as many files as there are
            continue
        else:
            place = next((place for place in (folder / file_name, Path(file_name)) if h5py.is_hdf5(place)), None)
            if place is None:
                there_is = False
            else:
                with h5py.File(place, "r") as other:
                    there_is = source in other
        if not there_is:
            raise DataError(f"{path}: expected {source} in {file_name}, of which {dataset.name} is put together, got none")
