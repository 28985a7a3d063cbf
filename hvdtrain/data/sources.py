"""From what a config says about a dataset (a dict, file names, a class of the user's) to an open dataset."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from hvdtrain.config.check import build, closest
from hvdtrain.config.keys import REQUIRED, key
from hvdtrain.config.reference import is_reference, resolve
from hvdtrain.data.order import OrderKeys
from hvdtrain.data.types import Dataset
from hvdtrain.errors import ConfigError, DataError

OWN = {"FolderDataset": "hvdtrain.data.folder:FolderDataset"}
"""Classes of this package that a dict may name, beside HDFDataset; the dict's other entries are their arguments."""


@dataclass(frozen=True, kw_only=True)
class HDFDatasetKeys:
    """Keys of a dataset dict with `"class": "HDFDataset"`."""

    files: str | list[str] = key(REQUIRED, "the HDF file, or a list of files that are read as one dataset")


@dataclass(frozen=True)
class DatasetSpec:
    """A checked dataset dict: how to open it, and how its sequences are ordered.

    Attributes:
        name: the config key it stands under ('train', 'dev', ...).
        open: opens the source. Raises: DataError.
    """

    name: str
    open: Callable[[], Any]
    order: OrderKeys


def parse(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[DatasetSpec | None, list[str]]:
    """Check what a config says about a dataset, without opening anything.

    Args:
        name: the config key, for messages.
        value: a dict with 'class', HDF file names (a list, or a string with commas), or a function that returns one of these.
        defaults: order keys that hold where the dict does not say otherwise.

    Returns:
        The dataset, or None and the problems.
    """
    if callable(value) and not isinstance(value, type):
        value = value()
    if isinstance(value, str) and not is_reference(value):
        value = [part.strip() for part in value.split(",")]
    if isinstance(value, (list, tuple)):
        value = {"class": "HDFDataset", "files": list(value)}
    elif not isinstance(value, dict):
        value = {"class": value}
    options = {option: content for option, content in value.items() if option != "class"}
    order_names = [field.name for field in fields(OrderKeys)]
    order_values = {**defaults, **{option: options.pop(option) for option in order_names if option in options}}
    order, problems = build(OrderKeys, order_values, f"{name}.", {})
    kind = value.get("class", "HDFDataset")
    kind = OWN.get(kind, kind) if isinstance(kind, str) else kind
    if kind == "HDFDataset":
        keys, more = build(HDFDatasetKeys, options, f"{name}.", {})
        problems += more + _unknown_options(name, options, ["files"], order_names)
        if keys is not None:
            files = [keys.files] if isinstance(keys.files, str) else keys.files
            opened: Callable[[], Any] = lambda: _open_hdf(files)  # noqa: E731
    elif callable(kind) or is_reference(kind):
        opened = lambda: _call(name, kind, options)  # noqa: E731
    else:
        problems.append(
            f"{name}.class: expected 'HDFDataset', a class, a function, or the name of one as 'module:name' or "
            f"'file.py:name', got {kind!r}"
        )
    if problems or order is None:
        return None, problems
    return DatasetSpec(name, opened, order), []


def open_dataset(spec: DatasetSpec) -> Dataset:
    """Open a dataset to train or evaluate on.

    Raises:
        DataError: a file is bad, or the source cannot tell the lengths of its sequences beforehand.
    """
    dataset = spec.open()
    if not all(hasattr(dataset, attribute) for attribute in ("streams", "lengths", "num_sequences", "sequence", "tags")):
        raise DataError(
            f"{spec.name}: expected a dataset that knows the lengths of its sequences, got {type(dataset).__name__} "
            "(convert it once with tools/hdf_dump.py and train on the HDF file)"
        )
    if dataset.num_sequences == 0:
        raise DataError(f"{spec.name}: expected at least one sequence, got an empty dataset")
    return dataset  # type: ignore[no-any-return]  # it has the protocol's attributes


def _open_hdf(files: list[str]) -> Dataset:
    from hvdtrain.data.hdf import open_hdf  # here, as `--help` has no time for h5py

    return open_hdf(files)


def _call(name: str, kind: Any, options: dict[str, Any]) -> Any:
    """Call the user's class or function with the dict's other entries."""
    try:
        made = resolve(kind) if isinstance(kind, str) else kind
    except ImportError as error:
        raise DataError(f"{name}.class: expected something that can be imported, got {error}") from error
    try:
        return made(**options)
    except TypeError as error:
        raise ConfigError([f"{name}: {error} (the dict's entries are passed to {kind} as arguments)"]) from error


def _unknown_options(name: str, options: Mapping[str, Any], own: list[str], order_names: list[str]) -> list[str]:
    problems = []
    for option in options:
        if option not in own:
            match = closest(str(option), own + order_names)
            problems.append(f"{name}.{option}: unknown key of an HDFDataset" + (f" (did you mean {match}?)" if match else ""))
    return problems
