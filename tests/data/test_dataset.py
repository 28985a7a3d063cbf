"""The contract of a dataset: defaults of the base class, and classes of a user's that do not derive from it."""

import numpy
from launching import ROOT

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.foreign import ForeignDataset, as_dataset
from hvdtrain.data.types import Stream


class Plain:
    """What a user's class needs, and nothing else."""

    def __init__(self) -> None:
        self.streams = {"data": Stream(numpy.dtype("int32"), (), 5, True)}
        self.lengths = {"data": numpy.array([2, 1, 3], dtype=numpy.int32)}
        self.num_sequences = 3

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        return {"data": numpy.full(index + 1, index, dtype=numpy.int32)}

    def tags(self, indices: list[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]


def test_a_foreign_dataset_gets_the_defaults() -> None:
    dataset = as_dataset(Plain())
    assert isinstance(dataset, ForeignDataset)
    assert isinstance(dataset, Dataset)
    assert [one["data"].tolist() for one in dataset.sequences([2, 0])] == [[2, 2, 2], [0]]
    batch = dataset.batch(numpy.array([0, 2]))
    assert batch.data["data"].seq_lens.tolist() == [1, 3]
    assert batch.data["data"].values.tolist() == [[0, 0, 0], [2, 2, 2]]
    assert dataset.at_epoch(3).tags([1]) == ["seq-1"]
    assert dataset.selected(1) is None
    assert dataset.how_read() == ""
    dataset.close()


def test_members_of_1_0_0_keep_their_meaning() -> None:
    """Under their earlier names, in a class that derives from Dataset and in one that does not."""

    class Derived(Plain, Dataset):
        num_sequences = 3
        varies = True
        mapped = frozenset({"data"})

        def drawn(self, full_epoch: int) -> numpy.ndarray:
            return numpy.array([2, 0])

    class Foreign(Plain):
        mapped = frozenset({"data"})

        def drawn(self, full_epoch: int) -> numpy.ndarray:
            return numpy.array([2, 0])

    Derived.num_sequences = 3
    for dataset in (Derived(), as_dataset(Foreign())):
        assert dataset is not None
        assert dataset.is_stochastic
        assert dataset.memory_mapped == {"data"}
        assert dataset.selected(1).tolist() == [2, 0]


def test_what_is_no_dataset_is_none() -> None:
    assert as_dataset(iter([])) is None


def test_nothing_else_asks_an_object_what_it_has() -> None:
    places = [path for path in (ROOT / "hvdtrain" / "data").rglob("*.py") if "hasattr(" in path.read_text(encoding="utf-8")]
    wraps = {"foreign.py", "keys.py", "sources.py"}  # a user's objects
    of_packages = {"item_form.py", "order_keys.py"}  # values and libraries
    assert {path.name for path in places} - of_packages == wraps
