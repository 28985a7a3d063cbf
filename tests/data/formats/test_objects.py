"""Batches that the user's collate function makes of items of any kind, and what is read of a DataLoader."""

import importlib.util
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import h5py
import numpy
import pytest
import stand_in_gpu
import torch
from inside import run_inside
from launching import TOY
from opened_data import opened
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from trainings import Run, Trained, assert_same, trains

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.feed import Feed
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order import order as ordered
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.views import OneAtATime
from hvdtrain.errors import DataError
from hvdtrain.learner.torch.trees import moved, sent, tensors_in
from hvdtrain.training import vote

CONFIG = TOY.with_name("collated.py")
TWO = Run("torch", "horovod", 2)


def loaded() -> ModuleType:
    specification = importlib.util.spec_from_file_location("collated", CONFIG)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


THEIRS: Any = loaded()


@trains(TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    given: dict[str, object] = {"configs": [CONFIG]}
    of_loaders = {name: given | {"reading": name} for name in ("loader", "unreadable", "sampler", "batches")}
    return {"dict": given, **of_loaders, "drawn": given | {"drawing": "items"}}


def trained_by_a_loop(reading: str = "loader") -> dict[str, numpy.ndarray]:
    model = THEIRS.get_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        for batch in THEIRS.LOADERS[reading]():
            optimizer.zero_grad()
            THEIRS.loss_of(model, batch).backward()
            optimizer.step()
    return {name: tensor.detach().numpy() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", ["dict", "loader", "unreadable", "sampler", "batches"])
def test_ranks_train_as_a_loop_around_a_data_loader_does(trained: Trained, name: str) -> None:
    wanted = trained_by_a_loop("loader" if name == "dict" else name)
    made = trained(trainings, TWO).weights(name)
    for key, tensor in made.items():
        numpy.testing.assert_allclose(tensor, wanted[key], rtol=1e-6, atol=1e-6)
    [first, second] = trained(trainings, TWO).scores(name)
    assert second["dev_loss_ce"] < first["dev_loss_ce"]


def run(folder: Path, **keys: object) -> tuple[dict[str, numpy.ndarray], str]:
    finished = run_inside(
        [CONFIG, *(part for key, value in {"model": folder / "model", **keys}.items() for part in (f"++{key}", value))]
    )
    assert finished.status in (0, 75), finished.err
    path = folder / "model.002.pt"
    stored = torch.load(path, weights_only=False)["model"] if path.exists() else {}
    return {name: tensor.numpy() for name, tensor in stored.items()}, finished.out + finished.err


@pytest.mark.parametrize("drawing", ["items", "collate"])
def test_what_is_drawn_is_the_same_in_every_run_and_after_a_stop(
    tmp_path: Path, drawing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vote, "INTERVAL", 0.0)  # a stop comes two steps after its signal
    whole, _ = run(tmp_path / "whole", drawing=drawing, reading="loader")
    again, _ = run(tmp_path / "workers", drawing=drawing, reading="workers")
    assert_same(whole, again)
    run(tmp_path / "stopped", drawing=drawing, stop_at=6)
    assert not (tmp_path / "stopped/model.002.pt").exists()
    resumed, _ = run(tmp_path / "stopped", drawing=drawing)
    assert_same(whole, resumed)
    plain, _ = run(tmp_path / "plain", reading="concat")
    assert any((plain[name] != whole[name]).any() for name in plain)


def test_random_items_are_the_same_on_two_ranks(trained: Trained, tmp_path: Path) -> None:
    alone, _ = run(tmp_path, drawing="items")
    together = trained(trainings, TWO).weights("drawn")
    for name, tensor in alone.items():
        numpy.testing.assert_allclose(together[name], tensor, rtol=1e-5, atol=1e-6)


@dataclass
class Made:
    tensor: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.tensor.sum()


class Moving:
    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def to(self, device: torch.device) -> None:
        self.device = device


def test_a_tree_is_moved_with_all_that_it_holds() -> None:
    device, moving = torch.device("meta"), Moving()
    packed = nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)])
    tree = {"made": [Made(torch.ones(2))], "moving": moving, "packed": (packed, "text", Moving)}
    assert [each.device for each in tensors_in(sent(tree, device))] == 2 * [device]
    assert moving.device.type == "cpu"  # not by the stream that copies ahead
    there = moved(tree, device)
    assert {each.device for each in (there["made"][0].tensor, there["made"][0].total, moving, there["packed"][0].data)} == {
        device
    }
    assert there["packed"][0].batch_sizes.device.type == "cpu"
    assert tree["made"][0].total == 2


def test_a_gpu_computes_the_same_and_no_step_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scores(name: str) -> list[Any]:
        finished = run_inside([CONFIG, "++model", tmp_path / name / "model"])
        assert finished.status == 0, finished.err
        return [json.loads(line)["scores"] for line in (tmp_path / name / "scores.jsonl").read_text().splitlines()]

    on_cpu = scores("cpu")
    with stand_in_gpu.gpu(monkeypatch) as gpu:
        assert scores("gpu") == on_cpu
    assert [wait.rpartition(" of ")[2] for wait in gpu.waits] == [
        "torch.float32[20, 8]",
        "torch.float32[3, 8]",
        "torch.float32[3]",
    ]


def test_other_tasks_and_joined_datasets(tmp_path: Path) -> None:
    made, _ = run(tmp_path, reading="concat", split_on_oom=True, fitting=7)
    for key, wanted in trained_by_a_loop().items():
        numpy.testing.assert_allclose(made[key], wanted, rtol=1e-6, atol=1e-7)
    for task in ("eval", "forward", "dry_run", "summary", "find_batch_size"):
        _, text = run(tmp_path, task=task, output_file=tmp_path / "scores.hdf")
        assert "Traceback" not in text, text
    with h5py.File(tmp_path / "scores.hdf") as file:
        assert len(file["seqTags"]) == 20


def problems_of_data(value: Any) -> list[str]:
    return list(map(str, parse("train", value, {})[1]))


def wrong_loader(**options: Any) -> Any:
    return DataLoader([1, 2, 3], **{"batch_size": 2, **options})


class Counting(SequentialSampler):
    """Goes on where it ended: a resumed training could not know where."""

    def __iter__(self) -> Any:
        self.data_source.append(self.data_source.pop(0))
        return iter(list(self.data_source))


class Ready:
    """Its items are batches; without `__len__`, as those that Lhotse's samplers are for."""

    def __getitem__(self, numbers: Any) -> Any:
        return numbers


class Stream(IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter([([1.0, 2.0], [0]), ([3.0], [1])])


class Looping(DataLoader):  # type: ignore[type-arg]
    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (wrong_loader(sampler=WeightedRandomSampler([1, 1, 2], 3)), "sampler WeightedRandomSampler (seq_ordering is the order"),
        (wrong_loader(sampler=DistributedSampler([1, 2, 3], 2, 0)), "DistributedSampler (hvdtrain gives each rank its part"),
        (wrong_loader(sampler=RandomSampler([1, 2, 3], replacement=True)), "a RandomSampler that draws with replacement"),
        (wrong_loader(sampler=SequentialSampler([1, 2])), "a SequentialSampler of 2 of 3 items (give a torch.utils.data.Subset)"),
        (Looping([1, 2], batch_size=2), "Looping.__iter__ of its own"),
        (DataLoader(Stream(), batch_size=2), "an IterableDataset (set its batch_size to None"),
        (DataLoader(Ready(), sampler=Stream(), batch_size=None), "a Ready without __len__ (give a dataset of single items"),
        ({"class": list, "collate": 5}, "train.collate: expected a function, or its name as 'module:name', got 5"),
        ({"class": [1, 2], "collate": list, "num_workers": -1}, "train.num_workers: expected a number of processes, got -1"),
        ({"class": "HDFDataset", "files": ["a"], "collate": list}, "train.collate: unknown key of HDFDataset"),
    ],
)
def test_what_cannot_be_planned_is_refused_by_name(value: Any, message: str) -> None:
    assert message in " ".join(problems_of_data(value))


class Own(BatchSampler):
    """As PyTorch's, but for its name."""


class Several(Dataset):  # type: ignore[type-arg]
    """Looks up several numbers at once, and no other."""

    def __len__(self) -> int:
        return 5

    def __getitems__(self, numbers: list[int]) -> Any:
        return 2 * torch.tensor(numbers)


def test_what_is_read_of_a_loader() -> None:
    assert opened(DataLoader([1, 2], batch_sampler=Own(SequentialSampler([1, 2]), 2, False))).max_seqs == 2
    several = opened(DataLoader(Subset(Several(), [4, 3, 1]), batch_size=2, collate_fn=list))
    assert several.collated(several.batch(numpy.array([2, 0]))).tree == [2, 8]
    dataset = opened(DataLoader([5, 6, 7], batch_size=2, drop_last=True))
    assert dataset.max_seqs == 2
    assert dataset.warnings() == ["drop_last: every item is trained on in each epoch; the last batch may be smaller"]
    batch = dataset.collated(dataset.batch(numpy.array([2, 0])))
    assert batch.tree.tolist() == [7, 5]
    with pytest.raises(DataError, match="train.collate: expected a batch of 2 items, got None"):
        opened({"class": ["a", "b"], "collate": lambda items: None}).collated(batch)
    unbatched = opened(DataLoader([[4, 5], [6]], batch_size=None, sampler=[1, 0]))
    assert unbatched.collated(unbatched.batch(numpy.array([0]))).tree == [6]
    with pytest.raises(DataError, match="expected max_seqs = 1, as each item of this DataLoader .batch_size=None. is a batch"):
        unbatched.collated(unbatched.batch(numpy.array([0, 1])))
    looked_up = opened(DataLoader(torch.arange(5) * 2, batch_size=None, sampler=BatchSampler(range(5), 2, False)))
    assert looked_up.max_seqs == 2
    assert looked_up.collated(looked_up.batch(numpy.array([1, 4]))).tree.tolist() == [2, 8]
    stream = opened(DataLoader(Stream(), batch_size=None))
    assert stream.streams["data"].shape == ()
    stream.close()
    lengths = {"class": ["a", "bcd"], "collate": list, "lengths": [1, 3]}
    assert opened(lengths).lengths["data"].tolist() == [1, 3]
    assert opened({**lengths, "lengths": None}).lengths["data"].tolist() == [1, 1]


class Drawing(SequentialSampler):
    """As those of users, which shuffle by themselves."""

    epoch = 0

    def __init__(self, items: Any) -> None:
        super().__init__(items)
        self.generator = numpy.random.default_rng()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        order = self.generator.permutation(len(self))
        random.shuffle(order)
        return iter(numpy.roll(order, self.epoch))


def test_the_order_of_a_sampler_follows_from_the_epoch() -> None:
    def order(sampler: Any, *epochs: int) -> Any:
        spec, _ = parse("train", DataLoader(list(range(30)), sampler=sampler, batch_size=4), {})
        assert spec is not None
        return [ordered(numpy.zeros(30), spec.order, epoch).tolist() for epoch in epochs][-1]

    again, sampler = Drawing(list(range(30))), Drawing(list(range(30)))
    orders = [order(sampler, epoch) for epoch in (1, 2)]
    assert orders[1] == order(again, 2) != orders[0]
    assert sorted(orders[0]) == list(range(30))
    counting = Counting(list(range(30)))  # without set_epoch: as a loop reads it
    assert order(counting, 3) == order(counting, 1, 2, 3) == order(counting, 4, 3) == [*range(3, 30), 0, 1, 2]
    with pytest.raises(DataError, match="whose order follows from the epoch .* another order by Unseeded"):
        order(Unseeded(), 1)
    with pytest.raises(DataError, match="expected a sampler with each of the 30 items once, got others by Missing"):
        order(Missing(range(30)), 1)
    with pytest.raises(DataError, match=r"expected numbers of items .* from Chunks, got others: int"):
        order(Chunks(), 1)


class Missing(SequentialSampler):
    def __iter__(self) -> Any:
        return iter([3] * 30)


class Unseeded:
    def __iter__(self) -> Any:
        return iter(random.SystemRandom().sample(range(30), 30))


class Chunks:
    """Batches of similar length, which it shuffles in place, and their own size."""

    def __init__(self) -> None:
        self.batches = [[0, 1, 2], [3], [4, 5], list(range(6, 29))]

    def __iter__(self) -> Any:
        random.shuffle(self.batches)
        return iter(self.batches)


class Twice(Chunks):
    def __iter__(self) -> Any:
        return iter([[0], [0, 1]])


def test_the_batches_of_a_sampler_are_taken_as_they_are(tmp_path: Path) -> None:
    def planned(sampler: Any, epoch: int, size: int = 1, **keys: Any) -> list[list[int]]:
        spec, _ = parse("train", DataLoader(list(range(30)), batch_sampler=sampler), {})
        assert spec is not None
        dataset = OneAtATime(opened(DataLoader(list(range(30)), batch_sampler=sampler)))
        feed = Feed("train", dataset, spec.order, BatchKeys(**keys), size - 1, size)
        return [batch.tolist() for batch in feed.rank_batches(feed.plan(epoch))]

    chunks = Chunks()
    given = sorted(chunks.batches)
    assert sorted(planned(chunks, 1)) == sorted(planned(chunks, 2)) == given
    assert planned(chunks, 2) == planned(chunks, 2) != planned(chunks, 1)
    assert planned(chunks, 1)[1::2] == planned(chunks, 1, size=2)
    assert planned([[2, 0], [1]], 1) == [[2, 0], [1]]
    with pytest.raises(
        DataError, match=r"expected no max_seqs or max_seqs_total \(max_seqs_dev limits evaluation\) with batches"
    ):
        planned(chunks, 1, max_seqs=4)
    with pytest.raises(DataError, match="expected batches with each of the 30 items at most once, got others by Twice"):
        planned(Twice(), 1)
    with pytest.raises(DataError, match="expected lists of numbers of items from SequentialSampler, got others"):
        planned(SequentialSampler(range(30)), 1)
    assert "a list_iterator as its sampler (a list" in " ".join(
        problems_of_data(DataLoader([1, 2], batch_sampler=iter([[0], [1]])))
    )
    order = OrderKeys(seq_ordering=lambda **_: [[0, 1], [0]])  # repeats an item
    repeating = Feed("train", OneAtATime(opened({"class": [5, 6], "collate": list})), order, BatchKeys(), 0, 1)
    assert [batch.tolist() for batch in repeating.rank_batches(repeating.plan(1))] == [[0, 1], [0]]
    wrong = {
        "expected batches of indices from 0 to 1 for epoch 1, got some from 0 to 2": [[0], [2]],
        "expected batches of at least one index for epoch 1": [[0], []],
        "expected batches that are lists of indices": [["a"]],
    }
    for message, batches in wrong.items():
        order = OrderKeys(seq_ordering=lambda batches=batches, **_: batches)
        with pytest.raises(DataError, match=message):
            replace(repeating, order_keys=order).plan(1)
    with pytest.raises(DataError, match="got neither, nor batches from seq_ordering"):
        replace(repeating, order_keys=OrderKeys(seq_ordering=lambda **_: "random")).plan(1)


class Taking:
    """A class of before `collate` was a key, which has an argument of that name, or takes any."""

    def __init__(self, count: int, lengths: Any = None, **more: Any) -> None:
        self.items = [[float(number)] * number for number in range(1, count + 1)]
        self.more = more

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return {"data": self.items[index]}


def test_a_class_that_takes_collate_itself_gets_it() -> None:
    assert opened({"class": Taking, "count": 3, "collate": sum}).lengths["data"].tolist() == [1, 2, 3]


def with_noise(items: list[int]) -> list[float]:
    return [item + numpy.random.rand() for item in items]


def test_the_thread_that_trains_may_collate_parts_while_another_one_reads() -> None:
    """As for a batch that is split; one process makes batches for both."""
    dataset = OneAtATime(opened({"class": list(range(600)), "collate": with_noise, "num_workers": 1}))
    feed = Feed("train", dataset, OrderKeys(), BatchKeys(max_seqs=2), 0, 1)
    number = 0
    with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        for batch in batches:
            assert [int(value) for value in batch.tree] == batch.indices.tolist()
            assert batch.collate is not None
            assert batch.collate(batch).tree == batch.tree
            number += 1
    assert number == 300
    dataset.close()
