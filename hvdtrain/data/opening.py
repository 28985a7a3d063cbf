"""Opening the datasets that `sources` has checked."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

from hvdtrain.config.references import resolve
from hvdtrain.data.cache import NO_CACHE, Cache
from hvdtrain.data.combine.user_code import with_own_numbers
from hvdtrain.data.dataset import Dataset, DatasetPart, Scanning, SequenceSource
from hvdtrain.data.foreign import as_dataset, is_iterable, is_map_style
from hvdtrain.data.formats.items import ItemsDataset
from hvdtrain.data.formats.objects import Objects, ObjectsDataset
from hvdtrain.data.keys import DatasetKeys, DatasetSpec
from hvdtrain.data.kinds import iterable_source
from hvdtrain.data.randomness import ITEM, own_numbers
from hvdtrain.data.remote import is_remote, without_query
from hvdtrain.errors import DataError


@dataclass(frozen=True)
class OpeningContext:
    """What the job provides to read its datasets.

    Attributes:
        cache: the memory for sequences that are read.
        copies: by name of a data file, that of its copy on a local disk.
        scanning: for datasets whose lengths are found by reading them.
        parts: collects every opened dataset without others inside it.
    """

    cache: Cache = NO_CACHE
    copies: Mapping[str, str] = field(default_factory=dict)
    scanning: Scanning = field(default_factory=Scanning)
    parts: list[DatasetPart] = field(default_factory=list)


def is_cut_set(value: Any) -> bool:
    """Whether a value of a config is a CutSet of Lhotse, which is not imported for that."""
    return type(value).__name__ == "CutSet" and type(value).__module__.startswith("lhotse.")


def open_dataset(spec: DatasetSpec, context: OpeningContext | None = None) -> Dataset:
    """Open a dataset to train or evaluate on, with a cache if the context has memory for one.

    Raises:
        DataError: a file is bad, or the lengths of the source's sequences cannot be known in advance.
    """
    context = context or OpeningContext()
    with numbers_of_opening(spec.name, context.scanning):
        return _open(spec, context)


def numbers_of_opening(name: str, scanning: Scanning) -> AbstractContextManager[None]:
    """Within the `with` block, random numbers that the user's code draws, such as a split, are the same in every run and rank."""
    return own_numbers(scanning.seed, ITEM, zlib.crc32(name.encode()))


def _open(spec: DatasetSpec, context: OpeningContext) -> Dataset:
    opened = spec.open(context)
    dataset = as_dataset(opened)
    if is_cut_set(opened):
        raise DataError(f'{spec.name}: expected {{"class": "LhotseDataset", "cuts": ...}}, got a CutSet of another class')
    if isinstance(opened, Objects):
        dataset = ObjectsDataset(spec.name, opened)
    if dataset is None and isinstance(opened, SequenceSource):
        dataset = opened.to_train_on(spec.name, context.scanning)
    if dataset is None and is_map_style(opened):
        dataset = ItemsDataset(spec.name, opened, context.scanning)
    if dataset is None and is_iterable(opened):
        dataset = iterable_source(spec.name, spec.repeatable(opened)).to_train_on(spec.name, context.scanning)
    if dataset is None:
        raise DataError(
            f"{spec.name}: expected a dataset that has the lengths of its sequences, has __len__ and __getitem__, or can be "
            f"iterated over, got {type(opened).__name__} (convert it once with hvdtrain dump and train on the HDF file)"
        )
    if dataset.num_sequences == 0:
        where = f"none in {', '.join(spec.files[:3])}" if spec.files else "an empty dataset"
        raise DataError(f"{spec.name}: expected at least one sequence, got {where}")
    if spec.datasets:
        return dataset
    context.parts.append(DatasetPart(spec.name, dataset, spec.files))
    return context.cache.keep(with_own_numbers(spec.name, dataset, context.scanning))


def open_kind(name: str, keys: DatasetKeys, inside: Mapping[str, DatasetSpec], context: OpeningContext) -> Dataset:
    """Open the datasets inside, then the dataset itself; closes open ones if something fails."""
    copies = {path: context.copies[path] for path in keys.files_to_copy() if path in context.copies}
    for path in keys.data_files():
        if is_remote(path) and path not in copies:
            raise DataError(f"{name}: expected a copy of {without_query(path)} on a local disk, got none (set cache_dir)")
    keys = keys.with_copies(copies) if copies else keys
    inner = replace(context, cache=context.cache.shared_by(keys.num_readers()))
    with ExitStack() as on_failure:
        datasets = {}
        for child, spec in inside.items():
            datasets[child] = open_dataset(spec, inner)
            on_failure.callback(datasets[child].close)
            if datasets[child].has_fixed_order and not keys.keeps_order:
                raise DataError(
                    f"{spec.name}: expected a dataset that can be read in any order inside {name}, got one that "
                    "is read from beginning to end (RETURNN's: give the outer dict to RETURNN: "
                    f'{{"class": "ReturnnDataset", "dataset": ...}}; an iterable: convert it once with hvdtrain dump)'
                )
            if datasets[child].collate is not None and not keys.joins:
                raise DataError(
                    f"{spec.name}: expected a dataset without collate inside {name}, got one (collate belongs to the outermost "
                    "dataset, or to those inside a ConcatDataset, CombinedDataset or MixingDataset)"
                )
            if datasets[child].mix is not None and not keys.keeps_order:
                raise DataError(
                    f"{spec.name}: expected a MixingDataset around other datasets, or inside a MapDataset, got one inside {name} "
                    "(mix all datasets in one dict, with weights that are products)"
                )
        try:
            scanning = (context.scanning,) if keys.scans else ()
            dataset: Dataset = resolve(keys.opener)(name, keys, datasets, *scanning)
        except DataError as error:
            originals = [path for path, copy in copies.items() if copy in str(error)]
            if not originals:
                raise
            original = without_query(originals[0]) if is_remote(originals[0]) else originals[0]
            raise DataError(f"{error} (a copy of {original})") from None
        on_failure.pop_all()
    return dataset
