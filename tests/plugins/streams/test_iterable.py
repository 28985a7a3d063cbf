"""Iterables of unknown length: each item on one rank once, in a known order, also where a run continues within an epoch."""

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from documented import blocks_of, section
from launching import TOY
from trainings import Run, Trained, assert_same, trains

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.config.references import resolve
from hvdtrain.config.source import load
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.feed import Feed
from hvdtrain.data.foreign import is_map_style
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order import order
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.settings import read_settings
from hvdtrain.start_up.data import open_feeds

Item = tuple[str, list[int]]


def items(count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Class indices of random lengths, and one number more."""
    rng = numpy.random.default_rng(seed)
    for number in range(count):
        yield {"data": torch.tensor(rng.integers(0, 30, rng.integers(1, 12))), "rest": number % 3, "seq_tag": f"{seed}/{number}"}


def of_epoch(count: int, *, epoch: int) -> Iterator[dict[str, Any]]:
    return items(count + epoch, seed=epoch)


class Streaming(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    """torch's; with a length, which torch allows."""

    dims = {"data": 40}

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return items(self.count)


class WithEpochs(Streaming):
    """As the streams of Hugging Face."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return of_epoch(self.count, epoch=self.epoch)


class Read:
    """An opened dataset, and what was said and read for that."""

    def __init__(self, value: Any, folder: Path | None, size: int = 1) -> None:
        self.scans: list[str] = []
        self.notes: list[str] = []
        self.spec, problems = parse("train", value, {})
        assert self.spec is not None, problems
        scanning = Scanning(folder, 0, size, self._progress, note=self.notes.append)
        self.dataset = open_dataset(self.spec, OpeningContext(scanning=scanning))

    @contextmanager
    def _progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        self.scans.append(what)
        yield lambda number: None

    def feed(self, rank: int = 0, size: int = 1, max_seqs: int = 3) -> Feed:
        return Feed("train", self.dataset, self.spec.order, BatchKeys(max_seqs=max_seqs), rank, size)  # type: ignore[union-attr]

    def batches(self, epoch: int, rank: int = 0, size: int = 1, position: int = 0, max_seqs: int = 3) -> list[list[Item]]:
        feed = self.feed(rank, size, max_seqs)
        found = []
        with feed.read(feed.rank_batches(feed.plan(epoch), position), epoch) as batches:
            for batch in batches:
                assert batch.seq_tags is not None
                data = batch.data["data"]
                rows = [data.values[row, : data.seq_lens[row]].tolist() for row in range(len(data.values))]
                found.append(list(zip(batch.seq_tags(), rows, strict=True)))
        return found


@contextmanager
def opened(value: Any, folder: Path | None = None, size: int = 1) -> Iterator[Read]:
    read = Read(value, folder, size)
    try:
        yield read
    finally:
        read.dataset.close()


def expected(rows: list[dict[str, Any]], keys: OrderKeys, epoch: int, window: int, max_seqs: int) -> list[list[Item]]:
    """The batches by a plain reference: windows of neighbours, each in order, cut into batches."""
    lengths = numpy.array([len(row["data"]) for row in rows])
    indices: list[int] = []
    for start in range(0, len(rows), window):
        here = lengths[start : start + window]
        if keys.seq_ordering == "sorted":
            indices += (start + numpy.argsort(here, kind="stable")).tolist()
        elif keys.seq_ordering == "default":
            indices += range(start, start + len(here))
        else:
            seeded = OrderKeys(seq_ordering=keys.seq_ordering, random_seed_offset=start // window * 7919)
            indices += (start + order(here, seeded, epoch)).tolist()
    ordered = [(rows[index]["seq_tag"], rows[index]["data"].tolist()) for index in indices]
    return [ordered[start : start + max_seqs] for start in range(0, len(ordered), max_seqs)]


@pytest.mark.parametrize("seed", range(6))
def test_random_cases_are_those_of_a_plain_reference(seed: int, tmp_path: Path) -> None:
    """On any number of ranks, from any position on, in any epoch; ranks that read apart as well as one that reads all."""
    rng = numpy.random.default_rng(seed)
    count, window, max_seqs = int(rng.integers(1, 60)), int(rng.integers(1, 40)), int(rng.integers(1, 6))
    ordering = ["sorted", "default", "random", "laplace:.5"][seed % 4]
    maker: Any = items if seed % 2 else of_epoch
    value = {"class": "IterableDataset", "iterable": lambda: items(count), "window": window, "seq_ordering": ordering}
    if maker is of_epoch:
        value["iterable"] = lambda epoch: of_epoch(count, epoch=epoch)
    with opened(value, tmp_path) as read:
        for epoch in (1, 2, 1, 4):
            rows = list(items(count) if maker is items else of_epoch(count, epoch=epoch))
            whole = expected(rows, OrderKeys(seq_ordering=ordering), epoch, window, max_seqs)
            assert read.batches(epoch, max_seqs=max_seqs) == whole
            for _ in range(3):
                size, position = int(rng.integers(1, 5)), int(rng.integers(0, len(whole) + 1))
                shares = [read.batches(epoch, rank, size, position, max_seqs) for rank in range(size)]
                dealt = [batch for step in itertools.zip_longest(*shares) for batch in step if batch is not None]
                assert dealt == whole[position:]


def test_what_has_no_epochs_is_read_once_for_its_lengths(tmp_path: Path) -> None:
    with opened({"class": items, "count": 20}, tmp_path) as read:
        assert sorted(tag for batch in read.batches(3) for tag, _ in batch) == sorted(f"0/{number}" for number in range(20))
        assert read.dataset.streams["data"].dtype == numpy.int64
        assert read.dataset.streams["data"].dim == 1 + max(int(row["data"].max()) for row in items(20))
        assert read.dataset.how_read() == "read from beginning to end (items)"
        assert read.dataset.warnings() == []
        assert len(read.scans) == 1
    with opened({"class": items, "count": 20}, tmp_path) as read:
        read.batches(1)
        assert read.scans == [], "the lengths are kept"
    with opened({"class": items, "count": 21}, tmp_path, size=2) as read:
        assert len(read.scans) == 1, "other arguments, other data"
        [warning] = read.dataset.warnings()
        assert warning == "items can only be read from its beginning: each of the 2 ranks reads all of it and trains on its share"


@pytest.mark.parametrize(
    "value",
    [
        {"class": of_epoch, "count": 9},
        {"class": WithEpochs, "count": 9},
        WithEpochs(9),
        {"class": "IterableDataset", "iterable": lambda epoch: of_epoch(9, epoch=epoch)},
        lambda: {"class": WithEpochs, "count": 9},
    ],
)
def test_each_epoch_may_have_its_own_items(value: Any, tmp_path: Path) -> None:
    with opened(value, tmp_path) as read:
        for epoch in (1, 2, 7, 1):
            rows = expected(list(of_epoch(9, epoch=epoch)), OrderKeys(), epoch, 1000, 3)
            assert read.batches(epoch) == rows
        assert [scan.rpartition(" ")[2] for scan in read.scans] == ["1", "2", "7"]
        [warning] = read.dataset.warnings()
        assert "is read once for its lengths before it is trained on" in warning


@pytest.mark.parametrize(
    "value",
    [
        Streaming(5),
        lambda: items(5),
        {"class": lambda: torch.utils.data.DataLoader(Streaming(5), batch_size=None, num_workers=1)},
        {"class": "IterableDataset", "iterable": "hvdtrain_test_iterable.py:function"},
    ],
)
def test_what_is_an_iterable(value: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if isinstance(value, dict) and isinstance(value["class"], str):
        path = tmp_path / "hvdtrain_test_iterable.py"
        path.write_text("import numpy\ndef function():\n    yield from ({'data': numpy.arange(n + 1)} for n in range(5))\n")
        value = {**value, "iterable": f"{path}:function"}
        assert resolve(value["iterable"])
    with opened(value) as read:
        assert read.dataset.num_sequences == 5
        if isinstance(value, Streaming):
            assert not is_map_style(value)
            assert read.dataset.streams["data"].dim == 40


def endless(start: int = 0) -> Iterator[Any]:
    for number in itertools.count(start):
        yield f"{number}", {"data": numpy.arange(number % 7 + 1)}


def test_an_endless_stream_is_cut_into_epochs(tmp_path: Path) -> None:
    value = {"class": "IterableDataset", "iterable": endless, "epoch_size": 10, "window": 4, "seq_ordering": "sorted"}
    with opened(value, tmp_path) as read:
        for epoch in (1, 2, 5, 3):
            assert read.batches(epoch) == expected(rows_of(epoch), OrderKeys(seq_ordering="sorted"), epoch, 4, 3)
        assert read.batches(5, 1, 2, position=1) == expected(rows_of(5), OrderKeys(seq_ordering="sorted"), 5, 4, 3)[2::2]


def rows_of(epoch: int) -> list[dict[str, Any]]:
    return [{"seq_tag": str(number), "data": numpy.arange(number % 7 + 1)} for number in range(10 * epoch - 10, 10 * epoch)]


def test_epochs_of_a_size_go_round(tmp_path: Path) -> None:
    """Each item comes as often as any other before it comes once more."""
    value = {"class": "IterableDataset", "iterable": lambda: items(7), "epoch_size": 5}
    with opened(value, tmp_path) as read:
        tags = [tag for epoch in range(1, 8) for batch in read.batches(epoch) for tag, _ in batch]
        assert tags == [f"0/{number % 7}" for number in range(35)]


def test_going_on_far_within_an_epoch_says_what_is_skipped(tmp_path: Path) -> None:
    value = {"class": "IterableDataset", "iterable": lambda: items(2500), "window": 10}
    with opened(value, tmp_path) as read:
        whole = read.batches(1, max_seqs=100)
        assert read.notes == []
        assert read.batches(1, position=20, max_seqs=100) == whole[20:]
        assert read.notes == ["train: reading and skipping the 2000 sequences before the one to resume from ..."]


def test_streams_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"data": [[1.5] * (number % 4 + 1) for number in range(10)], "classes": list(range(10))}
    with opened(datasets.Dataset.from_dict(rows).to_iterable_dataset(num_shards=2), tmp_path) as read:
        assert [batch[0][1] for batch in read.batches(1, max_seqs=1)] == rows["data"]
        assert read.dataset.streams["classes"].dtype == numpy.int64
        assert read.dataset.streams["classes"].dim == 10


class Unseeded:
    """Other lengths whenever it is read."""

    def __iter__(self) -> Iterator[Any]:
        rng = numpy.random.default_rng()
        for _ in range(20):
            yield numpy.zeros((rng.integers(1, 1000), 2))


def test_lengths_that_change_are_reported(tmp_path: Path) -> None:
    with opened(Unseeded(), tmp_path) as read:
        [warning] = read.dataset.warnings()
        assert warning.startswith("Unseeded yields other sequences when an epoch begins again")
        with pytest.raises(DataError, match=r"expected sequence \d+ of epoch 1 to be 'seq-\d+' with \d+ frames in 'data', got"):
            read.batches(1)


LOADER = torch.utils.data.DataLoader(Streaming(5), batch_size=2)
SAME = iter([{"data": [1]}, {"data": [2]}])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            LOADER,
            "got one with an IterableDataset (set its batch_size to None, or give the dataset itself",
        ),
        (items(3), "train: expected data that can be read again in every epoch, got a generator (give the function"),
        ({"class": lambda: SAME}, "train: expected a new iterator whenever <lambda> begins again, got the same list_iterator"),
        ({"class": lambda: iter([])}, "train: expected at least one item in epoch 1 of <lambda>, got none"),
        ({"class": lambda: iter([{"data": "text"}])}, "train, item 0, 'data': expected numbers, got str 'text'"),
        (
            {"class": lambda: iter([{"data": [1]}, {"dato": [1]}])},
            "train, item 1: expected the data keys data, got the data keys dato",
        ),
        ({"class": lambda: 5}, "train: expected a dataset that has the lengths of its sequences, has __len__ and __getitem__"),
        ({"class": of_epoch, "count": 3, "seq_orderin": "random"}, "argument 'seq_orderin' (did you mean seq_ordering?)"),
        ({"class": "IterableDataset", "iterable": 5}, "iterable: expected something that can be iterated over more than once"),
        ({"class": "IterableDataset", "iterable": items, "window": 0}, "window: expected a positive integer, got 0"),
        (
            {"class": "IterableDataset", "iterable": items, "windo": 9},
            "train.windo: unknown key of IterableDataset (did you mean",
        ),
    ],
    ids=range(11),
)
def test_what_is_wrong_is_reported(value: Any, message: str) -> None:
    with pytest.raises((ConfigError, DataError, AssertionError)) as caught, opened(value):
        pass
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("chunking = 5", "train: expected no chunking with an iterable, which is read from beginning to end, got it"),
        ("train['partition_epoch'] = 2", "train: expected no partition_epoch with an iterable"),
        (
            "train = {'class': 'MetaDataset', 'datasets': {'a': train}, 'data_map': {'data': ('a', 'data')}}",
            "train.datasets.a: expected a dataset that can be read in any order inside train",
        ),
    ],
)
def test_what_needs_another_order_is_refused(tmp_path: Path, lines: str, message: str) -> None:
    config = f"""
def stream():
    yield from ({{"data": [1.0] * number}} for number in range(5, 9))
train = {{"class": stream}}
model, learning_rate, max_seqs, lengths_dir = {str(tmp_path / "model")!r}, 0.1, 3, None
def get_model(**_): ...
def train_step(**_): ...
"""
    (tmp_path / "config.py").write_text(config + lines)
    with pytest.raises(DataError, match=re.escape(message)):
        open_feeds(read_settings([tmp_path / "config.py"], {}), SingleCommunicator())


def test_a_function_over_an_iterable(tmp_path: Path) -> None:
    inner = {"class": items, "count": 11}
    value = {"class": "MapDataset", "dataset": inner, "map_seq": lambda arrays: {**arrays, "data": arrays["data"] + 1}}
    with opened({**value, "seq_ordering": "sorted"}, tmp_path) as read:
        plain = expected(list(items(11)), OrderKeys(seq_ordering="sorted"), 1, 1000, 3)
        assert read.batches(1) == [[(tag, [each + 1 for each in values]) for tag, values in batch] for batch in plain]


def test_the_window_is_part_of_what_ranks_compare() -> None:
    with opened({"class": items, "count": 5}) as read:
        dataset: Dataset = read.dataset
        before = read.feed().inputs(1).checksum()
        dataset.window = 2
        assert read.feed().inputs(1).checksum() != before


EXAMPLES = [block.code for block in blocks_of(section("datasets.md", "Iterables")) if block.language == "python"]


@pytest.mark.parametrize(
    ("number", "expected"),
    [(0, [10, 20, 30]), (1, range(1, 50)), (2, [1, 3]), (3, None)],
    ids=["generator", "torch", "hf", "endless"],
)
def test_the_examples_of_the_document(
    number: int, expected: Sequence[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hugging_face"))
    example = [text for text in EXAMPLES if "train =" in text][number]
    if "datasets" in example:
        pytest.importorskip("datasets")
    (tmp_path / "text.txt").write_text("".join("x" * (length - 1) + "\n" for length in (10, 20, 30)))
    (tmp_path / "rows.jsonl").write_text('{"letters": [1, 2, 3], "sounds": [5]}\n{"letters": [4], "sounds": [6, 7]}\n')
    config = tmp_path / "config.py"
    config.write_text(example.replace('"epoch_size": 5000', '"epoch_size": 500'))
    source = load([config], {}, {})
    with opened(source.values["train"]) as read:
        batches = read.batches(1)
        assert set(read.dataset.streams) == {"data", "classes"}
        lengths = sorted(read.dataset.lengths["data"].tolist())
        assert lengths == list(expected) if expected is not None else len(lengths) == 500
        assert sum(map(len, batches)) == len(lengths)


RUNS = [Run("torch", "single", 1), Run("torch", "horovod", 2)]


@trains(*RUNS)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Of lengths from 1 to 30; on two ranks, the last step is of one of them."""
    common = {"configs": [TOY, TOY.with_name("stream.py")], "num_epochs": 2, "record": True}
    return {name: {**common, "streamed": name} for name in ("in_order", "native", "shuffled")}


@pytest.mark.parametrize("run", RUNS, ids=str)
def test_training_is_that_on_the_same_sequences(trained: Trained, run: Run) -> None:
    """An iterable against the file that it reads: the same weights, and each sequence once in every epoch."""
    results = trained(trainings, run)
    assert_same(results.weights("native"), results.weights("in_order"))
    for name in results.names:
        counted = results.trained_on(name)
        assert counted == {(epoch, sequence): 1 for epoch in (1, 2) for sequence in range(len(counted) // 2)}
        assert len(counted) > 400
    assert "sequences, default in windows of 1000; read from beginning to end (in_order)" in results.out("in_order")


def test_a_stream_is_trained_on_alike_by_one_rank_and_two(trained: Trained) -> None:
    """Up to rounding: the gradients of two ranks are summed in another order."""
    one, two = (trained(trainings, run) for run in RUNS)
    for name in one.names:
        for scores, others in zip(one.scores(name), two.scores(name), strict=True):
            assert {key: pytest.approx(value, rel=1e-4) for key, value in scores.items()} == others
