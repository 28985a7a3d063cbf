"""What datasets around others forgot: selections, warnings, bounds of files, random items, broken sequences, mixes."""

import io
import tarfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
from opened_data import Numbers, opened

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.padding import pad
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Array, Padded, Stream
from hvdtrain.errors import BrokenSequence, DataError
from hvdtrain.plugins.cache.budget import Budget
from hvdtrain.plugins.chunks.fixed import make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.plugins.hdf_tools.dump import dump
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def feed_of(dataset: Dataset, broken: int = 0, order: dict[str, Any] | None = None, **keys: Any) -> Feed:
    keys = {"max_seqs": 2, **keys}
    return Feed("train", dataset, OrderKeys(**order or {}), BatchKeys(**keys), 0, 1, broken=BrokenSequences("train", broken))


def numbers(path: Path, count: int, first: int = 0, **values: float) -> str:
    """A file of sequences whose values are their numbers, except for some."""
    with HDFWriter(path) as writer:
        for number in range(first, first + count):
            writer.add(f"seq-{number}", {"data": numpy.full((2, 1), values.get(f"seq{number}", number), numpy.float32)})
    return str(path)


def dumped(value: Any, out: Path, epoch: int = 1) -> list[int]:
    """The numbers of the sequences that are written, in order."""
    spec, problems = parse("train", value, {})
    assert isinstance(spec, DatasetSpec), problems
    dump(spec, out, Selection(epoch), Peers())
    written = open_hdf([out])
    return [int(written.sequence(index)["data"][0, 0]) for index in range(written.num_sequences)]


def test_a_selection_inside_counts_and_dump_plans_like_a_training(tmp_path: Path) -> None:
    one, other = numbers(tmp_path / "one.hdf", 10), numbers(tmp_path / "other.hdf", 5, 100)
    sampled = {
        "class": "CombinedDataset",
        "datasets": {"one": one},
        "sampling_sizes": 4,
        "data_map": {("one", "data"): "data"},
    }
    nested = {"class": "ConcatDataset", "datasets": [other, sampled]}
    dataset = opened(nested)
    assert [dataset.selected(epoch).tolist() for epoch in (1, 3)] == [[*range(9)], [0, 1, 2, 3, 4, 13, 14, 5, 6]]
    joined = {"class": "MetaDataset", "datasets": {"all": one, "some": sampled}, "data_map": {"data": ("some", "data")}}
    with pytest.raises(DataError, match=r"^train.datasets.some: expected a dataset without sampling_sizes, got them .*here all"):
        opened(joined)
    assert dumped(nested, tmp_path / "nested.hdf", 3) == [100, 101, 102, 103, 104, 8, 9, 0, 1]
    with pytest.raises(DataError, match="sampling_sizes here or in a dataset inside, got both"):
        opened({**sampled, "datasets": {"one": sampled}}).selected(1)
    mix = {"class": "MixingDataset", "datasets": {"one": one, "other": other}, "weights": {"one": 1, "other": 1}, "stop": 6}
    assert sum(number < 100 for number in dumped(mix, tmp_path / "mix.hdf")) == 3
    by_files = {"class": "HDFDataset", "files": [one, other], "partition_epoch": 2, "partition_by": "files"}
    parts = [sorted(dumped(by_files, tmp_path / f"part{epoch}.hdf", epoch)) for epoch in (1, 2)]
    assert sorted(parts) == [[*range(10)], [*range(100, 105)]]


class Own(Dataset):
    """A user's dataset that selects and warns, with arrays that it keeps."""

    streams = {"data": Stream(numpy.dtype("float32"), (1,), 1, False)}
    num_sequences = 4

    def __init__(self) -> None:
        self.lengths = {"data": numpy.full(4, 2, numpy.int32)}
        self.arrays = [numpy.zeros((2, 1), numpy.float32) for _ in range(4)]
        self.generator = numpy.random.default_rng(0)

    def sequence(self, index: int) -> dict[str, Array]:
        return {"data": self.arrays[index] if index < 3 else self.generator.random((2, 1), numpy.float32)}

    def tags(self, indices: Any) -> list[str]:
        return [f"seq-{index}" for index in indices]

    def warnings(self) -> list[str]:
        return ["of a user"]


def test_a_cache_neither_freezes_nor_hides_what_a_users_dataset_does() -> None:
    own = Own()
    dataset = opened({"class": lambda: own}, cache=Budget(None))
    assert dataset.warnings() == ["of a user"]
    seen = [dataset.at_epoch(epoch).sequences(range(4)) for epoch in range(1, 5)]
    assert len({one[3]["data"].tobytes() for one in seen}) == 4  # the last one is random
    own.arrays[0] += 1
    assert dataset.at_epoch(5).sequence(0)["data"].tolist() == [[1], [1]]
    dataset.close()


class Batching(Own):
    """It counts its batches, and pads them to a multiple of four frames."""

    def __init__(self, frames: int = 2) -> None:
        super().__init__()
        self.lengths = {"data": numpy.arange(frames, frames + 4, dtype=numpy.int32)}
        self.batches = 0
        self.wrong: Padded | None = None

    def sequence(self, index: int) -> dict[str, Array]:
        return {"data": numpy.full((self.lengths["data"][index], 1), index, numpy.float32)}

    def padded(self, indices: Array) -> dict[str, Padded]:
        self.batches += 1
        batch = pad([self.sequence(index)["data"] for index in indices.tolist()])
        more = -batch.values.shape[1] % 4
        return {"data": self.wrong or Padded(numpy.pad(batch.values, [(0, 0), (0, more), (0, 0)]), batch.seq_lens)}


def test_a_users_batches_are_read_within_other_datasets() -> None:
    for frames in (2, 500):
        own, other = Batching(frames), Batching(frames)
        for dataset in own, other:
            dataset.streams = {"data": replace(Own.streams["data"], dtype=numpy.dtype(["f4", "f8"][dataset is other]))}
        inside = [{"class": lambda own=own: own}, {"class": lambda other=other: other}]
        several = {"datasets": dict(zip("ab", inside, strict=True))}
        for value in (
            {"class": "ConcatDataset", "datasets": [{"class": "ConcatDataset", "datasets": inside}]},
            {"class": "CombinedDataset", **several, "data_map": {(name, "data"): "data" for name in "ab"}},
            {"class": "MixingDataset", **several},
        ):
            before = own.batches
            batch = opened(value).padded(numpy.array([6, 1, 0, 4]))["data"]
            assert (own.batches, own.batches) == (before + 1, other.batches), "one batch of each"
            assert batch.seq_lens.tolist() == [frames + number for number in (2, 1, 0, 0)]
            assert (batch.values.dtype, batch.values.shape) == ("f8", (4, -(-(frames + 2) // 4) * 4, 1))
            assert batch.values.sum() == 2 * (frames + 2) + frames + 1
        for wrong in (batch.values[:1], batch.values[:2, :frames], batch.values[:2, ..., 0]):
            other.wrong = Padded(wrong, batch.seq_lens[: len(wrong)])
            with pytest.raises(DataError, match=r"data key 'data': expected float64 of shape \(2, "):
                opened(value).padded(numpy.array([6, 1, 0, 4]))


class Selecting(Own):
    def selected(self, full_epoch: int) -> Array:
        return numpy.array([full_epoch % 4])


def test_a_class_that_selects_is_not_cached() -> None:
    dataset = opened({"class": Selecting}, cache=Budget(None))
    assert [dataset.selected(epoch).tolist() for epoch in (1, 2)] == [[1], [2]]
    assert dataset.is_stochastic


def test_the_files_of_a_foreign_dataset_are_parts() -> None:
    class Foreign:
        streams, lengths, num_sequences = Own.streams, {"data": numpy.full(4, 2, numpy.int32)}, 4
        sequence = tags = None

        def file_bounds(self) -> Array:
            return numpy.array([0, 1, 4])

    assert opened({"class": "ConcatDataset", "datasets": 2 * [{"class": Foreign}]}).file_bounds().tolist() == [0, 1, 4, 5, 8]


def tar(path: Path, contents: list[bytes]) -> dict[str, Any]:
    with tarfile.open(path, "w") as archive:
        for number, content in enumerate(contents):
            about = tarfile.TarInfo(f"seq-{number}.data.npy")
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return {"class": "TarDataset", "files": [str(path)]}


def npy(value: float) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, numpy.full((2, 1), value, numpy.float32))
    return stream.getvalue()


NOT_FINITE = {2: numpy.nan, 5: numpy.inf}


@pytest.mark.parametrize("kind", ["HDF", "tar"])
def test_sequences_that_are_not_finite_are_left_out(kind: str, tmp_path: Path) -> None:
    value: Any = numbers(tmp_path / "one.hdf", 7, seq2=numpy.nan, seq5=numpy.inf)
    if kind == "tar":
        value = tar(tmp_path / "one.tar", [npy(NOT_FINITE.get(number, number)) for number in range(7)])
    for packed in (False, True):
        feed = feed_of(opened(value), 2, packed=packed)
        with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
            found = list(batches)
        assert sorted(index for batch in found for index in batch.indices.tolist()) == [0, 1, 3, 4, 6]
        [(_, message), _] = [broken for batch in found for broken in batch.broken]
        assert message == "sequence 'seq-2', data key 'data': expected finite numbers, got nan in frame 0"


def test_a_damaged_part_of_a_file_is_a_broken_sequence(tmp_path: Path) -> None:
    path = numbers(tmp_path / "one.hdf", 6)
    with h5py.File(path, "r+") as file:
        values = file["inputs"][:]
        del file["inputs"]
        file.create_dataset("inputs", data=values, chunks=(4, 1), compression="gzip", fletcher32=True)
        place = file["inputs"].id.get_chunk_info(1).byte_offset
    with open(path, "r+b") as file:
        file.seek(place)
        file.write(b"\0" * 8)
    feed = feed_of(opened(path), 2)
    with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        assert [index for batch in batches for index in batch.indices.tolist()] == [0, 1, 4, 5]
    feed = feed_of(opened(path))
    with pytest.raises(BrokenSequence, match="skip_broken"), feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        list(batches)


class Changing(Numbers):
    """Its lengths depend on the epoch."""

    is_stochastic = True

    def at_epoch(self, epoch: int) -> Dataset:
        generator = numpy.random.default_rng(epoch)
        return Numbers({"data": generator.integers(1, 10, self.num_sequences).astype(numpy.int32)})


def test_a_mix_of_lengths_that_change_uses_nothing_twice() -> None:
    sizes = {"one": 10, "other": 6}
    inside = {name: {"class": partial(Changing, {"data": numpy.full(size, 5, numpy.int32)})} for name, size in sizes.items()}
    dataset = opened({"class": "MixingDataset", "datasets": inside, "weights": {"one": 5, "other": 3}, "stop": 8})
    feed = feed_of(dataset, order={"seq_ordering": "sorted"})
    used = [feed.plan(epoch).order.tolist() for epoch in (1, 2, 3, 4)]
    assert sorted(used[0] + used[1]) == sorted(used[2] + used[3]) == list(range(16))


def test_parts_of_lengths_that_change_use_nothing_twice() -> None:
    dataset = opened({"class": lambda: Changing({"data": numpy.full(10, 5, numpy.int32)})})
    feed = feed_of(dataset, order={"seq_ordering": "sorted", "partition_epoch": 3})
    used = [feed.plan(epoch).order.tolist() for epoch in range(1, 7)]
    assert sorted(sum(used[:3], [])) == sorted(sum(used[3:], [])) == list(range(10))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sequence_that_an_epoch_has_several_times_has_other_noise_each_time(workers: int, tmp_path: Path) -> None:
    def noisy(arrays: dict[str, Array], *, rng: numpy.random.RandomState) -> dict[str, Array]:
        return {"data": arrays["data"] + rng.rand() / 2 + numpy.random.rand() / 4}

    inside = {"class": "MapDataset", "dataset": numbers(tmp_path / "one.hdf", 3), "map_seq": noisy, "num_workers": workers}
    dataset = opened(inside)

    def values(position: int = 0, **keys: Any) -> list[float]:
        feed = feed_of(dataset, order={"seq_ordering": "default", "repeat_epoch": 3}, **keys)
        with feed.read(feed.rank_batches(feed.plan(1), position), 1) as batches:
            return [float(sequence[0, 0]) for batch in batches for sequence in batch.data["data"].sequences()]

    found = values()
    assert [int(value) for value in found] == [0, 1, 2] * 3
    assert len({value % 1 for value in found}) == 9
    assert values(packed=True) == values(max_seqs=9) == found
    assert values(position=2) == found[4:]
    order = {"seq_ordering": "default", "repeat_epoch": 3}
    in_chunks = replace(feed_of(dataset, order=order, max_seqs=3), chunks=make_chunks(dataset.lengths, ChunkKeys(chunking=1)))
    for feed in (in_chunks, feed_of(dataset, order=order, batch_size=5, frame_batches=True)):  # sequences of two frames
        with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
            frames = numpy.concatenate([batch.data["data"].values.reshape(-1) for batch in batches])
        assert frames.tolist() == numpy.repeat(found, 2).tolist()
    dataset.close()
