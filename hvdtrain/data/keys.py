"""The keys of a config about data: those at its top level, the base of those in a dataset's dict, and a checked dict.

Declarations only: `data/sources.py` checks and opens datasets, which needs numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, Self

from hvdtrain.config.keys import REQUIRED, Rule, Section, key, not_negative
from hvdtrain.data.plan.order_keys import OrderKeys, is_order
from hvdtrain.errors import Problem, problem


@dataclass(frozen=True, kw_only=True)
class DataKeys(Section):
    """The data to train and evaluate on: dicts with a class, HDF files, or functions that return one of these."""

    train: Any = key(REQUIRED, "the training data: a dataset dict, or HDF files (not for the tasks forward and search)")
    batching: str | Callable[..., str] | None = key(
        None,
        "seq_ordering of train if its dict does not set it",
        Rule("an order as in seq_ordering", is_order),
        signature="*, epoch, **_",
    )
    dev: Any = key(None, "evaluated after every epoch; seq_ordering is sorted unless the dict says otherwise")
    eval: Any = key(None, "evaluated after every epoch, like dev")
    skip_broken: int = key(
        0,
        "the number of sequences of each dataset that training and evaluation leave out if they cannot be read (a missing or "
        "truncated file, numbers that are not finite, an item that is not like the first one, hvdtrain.BrokenSequence in your "
        "own dataset); with more, training ends",
        not_negative,
    )
    eval_datasets: dict[str, Any] = key({}, "further datasets by name, evaluated after every epoch")
    extern_data: Any = key(
        None,
        "what the data must look like: by data key a dict with dim, and sparse, dtype (numpy's name) and shape (None is the time "
        "axis) where they apply; every batch is compared with it before the model sees it, except for keys that it leaves out",
    )
    forward_data: Any = key(None, "task forward: the data; None: eval")
    search_data: Any = key(None, "task search: the data; None: forward_data, or eval")

    @property
    def may_limit_batches(self) -> bool:
        """Whether a dataset is a DataLoader, which has a size of batches, or a function that may return one, or has a function as
        its order, which may return batches."""
        datasets = [self.train, self.dev, self.eval, *self.eval_datasets.values(), self.forward_data, self.search_data]
        return any(map(_may_limit_batches, datasets))


def _may_limit_batches(value: Any) -> bool:
    if isinstance(value, Mapping):
        inside = value.get("datasets") or ()
        if callable(value.get("seq_ordering")):
            return True
        return any(map(_may_limit_batches, [value.get("class"), *(inside.values() if isinstance(inside, Mapping) else inside)]))
    return hasattr(value, "batch_sampler") or isinstance(value, FunctionType)


class DatasetKeys:
    """The base of the keys of every kind of dataset: the members that opening a dataset relies on.

    The keys `dataset` and `datasets` hold the datasets inside it.
    """

    opener: ClassVar[str]
    """'module:function' that opens it, given its config key (for messages), its keys, and the open datasets inside it by name;
    imported when a dataset is opened."""
    scans: ClassVar[bool] = False
    """Whether the opener also gets the job's `Scanning`, as lengths may have to be found by reading."""
    keeps_order: ClassVar[bool] = False
    """Whether its sequences are those of the dataset inside, in the same order, which that may have fixed, or mixed."""
    joins: ClassVar[bool] = False
    """Whether its sequences are those of the datasets inside, one dataset after the other, which may be items for `collate`."""

    @property
    def ordered_by(self) -> str | None:
        """The name of the inner dataset whose order keys apply to the whole; None: no inner dataset's do."""
        return None

    def problems(self) -> list[Problem]:
        """Conflicts among the keys."""
        return []

    def data_files(self) -> tuple[str, ...]:
        """The files that the dataset reads itself, without those of datasets inside it."""
        return ()

    def files_to_copy(self) -> tuple[str, ...]:
        """Those of `data_files` that may be read from a copy in `cache_dir`."""
        return self.data_files()

    def with_copies(self, copies: Mapping[str, str]) -> Self:
        """The keys with files replaced by their copies, given by name of the file."""
        return self

    def num_readers(self) -> int:
        """The number of processes that read the datasets inside, each with a separate cache."""
        return 1


@dataclass(frozen=True, kw_only=True)
class FileDatasetKeys(DatasetKeys):
    """The base of the keys of kinds that read files."""

    files: str | list[str] = key(REQUIRED, "the HDF file, or a list of files that are read as one dataset")

    def problems(self) -> list[Problem]:
        return [] if self.files else problem("missing", "files: expected at least one file, got none")

    def data_files(self) -> tuple[str, ...]:
        return (self.files,) if isinstance(self.files, str) else tuple(self.files)

    def with_copies(self, copies: Mapping[str, str]) -> Self:
        return replace(self, files=[copies.get(path, path) for path in self.data_files()])


@dataclass(frozen=True)
class DatasetSpec:
    """A checked dataset dict: how to open it, and how its sequences are ordered.

    Attributes:
        name: the config key ('train', 'dev', ..., 'train.datasets.text' inside another dataset).
        open: opens the dataset or source, with an OpeningContext as optional argument. Raises: DataError.
        files: the data files that it reads itself.
        copied: the files among them that may be read from a copy.
        datasets: the datasets inside it.
        maker: returns the config's class or function, bound to the other entries of the dict; None: it is not such a dict.
        cache_byte_size: the bytes of it that a rank may cache instead of `cache_size`, if its dict sets that.
        is_known: whether all functions of the config that return it, or a dataset inside it, have been called.
    """

    name: str
    open: Callable[..., Any]
    order: OrderKeys
    files: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    datasets: tuple[DatasetSpec, ...] = ()
    cache_byte_size: int | None = None
    maker: Callable[[], partial[Any]] | None = None
    is_known: bool = True

    def all(self) -> Iterator[DatasetSpec]:
        """This dataset and all datasets inside it."""
        yield self
        for dataset in self.datasets:
            yield from dataset.all()

    def repeatable(self, opened: Any) -> Any:
        """The object that `open` returned; for an iterator, which has one epoch only, the config's function that made it."""
        return self.maker() if self.maker is not None and isinstance(opened, Iterator) else opened
