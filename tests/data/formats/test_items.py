"""Map-style datasets: lists, torch datasets, and whatever else has a length and gives item i."""

import re
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy
import opened_data
import pandas
import pyarrow
import pytest
import torch
from documented import blocks_of, section

from hvdtrain.config.source import load
from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, DatasetPart, Scanning
from hvdtrain.data.formats import items as item_counting
from hvdtrain.data.formats.items import ItemsDataset
from hvdtrain.errors import BrokenSequence, ConfigError, DataError
from hvdtrain.plugins.lengths import find as counting
from hvdtrain.plugins.same_data.identity import changes, identify


def opened(value: Any, processes: int = 1) -> Dataset:
    return opened_data.opened(value, scanning=Scanning(processes=processes))


FRAMES = numpy.arange(6, dtype=numpy.float32).reshape(3, 2)
Pair = namedtuple("Pair", ["data", "classes"])


@dataclass
class Utterance:
    data: Any
    classes: Any


@pytest.mark.parametrize(
    "item",
    [
        {"data": FRAMES, "classes": 2},
        {"data": torch.tensor(FRAMES), "classes": torch.tensor(2)},
        (FRAMES, numpy.array([2])),
        (FRAMES.astype(">f4"), numpy.array([2], ">i8")),
        (FRAMES.tolist(), 2),
        Pair(FRAMES, [2]),
        Utterance(FRAMES, numpy.int64(2)),
        ("seq-0", {"data": FRAMES, "classes": 2}),
        {"seq_tag": "seq-0", "data": FRAMES, "classes": 2},
    ],
    ids=lambda item: type(item).__name__,
)
def test_an_item_may_have_many_forms(item: Any) -> None:
    dataset = opened([item])
    assert dataset.num_sequences == 1
    assert dataset.streams["data"].shape == (2,)
    assert dataset.streams["data"].dtype == numpy.float32
    assert not dataset.streams["data"].sparse
    assert dataset.streams["classes"].sparse
    assert dataset.streams["classes"].dim == 3
    assert dataset.streams["classes"].dtype == numpy.int64
    batch = dataset.batch(numpy.array([0]))
    assert batch.data["data"].values.tolist() == [FRAMES.tolist()]
    assert batch.data["classes"].values.tolist() == [[2]]
    assert dataset.tags([0]) == ["seq-0"]


def test_an_array_is_the_data_and_the_rest_of_the_types_are_kept() -> None:
    arrays = [numpy.zeros((length, 4, 3), numpy.float16) for length in (2, 5, 0)]
    dataset = opened(arrays)
    assert dataset.lengths["data"].tolist() == [2, 5, 0]
    assert dataset.streams["data"].shape == (4, 3)
    assert dataset.streams["data"].dtype == numpy.float16
    assert dataset.batch(numpy.array([2, 0])).data["data"].values.shape == (2, 2, 4, 3)


class Words(torch.utils.data.Dataset):
    """Class indices of random lengths; counts how often items are read."""

    def __init__(self, size: int = 1000) -> None:
        generator = numpy.random.default_rng(0)
        self.words = [generator.integers(0, 30, length) for length in generator.integers(0, 9, size)]
        self.read = 0
        self.names = "word"

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read += 1
        return {"data": torch.tensor(self.words[index]), "rest": index % 3, "seq_tag": f"{self.names} {index}"}


class Labelled(Words):
    """With fewer names than classes."""

    labels = {"rest": ["a", "b"]}


class Measured(Words):
    """With lengths and the number of classes."""

    dims = {"data": 40}
    labels = {"rest": ["a", "b", "c", "d"]}

    def lengths(self) -> list[int]:
        return [len(word) for word in self.words]


def test_lengths_are_counted_by_one_process_or_several(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Words()
    expected = [len(word) for word in words.words]
    alone = opened({"class": Words})
    monkeypatch.setattr(counting, "SECONDS_ALONE", -1.0)
    monkeypatch.setattr(counting, "ROWS_AT_ONCE", 7)
    together = opened(words, processes=2)
    assert words.read < 20, "the others read the rest"
    for dataset in (alone, together):
        assert dataset.lengths["data"].tolist() == expected
        assert dataset.lengths["rest"].tolist() == [1] * 1000
        assert dataset.streams["data"].dim == 30
        assert dataset.tags([3]) == ["word 3"]


class Slow(Words):
    """As if reading took long. What it reads of a list is no attribute that would tell it apart."""

    def __init__(self, words: list[Any], read: list[int]) -> None:
        self.words = words
        self.indices = read

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.indices.append(index)
        return {"data": torch.tensor(self.words[index]), "rest": index % 3}


def test_lengths_of_slow_items_are_counted_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By one of several ranks; the others, and later runs, read some items to see that they are the same."""
    monkeypatch.setattr(counting, "SECONDS_ALONE", -1.0)
    monkeypatch.setattr("hvdtrain.plugins.lengths.index.HEAD_START", 0.0)
    words = Words().words

    def counted(words: list[Any], folder: Path | None = tmp_path) -> tuple[Dataset, int]:
        read: list[int] = []
        notes: list[str] = []
        dataset = ItemsDataset("train", Slow(words, read), Scanning(folder, note=notes.append))
        assert dataset.lengths["data"].tolist() == [len(word) for word in words]
        assert dataset.streams["data"].dim == 30
        assert all("cannot be kept" in note for note in notes)
        assert len(notes) == (folder is not None and not folder.is_dir())
        return dataset, len(read)

    with ThreadPoolExecutor(3) as ranks:
        found = list(ranks.map(lambda rank: counted(words)[1], range(3)))
    few = 2 + counting.FIRST + item_counting.SAMPLED
    assert sorted(found) == [few, few, few + 1000 - counting.FIRST]
    [kept] = tmp_path.glob("*.lengths.index")
    assert counted(words)[1] == few
    assert counted(words, None)[1] == 2 + 1000
    file = tmp_path / "file"
    file.write_text("no folder")
    assert counted(words, file)[1] == few + 1000 - counting.FIRST
    assert counted(words[1:])[1] > 999, "others are counted"
    assert counted(words[::-1])[1] > 999
    dataset, _ = counted(words)
    words[501] = words[501][:0]  # not one of those that were read
    with pytest.raises(DataError, match=f"if the data has changed, start again: {re.escape(str(kept))}, which had its lengths"):
        dataset.sequence(501)
    assert counted(words)[1] > 999


class Remembering:
    """Items that a class attribute counts, of which some are broken."""

    read: ClassVar[list[int]] = []

    def __init__(self, broken: list[int]) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        if index in self.broken:
            raise BrokenSequence(f"item {index} is broken")
        return FRAMES[: index % 3]


def test_lengths_are_kept_though_reading_changes_a_class_until_a_broken_item_is_mended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "SECONDS_ALONE", -1.0)
    monkeypatch.setattr(item_counting, "SAMPLED", 2)
    for broken, used, number in (
        ([30], 39, 2 + 40 + 2 + 1),
        ([30], 39, 2 + 8 + 2 + 1),
        ([], 40, 2 + 8 + 2 + 1),
    ):
        Remembering.read.clear()  # as in a new process
        items = Remembering(broken)
        found = ItemsDataset("train", items, Scanning(tmp_path, broken=BrokenSequences("train", 1)))
        assert (found.num_sequences, len(items.read)) == (used, number)


@pytest.mark.parametrize("items", [[FRAMES, FRAMES[1:]], numpy.stack([FRAMES, FRAMES])], ids=["list", "array"])
def test_lengths_in_a_list_that_is_read_slowly_are_kept_too(items: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`__getitem__` of types of Python and numpy is of no module."""
    monkeypatch.setattr(counting, "SECONDS_ALONE", -1.0)
    monkeypatch.setattr(counting, "FIRST", 1)
    lengths = [len(item) for item in items]
    assert ItemsDataset("train", items, Scanning(tmp_path)).lengths["data"].tolist() == lengths
    assert len(list(tmp_path.glob("*.lengths.index"))) == 1
    assert ItemsDataset("train", items, Scanning(tmp_path)).lengths["data"].tolist() == lengths


def test_lengths_that_are_given_are_not_counted() -> None:
    measured = Measured()
    dataset = opened(measured)
    assert measured.read == 2  # the first one, twice
    assert dataset.lengths["data"].tolist() == measured.lengths()
    assert dataset.lengths["rest"].tolist() == [1] * 1000
    assert dataset.streams["data"].dim == 40
    assert dataset.streams["rest"].labels == ("a", "b", "c", "d")
    assert dataset.streams["rest"].dim == 4


def test_few_items_are_read_for_what_identifies_the_data() -> None:
    words = Measured(5000)
    part = DatasetPart("train", opened(words))
    words.read = 0
    before = identify([part])
    assert words.read <= 100  # twice: values that are others when they are read again identify nothing
    assert list(changes(before, [part])) == []
    words.names = "another"
    assert next(changes(before, [part])) == "other tags in train"


class Changing:
    """The lengths of items are others when they are read again."""

    def __init__(self, **attributes: Any) -> None:
        self.read = 0
        self.__dict__ |= attributes

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        self.read += 1
        return numpy.zeros(self.read, numpy.float32)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "train: expected at least one sequence, got an empty dataset"),
        (
            [(FRAMES, 1, 2)],
            "train, item 0: expected a dict, a NamedTuple, a dataclass or a tuple (data, classes), got a tuple of 3",
        ),
        ([{}], "train, item 0: expected arrays by data key, got none"),
        (
            [{"data": FRAMES, "text": "some words"}],
            "train, item 0, 'text': expected numbers, got str 'some words' (for text, give class indices, or leave it "
            "out; the name of a sequence belongs in the entry 'seq_tag')",
        ),
        ([{"data": FRAMES}, {"dato": FRAMES}], "train, item 1: expected the data keys data, got the data keys dato"),
        ([[[1, 2], [3]]], "train, item 0, 'data': expected an array, got list"),
        ([("a", {"data": 1}), {"data": 1}], "train, item 1: expected a name in 'seq_tag', as item 0 has one, got none"),
        ([{"data": 1}, ("a", {"data": 1})], "train, item 1: expected no name in 'seq_tag', as item 0 has none, got 'a'"),
        ([{"data": 1, "seq_tag": float("nan")}], "train, item 0: expected the name of the item in 'seq_tag', got float 'nan'"),
        (
            [{"data": FRAMES, "classes": []}, {"data": FRAMES, "classes": [1]}],
            "train, item 0, 'classes': expected a value that has a type, as the first item determines that of all",
        ),
        (
            [FRAMES, FRAMES[:, :1]],
            "train, item 1, 'data': expected float32 frames of shape (2,) as in item 0, got float32 of shape (1,)",
        ),
        ([[1, 2], [1.5]], "train, item 1, 'data': expected int64 frames of shape () as in item 0, got float32 of shape ()"),
        (
            [numpy.array([1], numpy.int8), numpy.array([300])],
            "train, item 1, 'data': expected numbers that int8 holds, as in item 0, got int64 from 300 to 300",
        ),
        ([FRAMES, 1e300 * FRAMES.astype(float)], "train, item 1, 'data': expected numbers that float32 holds, as in item 0, got"),
        ([[2**63, -1]], "train, item 0, 'data': expected integers that a type of numpy holds, got up to 9.2"),
        (
            [numpy.ma.masked_equal([1, 2], 2)],
            "train, item 0, 'data': expected a value for every number, got an array with masked",
        ),
        (
            [torch.zeros(2, requires_grad=True)],
            "train, item 0, 'data': expected an array, got Tensor: Can't call numpy() on Tensor",
        ),
        (Changing(lengths=[1, 2]), "train: expected 3 lengths of 'data', none below 0, got an array of shape (2,)"),
        (Changing(lengths=[1.5, 2, 3]), "train: expected whole numbers in lengths of 'data', got:"),
        (
            Changing(lengths=[2**32 + 1, 2, 3]),
            "train: expected whole numbers in lengths of 'data', got: 4294967297, which is not",
        ),
        (Labelled(9), "train, item 2, 'rest': expected classes of its 2 labels, got 2"),
        (
            pandas.DataFrame([[1, 2], [3, 4]]),
            "train: expected items, got a DataFrame with columns (give its rows: to_dict('records')",
        ),
        (pyarrow.table({"a": [1, 2], "b": [3, 4]}), "train: expected items, got a Table with columns (give its rows: "),
    ],
)
def test_what_is_wrong_is_reported(value: Any, message: str) -> None:
    if isinstance(value, list) and not value:
        value = Words(0)
    with pytest.raises(DataError) as caught:
        opened(value)
    assert message in str(caught.value)


def test_lengths_that_change_are_reported() -> None:
    dataset = ItemsDataset("dev", Changing())
    with pytest.raises(
        DataError, match=re.escape("dev, item 1: expected 4 frames in 'data', as its length was given or found, got 6")
    ):
        dataset.sequence(1)


def test_a_loader_is_refused_with_advice() -> None:
    with pytest.raises(DataError, match="train: expected items, got a DataLoader of batches .* give its dataset"):
        opened({"class": lambda: torch.utils.data.DataLoader(Words())})


def test_an_error_of_the_dataset_names_the_item() -> None:
    class Broken(Words):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index) if index < 5 else self.words[1000]

    with pytest.raises(IndexError) as caught:
        opened(Broken())
    assert caught.value.__notes__ == ["(in item 5 of train)"]


EXAMPLES = [block.code for block in blocks_of(section("datasets.md", "Items of your own")) if block.language == "python"]


@pytest.mark.parametrize("number", range(3))
def test_the_examples_of_the_document(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    example = [text for text in EXAMPLES if "train" in text][number]
    for index in range(3):
        numpy.save(tmp_path / f"{index}.npy", numpy.zeros((index + 1, 40), numpy.float32))
    if "datasets" in example:
        datasets = pytest.importorskip("datasets")
        rows = {"letters": [[1, 2, 3], [4]], "sounds": [[5], [6, 7]], "word": ["abc", "d"]}
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / "saved")
    config = tmp_path / "config.py"
    config.write_text(example)
    source = load([config], {}, {})
    dataset = opened(source.values["train"])
    assert set(dataset.batch(numpy.array([0, 1])).data) == {"data", "classes"}
    assert dataset.num_sequences >= 2


def test_lists_of_files_are_files_as_before() -> None:
    spec, _ = parse("train", ["a.hdf", "b.hdf"], {})
    assert spec is not None
    assert spec.files == ("a.hdf", "b.hdf")


class Lengthless:
    def __getitem__(self, index: int) -> list[int]:
        return [index]


def broken() -> list[float]:
    return [1 / 0]


def with_argument(part: str) -> list[float]:
    return [len(part)]


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([], "list"),
        (lambda: (), "tuple"),
        (lambda: None, "None"),
        (with_argument, "TypeError: with_argument() missing 1 required "),
        (broken, "ZeroDivisionError: division by zero (test_items.py, line "),
        (5, "int"),
        (Lengthless(), "Lengthless without __len__"),
        ({"class": FRAMES}, "array("),
    ],
    ids=range(8),
)
def test_what_is_no_dataset_is_reported(value: Any, got: str) -> None:
    spec, [problem] = parse("train", value, {})
    assert spec is None
    assert problem.key.startswith("train")
    assert got in str(problem).partition(", got ")[2]


@pytest.mark.parametrize("form", [lambda path: path, lambda path: [path], lambda path: {"class": "HDFDataset", "files": path}])
def test_files_may_be_paths(form: Any) -> None:
    spec, _ = parse("train", form(Path("a.hdf")), {})
    assert spec is not None
    assert spec.files == ("a.hdf",)


def test_a_misspelt_order_key_beside_a_class_of_ones_own_has_its_hint() -> None:
    with pytest.raises(ConfigError, match=r"unexpected keyword argument 'seq_orderin' \(did you mean seq_ordering\?\)"):
        opened({"class": Words, "seq_orderin": "random"})


def batches_of_a_loader(collated: str) -> list[object]:
    sequences = [(torch.ones(5, 3), torch.tensor(number % 4)) for number in range(10)]
    loader = torch.utils.data.DataLoader(sequences, batch_size=4)
    named = torch.utils.data.DataLoader([{"data": one, "text": "x"} for one, _ in sequences], batch_size=4)
    vectors = torch.utils.data.DataLoader([{"data": torch.ones(3), "classes": 1} for _ in range(10)], batch_size=4)
    padded = [torch.ones(4, 5, 3), torch.ones(4, 7, 3)]
    return {"lists": list(loader), "texts": list(named), "vectors": list(vectors), "padded": padded}[collated]


@pytest.mark.parametrize("collated", ["lists", "texts", "padded"])
def test_batches_in_place_of_items(collated: str) -> None:
    with pytest.raises(DataError, match=r"if an item is a batch, as a DataLoader makes them: hvdtrain makes the batches"):
        ItemsDataset("train", batches_of_a_loader(collated))


def test_batches_that_could_be_sequences_are_reported() -> None:
    [line] = ItemsDataset("train", batches_of_a_loader("vectors")).warnings()
    assert line.startswith("all items have 4 frames in every data key, the last 2: if an item is a batch")
