"""RETURNN's datasets, opened and read by the installed RETURNN, in this process or in a dedicated one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import math
import sys
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy

from hvdtrain.data.dataset import Item
from hvdtrain.data.types import Array, Stream
from hvdtrain.errors import DataError, raised_text
from hvdtrain.plugins.returnn.dataset_dicts import inner_of_multi_proc
from hvdtrain.plugins.returnn.thread_errors import ThreadErrors, ThreadFailed
from hvdtrain.plugins.streams.reading import END, Question, StreamReading

INSTALL = "(pip install returnn dm-tree rapidfuzz soundfile)"

OF_LAUNCHES = ("torch_distributed", "use_horovod")
"""Keys that would make RETURNN's datasets use a different order on every rank."""


class OpenedDataset:
    """A dataset that the installed RETURNN has opened. Call `begin` first.

    Raises:
        DataError: RETURNN is not installed, or cannot open the dataset.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.name = f"{options['class']} of RETURNN"
        init_dataset = _returnn()
        self._dataset = self._call("that it can open", lambda: init_dataset(dict(options)))
        self._dense: dict[str, bool] = {}
        self._in_epoch = False

    def begin(self, epoch: int) -> None:
        """Begin an epoch (counted from 1), possibly again. Raises: DataError."""
        self._finish()
        self._call(f"whose epoch {epoch} can begin", lambda: self._dataset.init_seq_order(epoch))
        self._in_epoch = True
        keys = self._call("that knows its data keys", self._dataset.get_data_keys)
        self._dense = {key: self._is_dense(key) for key in sorted(keys)}

    def num_sequences(self) -> int | None:
        """The number of sequences of the epoch; None if RETURNN does not know it."""
        try:
            return int(self._dataset.num_seqs)
        except Exception:  # RETURNN does not know it; the class of the exception depends on the dataset
            return None

    def is_endless(self) -> bool:
        """Whether an epoch is known to have no end."""
        # AnythingDataset does not report that it is endless: inside a MetaDataset, another dataset sets the number of sequences.
        return type(self._dataset).__name__ == "AnythingDataset" or self._dataset.estimated_num_seqs == math.inf

    def labels_and_dims(self) -> tuple[dict[str, list[str]], dict[str, int]]:
        """The labels and numbers of classes of sparse data, which some datasets provide only once an epoch has begun."""
        decoded: dict[str, list[str]] = {}
        dims: dict[str, int] = {}
        labels = dict(self._dataset.labels or {})
        for key, dense in self._dense.items():
            names: Sequence[Any] = labels.get(key) or ()
            if dense and not names:
                continue
            dim = int(self._dataset.get_data_dim(key) or 0)
            if not dense and dim > 1:  # RETURNN returns 1 if it does not know
                dims[key] = dim
            if len(names) == dim and list(names) != ["dummy-label"]:
                # A label may be a single byte of a character.
                decoded[key] = [
                    name.decode("utf-8", "backslashreplace") if isinstance(name, bytes) else str(name) for name in names
                ]
        return decoded, dims

    def streams(self, arrays: Mapping[str, Array]) -> dict[str, Stream]:
        """The streams, inferred from the arrays of one sequence."""
        labels, dims = self.labels_and_dims()
        result = {}
        for key, array in arrays.items():
            sparse = array.ndim == 1 and array.dtype.kind in "iu" and not self._dense[key]
            dim = dims.get(key, 1) if sparse else int(numpy.prod(array.shape[1:], dtype=numpy.int64))
            result[key] = Stream(array.dtype, array.shape[1:], dim, sparse, tuple(labels.get(key, ())))
        return result

    def item(self, number: int) -> Item | None:
        """The epoch's sequence with this number; None after the last one. Numbers must ascend. Raises: DataError."""
        item: Item | None = self._call(f"that can be read at sequence {number}", partial(self._item, number))
        if item is None:
            self._finish()
        return item

    def order(self) -> Array | None:
        """The epoch's sequences as indices in the whole corpus, if RETURNN knows them before they are read."""
        dataset = self._dataset
        try:
            return numpy.asarray(dataset.get_current_seq_order(), dtype=numpy.int64)
        except Exception:  # as in num_sequences
            pass
        try:
            if dataset.have_corpus_seq_idx():
                return numpy.array([dataset.get_corpus_seq_idx(number) for number in range(dataset.num_seqs)], dtype=numpy.int64)
        except Exception:
            pass
        return None

    def all_tags(self) -> Array | None:
        """The tags of the whole corpus as UTF-8, if RETURNN knows them."""
        try:
            return numpy.array([str(tag).encode("utf-8") for tag in self._dataset.get_all_tags()], dtype=bytes)
        except Exception:
            return None

    def _finish(self) -> None:
        """End the epoch. Some datasets read ahead and would continue from there; some wait for a thread that may fail."""
        if self._in_epoch:
            self._in_epoch = False
            self._call("whose epoch can end", self._dataset.finish_epoch)

    def _is_dense(self, key: str) -> bool:
        """Whether a data key is dense. Some datasets describe texts by a dict, on which RETURNN's method raises an exception."""
        described = (self._dataset.num_outputs or {}).get(key)
        return not (described.get("sparse", False) if isinstance(described, dict) else self._dataset.is_data_sparse(key))

    def _item(self, number: int) -> Item | None:
        if not self._dataset.is_less_than_num_seqs(number):
            return None
        self._dataset.load_seqs(number, number + 1)
        arrays = {key: _frames(self._dataset.get_data(number, key), dense) for key, dense in self._dense.items()}
        return str(self._dataset.get_tag(number)), arrays

    def _call(self, rule: str, function: Callable[[], Any]) -> Any:
        """Call RETURNN, which may raise any exception for bad data, often an assertion without a message. Raises: DataError."""
        try:
            return function()
        except Exception as error:
            raise DataError(f"{self.name}: expected a dataset {rule}, got {raised_text(error)}") from error


def without_processes(value: Any) -> Any:
    """A dataset dict of RETURNN without the processes that it would start, as a dedicated process reads it anyway.

    MultiProcDataset becomes its inner dataset, and RETURNN does not split the data among ranks: the sequences are the same.
    """
    if isinstance(value, (list, tuple)):
        return type(value)(map(without_processes, value)) if type(value) in (list, tuple) else value
    if not isinstance(value, Mapping):
        return value
    options = {name: without_processes(inside) for name, inside in value.items()}
    if options.get("class") == "MultiProcDataset" and isinstance(options.get("dataset"), Mapping):
        return inner_of_multi_proc(options)
    if options.get("class") == "PostprocessingDataset":
        options.pop("num_workers", None)
    if options.get("class") == "VariableDataset" and callable(options.get("get_dataset")):
        of_epoch = options["get_dataset"]
        options["get_dataset"] = lambda **options: without_processes(of_epoch(**options))
    if options.get("class") == "DistributeFilesDataset":
        options.pop("distrib_shard_files", None)
        if callable(options.get("get_sub_epoch_dataset")):
            of_files = options["get_sub_epoch_dataset"]
            options["get_sub_epoch_dataset"] = lambda files: without_processes(of_files(files))
        if _has_argument("returnn.datasets.distrib_files", "DistributeFilesDataset", "use_worker_proc"):
            options |= {"use_worker_proc": False, "preload_next_n_sub_epochs": 0}
    return options


def num_sub_epochs(value: Any) -> int:
    """After how many epochs a dataset dict, with all those inside it, is back at its first sequences.

    >>> num_sub_epochs({"dataset": {"partition_epoch": 3}, "partition_epoch": 2})
    6
    """
    inside: Iterable[Any] = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    number = value.get("partition_epoch") if isinstance(value, Mapping) else None
    return int(number or 1) * math.prod(map(num_sub_epochs, inside))


def _has_argument(module: str, name: str, argument: str) -> bool:
    return argument in inspect.signature(getattr(importlib.import_module(module), name).__init__).parameters


def is_installed() -> bool:
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
    config = Config()
    present = get_global_config(raise_exception=False)
    if present is not None:
        config.dict = dict(present.dict)
        config.typed_dict = {name: value for name, value in present.typed_dict.items() if name not in OF_LAUNCHES}
    set_global_config(config)
    if not log.initialized:
        log.initialize(logs=[logging.StreamHandler()], verbosity=[2], propagate=True)  # stderr; the default is stdout
    return init_dataset  # type: ignore[no-any-return]  # RETURNN is not typed here


def _frames(values: Any, is_dense: bool) -> Array:
    """The array as stored: frames on the first axis, and a feature axis for dense integers.

    Every reader, including RETURNN, takes integers without a feature axis for class indices.
    """
    array = numpy.asarray(values)
    if array.ndim == 0:  # one number or text for the sequence
        array = array.reshape(1)
    if is_dense and array.ndim == 1 and array.dtype.kind in "iu":
        array = array[:, None]
    return array


class Reading(StreamReading):
    """A dataset of RETURNN in its reading process, opened at the first question.

    Args:
        where: the config key, for messages.
        can_skip: as in `StreamReading`.
    """

    def __init__(self, where: str, options: Mapping[str, Any], can_skip: bool) -> None:
        super().__init__()
        self.where = where
        self.can_skip = can_skip
        self.num_sub_epochs = num_sub_epochs(options)
        self.name = f"{options['class']} of RETURNN"
        self._options = options
        self._opened: OpenedDataset | None = None
        self._streams: dict[str, Stream] = {}
        self._thread_errors = ThreadErrors()

    def __call__(self, question: Question) -> Any:
        try:
            with self._thread_errors.reraise():
                return super().__call__(question)
        except ThreadFailed as failed:
            error = failed.__cause__ or failed
            raise DataError(f"{self.name}: expected a dataset whose threads can read it, got {raised_text(error)}") from error

    def begin(self, epoch: int, anew: bool) -> None:
        if self._opened is None:
            self._thread_errors.watch()
            self._opened = OpenedDataset(without_processes(self._options))
        self._opened.begin(epoch)
        if self._opened.is_endless():
            raise DataError(
                f"{self._opened.name}: expected a dataset whose epochs end, got one without end (set num_seqs in its dict; an "
                "AnythingDataset belongs in a MetaDataset, whose seq_order_control_dataset determines the sequences)"
            )

    def take(self, number: int) -> Any:
        item = self._dataset.item(number)
        return END if item is None else item

    def sequence(self, number: int, item: Any) -> Item:
        arrays = {key: _texts_as_objects(values) for key, values in item[1].items()}
        self._streams = self._streams or self._dataset.streams(arrays)
        return item[0], arrays

    def streams(self) -> Mapping[str, Stream]:
        return self._streams

    def forget(self) -> None:
        self._opened = None

    def total(self) -> int | None:
        return self._dataset.num_sequences()

    def order(self, epoch: int) -> tuple[Array, int] | None:
        self._begin(epoch)
        order = self._dataset.order()
        tags = self._dataset.all_tags()
        return None if order is None or tags is None else (order, zlib.crc32(tags.tobytes()))

    def all_tags(self) -> Array | None:
        return self._dataset.all_tags()

    @property
    def _dataset(self) -> OpenedDataset:
        if self._opened is None:
            raise RuntimeError("no epoch has begun")
        return self._opened


def _texts_as_objects(values: Array) -> Array:
    """The values, with texts as Python objects like those of an HDF file."""
    return values.astype(object) if values.dtype.kind in "US" else values
