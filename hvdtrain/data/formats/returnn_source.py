"""Datasets of RETURNN, read by RETURNN itself: as a source to convert, and as a dataset to train on.

RETURNN's datasets yield the sequences of an epoch one after the other, and many do not know their number or lengths in advance.
`hvdtrain dump` converts them as they come; training first finds the lengths (returnn_stream.py).
"""

from __future__ import annotations

import importlib.util
import inspect
import logging
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy

from hvdtrain.data.dataset import Dataset, Item, Scanning, SequenceSource
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import ConfigError, DataError

INSTALL = "(pip install hvdtrain[returnn])"


class ReturnnDataset(SequenceSource):
    """A dataset that the installed RETURNN opens and reads.

    Args:
        dataset: the dict of a RETURNN config. RETURNN handles its order keys (seq_ordering, partition_epoch, ...) and its files.
        num_workers: processes that read for a training, where RETURNN's dataset can be read from anywhere.

    Raises:
        ConfigError: it is no such dict.
    """

    def __init__(self, dataset: Mapping[str, Any], num_workers: int = 1) -> None:
        if not isinstance(dataset, Mapping) or "class" not in dataset:
            raise ConfigError(
                [f"dataset: expected a dataset dict of RETURNN with 'class', got {dataset!r} in the ReturnnDataset"]
            )
        if isinstance(num_workers, bool) or not isinstance(num_workers, int) or num_workers < 1:
            raise ConfigError([f"num_workers: expected a positive integer, got {num_workers!r} in the ReturnnDataset"])
        self._options = dataset
        self._num_workers = num_workers
        self._opened: OpenedDataset | None = None
        self._epoch = 1
        self.labels: dict[str, list[str]] = {}
        self.dims: dict[str, int] = {}

    def begin_epoch(self, epoch: int) -> int | None:
        """Open the dataset, if it is not open, and begin an epoch. Raises: DataError, also if RETURNN is not installed."""
        if self._opened is None:
            self._opened = OpenedDataset(self._options)
        self._epoch = epoch
        self._opened.begin(epoch)
        self.labels, self.dims = self._opened.labels_and_dims()
        return self._opened.num_sequences()

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        """RETURNN reads an epoch from its beginning: the sequences before `start` are made and dropped."""
        opened = self._opened
        if opened is None:
            raise RuntimeError("read before begin_epoch")
        opened.begin(self._epoch)
        for number in count() if stop is None else range(stop):
            item = opened.item(number)
            if item is None:
                return
            if number >= start:
                yield item

    def to_train_on(self, where: str, scanning: Scanning) -> Dataset:
        from hvdtrain.data.formats.returnn_stream import open_stream  # it opens the dataset in a process of its own

        if not _is_installed():
            raise DataError(f"{where}: expected the package returnn for {self._options['class']}, got none {INSTALL}")
        return open_stream(where, self._options, scanning, self._num_workers)


class OpenedDataset:
    """A dataset that the installed RETURNN has opened. `begin` comes first.

    Raises:
        DataError: RETURNN is not installed, or cannot open the dataset.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.name = f"{options['class']} of RETURNN"
        init_dataset = _returnn()
        self._dataset = self._asked("that it can open", lambda: init_dataset(dict(options)))
        self._dense: dict[str, bool] = {}

    def begin(self, epoch: int) -> None:
        """Begin an epoch (counted from 1), also one that had begun before. Raises: DataError."""
        if self._dense:  # some datasets read ahead, and would go on where they were
            self._asked("whose epoch can end", self._dataset.finish_epoch)
        self._asked(f"whose epoch {epoch} can begin", lambda: self._dataset.init_seq_order(epoch))
        self._dense = {key: not self._dataset.is_data_sparse(key) for key in self._keys()}

    def num_sequences(self) -> int | None:
        """The number of sequences of the epoch; None if RETURNN does not know it."""
        try:
            return int(self._dataset.num_seqs)
        except Exception:  # how RETURNN says that it does not know; the class of the exception depends on the dataset
            return None

    def num_parts(self) -> int:
        """The number of parts that the outermost dict cuts a full epoch into."""
        return int(getattr(self._dataset, "partition_epoch", 1) or 1)

    def labels_and_dims(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """The labels and numbers of classes of sparse data, which some datasets only know once an epoch has begun."""
        found: dict[str, list[str]] = {}
        dims: dict[str, int] = {}
        labels = dict(self._dataset.labels or {})
        for key, dense in self._dense.items():
            dim = int(self._dataset.get_data_dim(key) or 0)
            names: Sequence[Any] = labels.get(key) or ()
            if not dense and dim > 1:  # RETURNN gives 1 if it does not know
                dims[key] = dim
            if len(names) == dim and list(names) != ["dummy-label"]:
                found[key] = [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in names]
        return found, dims

    def streams(self, arrays: Mapping[str, Array]) -> dict[str, Stream]:
        """What the arrays of every sequence hold, given those of one."""
        labels, dims = self.labels_and_dims()
        result = {}
        for key, array in arrays.items():
            sparse = array.ndim == 1 and array.dtype.kind in "iu" and not self._dense[key]
            dim = dims.get(key, 1) if sparse else int(numpy.prod(array.shape[1:], dtype=numpy.int64))
            result[key] = Stream(array.dtype, array.shape[1:], dim, sparse, tuple(labels.get(key, ())))
        return result

    def item(self, number: int) -> Item | None:
        """The epoch's sequence of this number, in ascending order only; None at its end. Raises: DataError."""
        return self._asked(f"that can be read at sequence {number}", partial(self._item, number))  # type: ignore[no-any-return]

    def order(self) -> Array | None:
        """The epoch's sequences as indices in the whole corpus, if RETURNN tells them before they are read."""
        try:
            return numpy.asarray(self._dataset.get_current_seq_order(), dtype=numpy.int64)
        except Exception:  # as in num_sequences
            return None

    def all_tags(self) -> Array | None:
        """The tags of the whole corpus as UTF-8, if RETURNN tells them."""
        try:
            return numpy.array([str(tag).encode("utf-8") for tag in self._dataset.get_all_tags()], dtype=bytes)
        except Exception:
            return None

    def _keys(self) -> list[str]:
        return sorted(self._asked("that tells its data keys", self._dataset.get_data_keys))

    def _item(self, number: int) -> Item | None:
        if not self._dataset.is_less_than_num_seqs(number):
            return None
        self._dataset.load_seqs(number, number + 1)
        arrays = {key: _frames(self._dataset.get_data(number, key), dense) for key, dense in self._dense.items()}
        return str(self._dataset.get_tag(number)), arrays

    def _asked(self, what: str, question: Callable[[], Any]) -> Any:
        """Call RETURNN. It raises any kind of exception for bad data, often an assertion without a message. Raises: DataError."""
        try:
            return question()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            raise DataError(
                f"{self.name}: expected a dataset {what}, got {said} in {place.filename}, line {place.lineno}"
            ) from error


def in_one_process(value: Any) -> Any:
    """A dataset dict of RETURNN without the processes that it would start: it is read in a process of its own anyway.

    MultiProcDataset is its inner dataset, and what RETURNN would deal to ranks stays together: the sequences are the same.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(in_one_process, value)) if type(value) in (list, tuple) else value
    if not isinstance(value, Mapping):
        return value
    made = {name: in_one_process(inside) for name, inside in value.items()}
    if made.get("class") == "MultiProcDataset" and isinstance(made.get("dataset"), Mapping):
        return inner_of_multi_proc(made)
    if made.get("class") == "PostprocessingDataset":
        made.pop("num_workers", None)
    if made.get("class") == "DistributeFilesDataset":
        made.pop("distrib_shard_files", None)
        if callable(made.get("get_sub_epoch_dataset")):
            of_files = made["get_sub_epoch_dataset"]
            made["get_sub_epoch_dataset"] = lambda files: in_one_process(of_files(files))
        if _takes("returnn.datasets.distrib_files", "DistributeFilesDataset", "use_worker_proc"):
            made |= {"use_worker_proc": False, "preload_next_n_sub_epochs": 0}
    return made


def inner_of_multi_proc(options: Mapping[str, Any]) -> dict[str, Any]:
    """The dataset inside a MultiProcDataset, with the keys that RETURNN passes on to it."""
    own = ("class", "dataset", "num_workers", "buffer_size", "sharding_method")
    return {**{name: value for name, value in options.items() if name not in own}, **options["dataset"]}


def _takes(module: str, name: str, argument: str) -> bool:
    """Whether a class of the installed RETURNN has an argument: not all versions do."""
    return argument in inspect.signature(getattr(importlib.import_module(module), name).__init__).parameters


def _is_installed() -> bool:
    if "returnn" in sys.modules:
        return sys.modules["returnn"] is not None
    return importlib.util.find_spec("returnn") is not None


def _returnn() -> Callable[[dict[str, Any]], Any]:
    """RETURNN's function that opens datasets, after setting up the global config and the log that it needs. Raises: DataError."""
    try:
        from returnn.config import Config, get_global_config, set_global_config
        from returnn.datasets.basic import init_dataset
        from returnn.log import log
        from tree import map_structure  # noqa: F401  # of the package dm-tree, which RETURNN needs but does not declare
    except ImportError as error:
        raise DataError(f"ReturnnDataset: expected the packages returnn and dm-tree, got: {error} {INSTALL}") from None
    if get_global_config(raise_exception=False) is None:
        set_global_config(Config())
    if not log.initialized:
        log.initialize(logs=[logging.StreamHandler()], verbosity=[2], propagate=True)  # stderr; the default is stdout
    return init_dataset  # type: ignore[no-any-return]  # RETURNN is not typed here


def _frames(values: Any, is_dense: bool) -> Array:
    """The array as stored: frames on the first axis, and a feature axis for dense integers.

    Without a feature axis every reader, including RETURNN, would take integers for class indices.
    """
    array = numpy.asarray(values)
    if array.ndim == 0:  # one number or text for the sequence
        array = array.reshape(1)
    if is_dense and array.ndim == 1 and array.dtype.kind in "iu":
        array = array[:, None]
    return array
