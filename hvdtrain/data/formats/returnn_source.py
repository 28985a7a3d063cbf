"""Datasets of RETURNN, read by RETURNN itself, as a source of sequences to convert.

Its datasets hand out sequences one after the other, and many do not know beforehand how long they are, or how many. So they
are converted once with hvdtrain dump, and trained on from the HDF file.
"""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import numpy

from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError

Item = tuple[str, dict[str, Array]]


class ReturnnDataset:
    """A dataset that the installed RETURNN opens and reads.

    Args:
        dataset: the dict as it stands in a RETURNN config. Its order keys (seq_ordering, partition_epoch, ...) are RETURNN's
            business, and so are the files it names.

    Attributes:
        labels: the classes' names, by data key, where RETURNN knows them.
        dims: how many classes there are, by data key, of sparse data.

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
        self.labels: dict[str, list[str]] = {}
        self.dims: dict[str, int] = {}

    def of_epoch(self, epoch: int) -> tuple[int | None, Callable[[int, int | None], Iterator[Item]]]:
        """How many sequences an epoch has, where that is known, and what reads those from one number up to another.

        RETURNN goes through an epoch from its beginning: sequences before the first one wanted are made and passed over.
        """
        self._asked(f"whose epoch {epoch} can begin", lambda: self._dataset.init_seq_order(epoch))
        try:
            total: int | None = int(self._dataset.num_seqs)
        except Exception:  # RETURNN's way of saying that it does not know; which exception is up to the class
            total = None
        self._describe()
        return total, lambda start, stop: self._read(epoch, start, stop)

    def _describe(self) -> None:
        """The dimensions and labels: some of RETURNN's datasets know their data keys only when an epoch has begun."""
        labels = dict(getattr(self._dataset, "labels", None) or {})
        for key in self._keys():
            dim = int(self._dataset.get_data_dim(key) or 0)
            names: Sequence[Any] = labels.get(key) or ()
            if self._dataset.is_data_sparse(key) and dim > 1:  # RETURNN writes 1 where it does not know
                self.dims[key] = dim
            if len(names) == dim and list(names) != ["dummy-label"]:
                self.labels[key] = [name.decode("utf-8") if isinstance(name, bytes) else str(name) for name in names]

    def _keys(self) -> list[str]:
        return sorted(self._asked("that tells its data keys", self._dataset.get_data_keys))

    def _read(self, epoch: int, start: int, stop: int | None) -> Iterator[Item]:
        self._asked(f"whose epoch {epoch} can begin", lambda: self._dataset.init_seq_order(epoch))  # from the beginning again
        keys = self._keys()
        axes = {key: not self._dataset.is_data_sparse(key) for key in keys}
        for number in count() if stop is None else range(stop):
            item = self._asked(f"that can be read at sequence {number}", partial(self._item, number, axes))
            if item is None:
                return
            if number >= start:
                yield item

    def _item(self, number: int, is_dense: Mapping[str, bool]) -> Item | None:
        if not self._dataset.is_less_than_num_seqs(number):
            return None
        self._dataset.load_seqs(number, number + 1)
        arrays = {key: _frames(self._dataset.get_data(number, key), dense) for key, dense in is_dense.items()}
        return str(self._dataset.get_tag(number)), arrays

    def _asked(self, what: str, question: Callable[[], Any]) -> Any:
        """RETURNN's answer. It tells what is wrong by any exception, most of all by assertions without a word."""
        try:
            return question()
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            said = f"{type(error).__name__}{f': {error}' if str(error) else ''}"
            raise DataError(
                f"{self._name}: expected a dataset {what}, got {said} in {place.filename}, line {place.lineno}"
            ) from error


def _returnn() -> Callable[[dict[str, Any]], Any]:
    """RETURNN's function that opens datasets, with what it wants to find: a config of the whole process, and a log."""
    try:
        from returnn.config import Config, get_global_config, set_global_config
        from returnn.datasets.basic import init_dataset
        from returnn.log import log
        from tree import map_structure  # noqa: F401  # of the package dm-tree, which RETURNN needs but does not ask for
    except ImportError as error:
        raise DataError(
            f"ReturnnDataset: expected the packages returnn and dm-tree, got: {error} (pip install hvdtrain[returnn])"
        ) from None
    if get_global_config(raise_exception=False) is None:
        set_global_config(Config())
    if not log.initialized:
        log.initialize(logs=[logging.StreamHandler()], verbosity=[2], propagate=True)  # stderr; else it takes stdout
    return init_dataset  # type: ignore[no-any-return]  # RETURNN is not typed here


def _frames(values: Any, is_dense: bool) -> Array:
    """The array as it is stored: frames on the first axis; whole numbers of dense data with a feature axis.

    Without one they would be class indices to every reader, RETURNN among them.
    """
    array = numpy.asarray(values)
    if array.ndim == 0:  # one number or text for the sequence
        array = array.reshape(1)
    if is_dense and array.ndim == 1 and array.dtype.kind in "iu":
        array = array[:, None]
    return array
