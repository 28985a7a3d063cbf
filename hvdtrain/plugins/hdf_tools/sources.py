"""What `hvdtrain dump` converts."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from hvdtrain.config.check import did_you_mean
from hvdtrain.config.foreign import Watches
from hvdtrain.config.overrides import COMMAND_LINE
from hvdtrain.config.references import is_reference
from hvdtrain.config.source import load
from hvdtrain.data.combine.user_code import with_own_numbers
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Item, SequenceSource
from hvdtrain.data.feed import Feed
from hvdtrain.data.foreign import as_dataset, is_iterable, is_map_style, refuse_batches, takes_epoch
from hvdtrain.data.formats.item_form import ItemForm
from hvdtrain.data.formats.items import ItemsDataset
from hvdtrain.data.formats.objects import Objects
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.kinds import iterable_source
from hvdtrain.data.opening import OpeningContext, numbers_of_opening
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys, non_default
from hvdtrain.data.plan.selection import find_listed
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError, Problem
from hvdtrain.plugins.hdf_tools.writer import UNKNOWN_DIM

NO_COPIES: Mapping[str, str] = {}


def find_dataset(source: str, name: str, overrides: dict[str, str]) -> DatasetSpec:
    """The dataset that the command line names: in a config, or as a dict, files, or a user's code. Raises: ConfigError."""
    value: Any = source
    defaults: dict[str, Any] = {}
    is_config = source.endswith((".py", ".json", ".config")) and not is_reference(source)
    if source.lstrip().startswith("{"):
        try:
            value = ast.literal_eval(source)
        except (ValueError, SyntaxError) as error:
            why = error.msg if isinstance(error, SyntaxError) else error
            raise ConfigError.of("wrong-type", f"dataset dict: expected a Python dict, got {source!r} ({why})") from None
    elif is_config:
        loaded = load([Path(source)], overrides, {}, Watches().builtins)
        values = loaded.values
        from hvdtrain.settings import all_keys  # here, so that --help does not import it

        keys = [key.name for key in all_keys()]
        misspelt = [
            Problem.of(
                "unknown-key", f"{name}: unknown key in {COMMAND_LINE}{did_you_mean(name, [*values.keys() - {name}, *keys])}"
            )
            for name in loaded.unused
            if name not in keys
        ]
        if problems := [*loaded.problems, *misspelt]:
            raise ConfigError(problems)
        named: dict[str, Any] = {key: values[key] for key in ("train", "dev", "eval") if key in values}
        named |= values.get("eval_datasets") or {}
        if name not in named and name not in values:
            hint = f"no datasets (a class or function in it: {source}:NAME)"
            present = f"{', '.join(named)}{did_you_mean(name, list(named))}" if named else hint
            raise ConfigError.of("unknown-value", f"--dataset: expected a dataset of {source}, got {name!r}; it has {present}")
        value = named.get(name, values.get(name))
        if name == "train" and values.get("batching"):
            defaults["seq_ordering"] = values["batching"]
    if overrides and not is_config:
        raise ConfigError.of(
            "unknown-value", f"++{next(iter(overrides))}: expected a config as SOURCE, which has keys, got {source}"
        )
    spec, problems = parse(name, value, defaults)
    if spec is None:
        raise ConfigError(problems)
    return spec


@dataclass(frozen=True)
class Selection:
    """Sequences of an epoch in its order, from `start` to `end`, both inclusive; None: to the last one."""

    epoch: int = 1
    start: int = 0
    end: int | None = None

    def check(self) -> None:
        """Raises: DataError."""
        last = self.start if self.end is None else self.end
        for name, number, least in (("epoch", self.epoch, 1), ("start_seq", self.start, 0), ("end_seq", last, self.start)):
            if number < least:
                raise DataError(f"--{name}: expected {least} or more, got {number}")


@dataclass(frozen=True)
class Source:
    """Sequences in an epoch's order.

    Attributes:
        total: the number of sequences, if it is known.
        read: returns the sequences from a first number up to a second one (exclusive; None: to the last).
        labels: the names of the classes, by key.
        dims: the number of classes, by key.
        remark: a message for the user.
        close: closes files and ends processes.
    """

    total: int | None
    read: Callable[[int, int | None], Iterator[Item]]
    labels: Mapping[str, Sequence[str]]
    dims: Mapping[str, int]
    remark: str = ""
    close: Callable[[], None] = lambda: None


def open_source(spec: DatasetSpec, epoch: int, copies: Mapping[str, str] = NO_COPIES) -> Source:
    """Open a dataset in the order of its keys, or a source in its own: anything that can be trained on, and texts.

    Raises:
        DataError: it cannot be read, or its keys would be ignored.
    """
    context = OpeningContext(copies=copies)
    with numbers_of_opening(spec.name, context.scanning):
        opened = spec.open(context)
    dataset = as_dataset(opened)
    if dataset is None and is_map_style(opened) and (not isinstance(opened, Sequence) or spec.order != OrderKeys()):
        of_files = isinstance(opened, SequenceSource)
        dataset = opened.to_train_on(spec.name, context.scanning) if of_files else ItemsDataset(spec.name, opened)
    if dataset is not None:
        dataset = with_own_numbers(spec.name, dataset, context.scanning)
        labels = {name: stream.labels for name, stream in dataset.streams.items() if stream.labels}
        # Unchanged, even if RETURNN's SimpleHDFWriter did not know it: parts of a corpus must not get different ones.
        dims = {name: max(UNKNOWN_DIM, stream.dim) for name, stream in dataset.streams.items() if stream.sparse}
        subset = find_listed(dataset, spec.order.seq_list_filter_file)
        indices = Feed(spec.name, dataset, spec.order, BatchKeys(max_seqs=1), 0, 1, subset=subset).plan(epoch).order
        now = dataset.at_epoch(epoch)
        return Source(len(indices), partial(read_by_index, now, indices), labels, dims, close=dataset.close)
    if isinstance(opened, Objects):
        raise DataError(
            f"{spec.name}: expected arrays to write, got items for a collate function (without it, items are arrays by data key)"
        )
    if not isinstance(opened, SequenceSource) and is_iterable(opened):
        refuse_batches(spec.name, opened)
        again = spec.repeatable(opened)
        opened = iterable_source(spec.name, again) if takes_epoch(again) else opened
    source = as_source(spec.name, opened, ItemForm(lambda number: f"{spec.name}, item {number}").sequence)
    order = non_default(spec.order)
    if refused := [name for name in ("seq_list_filter_file", "partition_epoch", "partition_by") if name in order]:
        raise DataError(
            f"{spec.name}: expected no {' and no '.join(refused)} for {source.name}, which is read from beginning to end, got it "
            "(convert it as it comes, then set the key for the HDF file)"
        )
    remark = f"{spec.name}: written in the order in which {source.name} yields it, without {', '.join(order)}" if order else ""
    total = source.begin_epoch(epoch)
    return Source(total, source.read, source.labels, source.dims, remark)


def read_by_index(opened: Dataset, indices: Array, start: int, stop: int | None, block: int = 10_000) -> Iterator[Item]:
    """Sequences of a dataset that can be indexed; tags are read in blocks."""
    wanted = indices[start:stop]
    for first in range(0, len(wanted), block):
        some = wanted[first : first + block].tolist()
        for tag, index in zip(opened.tags(some), some, strict=True):
            yield tag, opened.sequence(index)


def as_source(where: str, opened: Any, convert: Callable[[int, Any], Item]) -> SequenceSource:
    """What a config's class or function returned, as a source to convert. Raises: DataError, if it cannot be iterated over.

    Args:
        where: the config key, for messages.
        convert: makes a sequence of an item that is not (tag, {data key: array}), given its number. Raises: DataError.
    """
    if isinstance(opened, SequenceSource):
        return opened
    if not hasattr(opened, "__iter__"):
        raise DataError(f"{where}: expected something that yields (tag, {{key: array}}), got {type(opened).__name__}")
    return ForeignSource(opened, convert)


class ForeignSource(SequenceSource):
    """Any iterable of (tag, {data key: array}), where arrays may be text, or of other items that can be converted; it may have
    `labels`, `dims` and `__len__`.
    """

    def __init__(self, inner: Iterable[Any], convert: Callable[[int, Any], Item]) -> None:
        self._inner = inner
        self._convert = convert
        self.labels = {name: list(labels) for name, labels in dict(getattr(inner, "labels", {})).items()}
        self.dims = dict(getattr(inner, "dims", {}))

    @property
    def name(self) -> str:
        return type(self._inner).__name__

    def begin_epoch(self, epoch: int) -> int | None:
        if epoch != 1:
            raise DataError(f"--epoch: expected 1 for {self.name}, which has no epochs, got {epoch}")
        return len(self._inner) if isinstance(self._inner, Sized) else None

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        inner = self._inner
        if isinstance(inner, Sequence):  # looked up by number
            numbers = range(start, len(inner) if stop is None else min(stop, len(inner)))
            items: Iterator[Any] = (inner[number] for number in numbers)
        else:
            items = islice(inner, start, stop)
        for number, item in enumerate(items, start=start):
            is_sequence = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)
            yield item if is_sequence else self._convert(number, item)
