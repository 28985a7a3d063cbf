"""Datasets of RETURNN, read by RETURNN itself, as a source of sequences to convert.

RETURNN's datasets yield sequences one after the other, and many do not know their number or lengths in advance. So they are
converted once with hvdtrain dump; training reads the HDF file.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy

from hvdtrain.data.dataset import Item, SequenceSource
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError


class ReturnnDataset(SequenceSource):
    """A dataset that the installed RETURNN opens and reads.

    Args:
        dataset: the dict of a RETURNN config. RETURNN handles its order keys (seq_ordering, partition_epoch, ...) and its files.

    Raises:
        DataError: RETURNN is not installed, or cannot open the dataset.
    """

    def __init__(self, dataset: Mapping[str, Any]) -> None:
        if not isinstance(dataset, Mapping) or "class" not in dataset:
            raise ConfigError(
                [f"dataset: expected a dataset dict of RETURNN with 'class', got {dataset!r} in the ReturnnDataset"]
            )
        self._name = f"{dataset['class']} of RETURNN"
        init_dataset = _returnn()
        self._dataset = self._asked("that it can open", lambda: init_dataset(dict(dataset)))
        self._epoch = 1
        self.labels: dict[str, list[str]] = {}
        self.dims: dict[str, int] = {}

    def begin_epoch(self, epoch: int) -> int | None:
        self._epoch = epoch
        self._init_epoch()
        try:
            total: int | None = int(self._dataset.num_seqs)
        except Exception:  # how RETURNN says that it does not know; the class of the exception depends on the dataset
            total = None
        self._describe()
        return total

    def read(self, start: int, stop: int | None) -> Iterator[Item]:
        """RETURNN reads an epoch from its beginning: the sequences before `start` are made and dropped."""
        self._init_epoch()
        keys = self._keys()
        axes = {key: not self._dataset.is_data_sparse(key) for key in keys}
        for number in count() if stop is None else range(stop):
            item = self._asked(f"that can be read at sequence {number}", partial(self._item, number, axes))
            if item is None:
                return
            if number >= start:
                yield item

    def _init_epoch(self) -> None:
        self._asked(f"whose epoch {self._epoch} can begin", lambda: self._dataset.init_seq_order(self._epoch))

    def _describe(self) -> None:
        """Set the dimensions and labels, which some of RETURNN's datasets only know once an epoch has begun."""
        labels = dict(self._dataset.labels or {})
        for key in self._keys():
            dim = int(self._dataset.get_data_dim(key) or 0)
            names: Sequence[Any] = labels.get(key) or ()
            if self._dataset.is_data_sparse(key) and dim > 1:  # RETURNN gives 1 if it does not know
                self.dims[key] = dim
            if len(names) == dim and list(names) != ["dummy-label"]:
                self.labels[key] = [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in names]

    def _keys(self) -> list[str]:
        return sorted(self._asked("that tells its data keys", self._dataset.get_data_keys))

    def _item(self, number: int, is_dense: Mapping[str, bool]) -> Item | None:
        if not self._dataset.is_less_than_num_seqs(number):
            return None
        self._dataset.load_seqs(number, number + 1)
        arrays = {key: _frames(self._dataset.get_data(number, key), dense) for key, dense in is_dense.items()}
        return str(self._dataset.get_tag(number)), arrays

    def _asked(self, what: str, question: Callable[[], Any]) -> Any:
        """Call RETURNN. It raises any kind of exception for bad data, often an assertion without a message. Raises: DataError."""
        try:
            return question()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            raise DataError(
                f"{self._name}: expected a dataset {what}, got {said} in {place.filename}, line {place.lineno}"
            ) from error


def _returnn() -> Callable[[dict[str, Any]], Any]:
    """RETURNN's function that opens datasets, after setting up the global config and the log that it needs. Raises: DataError."""
    try:
        from returnn.config import Config, get_global_config, set_global_config
        from returnn.datasets.basic import init_dataset
        from returnn.log import log
        from tree import map_structure  # noqa: F401  # of the package dm-tree, which RETURNN needs but does not declare
    except ImportError as error:
        raise DataError(
            f"ReturnnDataset: expected the packages returnn and dm-tree, got: {error} (pip install hvdtrain[returnn])"
        ) from None
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
