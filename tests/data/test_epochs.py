"""A MapDataset's random numbers: different in every epoch, the same in whichever process draws them."""

from pathlib import Path
from typing import Any

import numpy
import pytest
from launching import TOY
from opened_data import opened
from trainings import Run, Trained, trains

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.errors import DataError
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

SIZE = 23


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with HDFWriter(tmp_path / "inside.hdf") as writer:
        for number in range(SIZE):
            writer.add(f"seq-{number}", {"data": numpy.full((1 + number % 5, 2), number, "float32")})
    return tmp_path / "inside.hdf"


def noisy(arrays: dict[str, Any], *, epoch: int, rng: numpy.random.RandomState, **_: object) -> dict[str, Any]:
    return {"data": arrays["data"] + rng.uniform(size=arrays["data"].shape) + 1000 * epoch}


def noisy_dict(path: Path, **options: Any) -> dict[str, Any]:
    return {"class": "MapDataset", "dataset": str(path), "map_seq": noisy, "seq_ordering": "random", **options}


def read(dataset: Dataset, epoch: int, rank: int = 0, size: int = 1) -> dict[int, list[Any]]:
    """What training on a rank sees in an epoch: by sequence, its frames without padding."""
    feed = Feed("train", dataset, OrderKeys(seq_ordering="random"), BatchKeys(max_seqs=3), rank, size)
    seen = {}
    with feed.read(feed.rank_batches(feed.plan(epoch)), epoch) as batches:
        for batch in batches:
            for index, values, length in zip(batch.indices, batch.data["data"].values, batch.data["data"].seq_lens, strict=True):
                seen[int(index)] = values[:length].tolist()
    return seen


def test_numbers_depend_on_seed_epoch_and_sequence_alone(path: Path) -> None:
    alone = opened(noisy_dict(path))
    first, second = read(alone, 1), read(alone, 2)
    assert len(first) == len(second) == SIZE
    assert read(alone, 1) == first, "an epoch that is read again, as after a restart"
    with_workers = opened(noisy_dict(path, num_workers=2))
    assert read(with_workers, 2) == second
    assert read(with_workers, 1) == first
    three: dict[int, Any] = {}
    for rank in range(3):
        three |= read(with_workers, 2, rank, 3)
    assert three == second
    with_workers.close()
    drawn = {index: numpy.array(values) % 1 for index, values in first.items()}
    for index, values in second.items():
        assert values[0][0] // 1000 == 2
        assert not numpy.allclose(numpy.array(values) % 1, drawn[index], atol=1e-3), "another epoch"
    assert not numpy.allclose(drawn[0], drawn[5], atol=1e-3), "another sequence"
    other_seed = read(opened(noisy_dict(path, map_seed=1)), 1)
    assert not numpy.allclose(numpy.array(other_seed[0]) % 1, drawn[0], atol=1e-3)


def test_datasets_around_it_pass_the_epoch_on(path: Path) -> None:
    plain = read(opened(noisy_dict(path)), 2)
    inside = {name: value for name, value in noisy_dict(path).items() if name != "seq_ordering"}
    again = {"class": "MapDataset", "dataset": inside, "map_seq": lambda arrays: arrays, "num_workers": 1}
    joined = {
        "class": "MetaDataset",
        "datasets": {"noisy": inside, "plain": str(path)},
        "data_map": {"data": ("noisy", "data"), "clean": ("plain", "data")},
        "seq_order_control_dataset": "plain",
    }
    for around in (again, joined, {"class": "ConcatDataset", "datasets": [inside]}):
        dataset = opened(around)
        assert read(dataset, 2) == plain, around["class"]
        dataset.close()


def test_hdf_dump_writes_what_training_sees_in_that_epoch(path: Path, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(
        "def noisy(arrays, *, epoch, rng, **_):\n"
        "    return {'data': arrays['data'] + rng.uniform(size=arrays['data'].shape) + 1000 * epoch}\n"
        f"train = {{'class': 'MapDataset', 'dataset': {str(path)!r}, 'map_seq': noisy}}\n"
    )
    assert main([str(tmp_path / "config.py"), str(tmp_path / "out.hdf"), "--epoch", "2"]) == 0
    written = open_hdf([tmp_path / "out.hdf"])
    seen = read(opened(noisy_dict(path)), 2)
    assert {index: written.sequence(index)["data"].tolist() for index in range(SIZE)} == seen


@pytest.mark.parametrize(
    ("map_seq", "added"),
    [
        (lambda arrays: arrays, 0),
        (lambda arrays, epoch: {"data": arrays["data"] + epoch}, 7),
        (lambda arrays, **more: {"data": arrays["data"] + len(more)}, 3),
        (dict, 0),
    ],
)
def test_a_function_gets_what_it_takes(path: Path, map_seq: Any, added: int) -> None:
    seen = read(opened(noisy_dict(path, map_seq=map_seq)), 7)
    assert all(seen[index][0][0] == index + added for index in range(SIZE))


def factor(epoch: int, index: Any) -> Any:
    """How much faster a sequence is in an epoch: of a number, or of an array of them."""
    return 1 + (index * 7 + epoch * 3) // 2 % 3


def faster(arrays: dict[str, Any], *, epoch: int, index: int, **_: object) -> dict[str, Any]:
    return {"data": arrays["data"][:: factor(epoch, index)]}


def faster_lengths(lengths: dict[str, Any], *, epoch: int, **_: object) -> dict[str, Any]:
    return {"data": -(-lengths["data"] // factor(epoch, numpy.arange(len(lengths["data"]))))}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_lengths_may_differ_from_epoch_to_epoch(path: Path, num_workers: int) -> None:
    inside = {
        "class": "MapDataset",
        "dataset": str(path),
        "map_seq": faster,
        "map_lengths": faster_lengths,
        "num_workers": num_workers,
    }
    joined = {"class": "MetaDataset", "datasets": {"a": inside, "b": str(path)}, "data_map": {"data": ("a", "data")}}
    twice = {"class": "MapDataset", "dataset": inside, "map_seq": lambda arrays: arrays}
    for value in (inside, joined, {"class": "ConcatDataset", "datasets": [inside]}, twice):
        dataset = opened(value)
        by_epoch = []
        for epoch in (1, 2, 3):
            seen = read(dataset, epoch)
            assert len(seen) == SIZE
            for index, frames in seen.items():
                assert len(frames) == -(-(1 + index % 5) // factor(epoch, index)), (value["class"], epoch, index)
            feed = Feed("train", dataset, OrderKeys(seq_ordering="sorted"), BatchKeys(max_seqs=3), 0, 1)
            in_order = [len(seen[index]) for index in feed.plan(epoch).order.tolist()]
            assert in_order == sorted(in_order), "sorted by the lengths of this epoch"
            assert feed.lengths_in(epoch)["data"].tolist() == [len(seen[index]) for index in range(SIZE)]
            by_epoch.append(seen)
        assert by_epoch[0] != by_epoch[1]
        dataset.close()


def test_chunks_need_lengths_that_stay(path: Path) -> None:
    dataset = opened({"class": "MapDataset", "dataset": str(path), "map_seq": faster, "map_lengths": faster_lengths})
    chunks = make_chunks(dataset.lengths, ChunkKeys(chunking="2:1"))
    with pytest.raises(
        DataError, match="chunking: expected the same lengths in every epoch, got a map_lengths in train that takes the epoch"
    ):
        Feed("train", dataset, OrderKeys(), BatchKeys(max_seqs=3), 0, 1, chunks=chunks).plan(1)


NOISY = """

def noisy(arrays, *, rng, **_):
    return {**arrays, "data": (arrays["data"] + rng.normal(size=arrays["data"].shape)).astype("float32")}

workers = config.int("workers", 0)
train = {"class": "MapDataset", "dataset": train, "map_seq": noisy, "num_workers": workers, "map_seed": 3}
"""


ONE, TWO = (Run("torch", "horovod", size) for size in (1, 2))


@trains(ONE, TWO)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """Two epochs alone; on two ranks with workers, and with a restart between them."""
    (folder / "noisy.py").write_text(NOISY)
    common = {"configs": [TOY, folder / "noisy.py"], "num_epochs": 2}
    if run.size == 1:
        return {"whole": common}
    parts = {**common, "workers": 1, "saved_as": "parts"}
    return {"first": {**parts, "num_epochs": 1}, "second": parts}


def test_a_training_draws_the_same_on_two_ranks_with_workers_and_a_restart_as_on_one(trained: Trained) -> None:
    one, two = trained(trainings, ONE).weights("whole"), trained(trainings, TWO).weights("second")
    assert numpy.allclose(one["last.weight"], two["last.weight"], atol=1e-5)
