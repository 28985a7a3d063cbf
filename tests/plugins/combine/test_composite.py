"""Datasets made of others, and synthetic ones: contents against simple references, and malformed dicts."""

import os
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from documented import blocks_of
from launching import ROOT
from opened_data import opened, problems_of

from hvdtrain.data.combine.files import FilesDataset
from hvdtrain.data.combine.workers import Workers
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.kinds import KINDS
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.epoch import plan
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Stream
from hvdtrain.errors import DataError
from hvdtrain.plugins.combine.meta import tag_blocks
from hvdtrain.plugins.combine.union import concatenate
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.returnn.thread_errors import ThreadErrors


def write(path: Path, count: int, first: int = 0, keys: tuple[str, ...] = ("data", "classes"), dim: int = 3) -> str:
    """Sequences whose frames say their number, of lengths that differ from key to key."""
    with HDFWriter(path, dims=dict.fromkeys(keys, 1000)) as writer:
        for number in range(first, first + count):
            arrays: dict[str, numpy.ndarray] = {key: numpy.full(number % 5 + 1, number, numpy.int32) for key in keys}
            if "data" in keys:
                arrays["data"] = numpy.full((number % 7, dim), number, numpy.float32)
            writer.add(f"seq-{number}", arrays)
    return str(path)


def check_contract(dataset: Dataset) -> None:
    """Sequences, lengths, streams, tags and batches agree."""
    assert list(dataset.lengths) == list(dataset.streams)
    for column in dataset.lengths.values():
        assert (column.dtype, column.shape) == (numpy.int32, (dataset.num_sequences,))
    sequences = [dataset.sequence(index) for index in range(dataset.num_sequences)]
    for index, arrays in enumerate(sequences):
        assert list(arrays) == list(dataset.streams)
        for key, values in arrays.items():
            stream = dataset.streams[key]
            assert len(values) == dataset.lengths[key][index]
            assert (values.dtype, values.shape[1:]) == (stream.dtype, stream.shape)
    indices = numpy.random.default_rng(0).permutation(dataset.num_sequences)
    assert dataset.tags(indices) == [dataset.tags([index])[0] for index in indices]
    in_bulk = tag_blocks(dataset, block=4)
    assert [tag.decode() for _, block in in_bulk for tag in block.tolist()] == dataset.tags(range(dataset.num_sequences))
    batch = dataset.batch(indices)
    for key, part in batch.data.items():
        assert part.values.dtype == dataset.streams[key].dtype
        for row, index in enumerate(indices):
            values = sequences[index][key]
            assert part.seq_lens[row] == len(values)
            assert part.values[row, : len(values)].tolist() == values.tolist()
            assert not part.values[row, len(values) :].any()


def whole(folder: Path) -> dict[str, Mapping[str, Any]]:
    """A dict of every class, with at least 11 sequences."""
    a, b = write(folder / "a.hdf", 11), write(folder / "b.hdf", 6, first=11)
    text = write(folder / "text.hdf", 17, keys=("text",))
    both = {"class": "HDFDataset", "files": [a, b]}
    return {
        "HDFDataset": both,
        "FilesDataset": {"class": "FilesDataset", "files": [a, b], "max_open_files": 1},
        "MetaDataset": {
            "class": "MetaDataset",
            "datasets": {"both": both, "text": text},
            "data_map": {"data": ("both", "data"), "words": ("text", "text")},
        },
        "CombinedDataset": {
            "class": "CombinedDataset",
            "datasets": {"a": a, "text": text},
            "data_map": {("a", "data"): "data", ("a", "classes"): "classes", ("text", "text"): "classes"},
        },
        "ConcatDataset": {"class": "ConcatDataset", "datasets": [a, both, b]},
        "MapDataset": {"class": "MapDataset", "dataset": both, "map_seq": lambda arrays: {**arrays, "data": -arrays["data"]}},
        "workers": {"class": "MapDataset", "dataset": both, "map_seq": lambda arrays: arrays, "num_workers": 2},
        "Task12AXDataset": {"class": "Task12AXDataset", "num_seqs": 20},
        "DummyDataset": {"class": "DummyDataset", "input_dim": 3, "output_dim": 5, "num_seqs": 13, "seq_len": 4},
    }


CLASSES = "FilesDataset MetaDataset CombinedDataset ConcatDataset MapDataset workers Task12AXDataset DummyDataset".split()


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_keeps_the_contract_and_every_sequence_is_used_once_over_three_ranks(tmp_path: Path, name: str) -> None:
    dataset = opened(whole(tmp_path)[name])
    check_contract(dataset)
    for ordering in ("default", "random", "laplace:.3"):
        made = plan(dataset.lengths, OrderKeys(seq_ordering=ordering, partition_epoch=2), BatchKeys(max_seqs=2), 1)
        rest = plan(dataset.lengths, OrderKeys(seq_ordering=ordering, partition_epoch=2), BatchKeys(max_seqs=2), 2)
        used = Counter[int]()
        for part in (made, rest):
            for rank in range(3):
                for batch in map(dataset.batch, part.rank_batches(rank, 3)):
                    used.update(batch.indices.tolist())
        assert used == Counter(range(dataset.num_sequences))
    dataset.close()


def test_the_document_names_every_class_and_its_examples_are_right() -> None:
    text = (ROOT / "docs" / "datasets.md").read_text(encoding="utf-8")
    # The examples of the first two sections are run by tests/data/formats/test_items.py and test_iterable.py.
    text = text[: text.index("## Items of your own")] + text[text.index("\n## HDFDataset\n") :]
    for name in KINDS:
        assert re.search(rf"^## (\w+ and )?{name}( and \w+)?$", text, flags=re.MULTILINE), name
    examples = [block.code for block in blocks_of(text) if block.language == "python" and "mark_as_loss" not in block.code]
    assert len(examples) > len(KINDS)
    checked = 0
    for example in examples:
        values: dict[str, Any] = {"numpy": numpy}
        exec(example, values)
        for name in ("train", "dev"):
            if name in values:
                assert parse(name, values[name], {})[1] == [], example
                checked += 1
    assert checked > len(KINDS)


# CombinedDataset and ConcatDataset


def test_combined_fills_missing_keys_with_nothing(tmp_path: Path) -> None:
    dataset = opened(whole(tmp_path)["CombinedDataset"])
    assert dataset.num_sequences == 11 + 17
    assert dataset.sequence(8)["data"].tolist() == [[8, 8, 8]]
    assert dataset.sequence(11 + 8)["data"].shape == (0, 3)
    assert dataset.sequence(11 + 8)["classes"].tolist() == 4 * [8]
    assert dataset.lengths["data"][11:].tolist() == 17 * [0]
    assert dataset.tags([10, 11, 12]) == ["seq-10", "seq-0", "seq-1"]
    batch = dataset.padded(numpy.array([12, 13]))
    assert batch["data"].values.shape == (2, 0, 3)


def test_concat_puts_one_behind_the_other(tmp_path: Path) -> None:
    dataset = opened(whole(tmp_path)["ConcatDataset"])
    numbers = [*range(11), *range(17), *range(11, 17)]
    assert dataset.tags(range(dataset.num_sequences)) == [f"seq-{number}" for number in numbers]
    assert [int(dataset.sequence(index)["classes"][0]) for index in range(len(numbers))] == numbers
    assert dataset.lengths["data"].tolist() == [number % 7 for number in numbers]


def test_datasets_that_do_not_go_together(tmp_path: Path) -> None:
    first, wide = write(tmp_path / "a.hdf", 3), write(tmp_path / "wide.hdf", 3, dim=4)
    with pytest.raises(DataError, match=r"^train, data key 'data': expected frames of shape \(3,\) .* as in 0, got .* in 1$"):
        opened({"class": "ConcatDataset", "datasets": [first, wide]})
    with pytest.raises(DataError, match=r"^train: expected the data key 'classes' of 0 in 1, got data$"):
        opened({"class": "ConcatDataset", "datasets": [first, write(tmp_path / "less.hdf", 3, keys=("data",))]})
    data_map = {("a", "data"): "data", ("b", "data"): "data"}
    with pytest.raises(DataError, match=r"^train, data key 'data': expected .* as in a.data, got .* in b.data$"):
        opened({"class": "CombinedDataset", "datasets": {"a": first, "b": wide}, "data_map": data_map})
    with pytest.raises(DataError, match=r"^train.data_map: expected a data key of a \(data, classes\), got 'sound'$"):
        opened({"class": "CombinedDataset", "datasets": {"a": first}, "data_map": {("a", "sound"): "data"}})


class Longer(Dataset):
    """Sequences that are longer than announced."""

    num_sequences = 2

    def __init__(self) -> None:
        self.streams = {"data": Stream(numpy.dtype("float32"), (1,), 1, sparse=False)}
        self.lengths = {"data": numpy.array([3, 5], numpy.int32)}

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        return {"data": numpy.ones((6, 1), numpy.float32)}

    def tags(self, indices: Sequence[int]) -> list[str]:
        return [f"seq-{index}" for index in indices]


@pytest.mark.parametrize("packed", [[], ["data"]])
def test_lengths_that_were_not_announced_are_not_hidden(packed: list[str]) -> None:
    joined = concatenate("train", {"one": Longer(), "two": Longer()})
    assert joined.packed(numpy.array([0, 3, 1, 2] * 5), packed)["data"].seq_lens.tolist() == [6] * 20


def test_labels_must_be_the_same(tmp_path: Path) -> None:
    for name, labels in (("a", ["x", "y"]), ("b", ["x", "y"]), ("c", ["y", "x"])):
        with HDFWriter(tmp_path / f"{name}.hdf", labels={"classes": labels}) as writer:
            writer.add(name, {"classes": numpy.array([0, 1], numpy.int32)})
    paths = [str(tmp_path / f"{name}.hdf") for name in "abc"]
    assert opened({"class": "ConcatDataset", "datasets": paths[:2]}).streams["classes"].labels == ("x", "y")
    with pytest.raises(DataError, match=r"expected the labels of 0, got others in 2 \(the first difference is at index 0\)"):
        opened({"class": "ConcatDataset", "datasets": paths})


def test_types_that_differ_are_read_as_the_larger_one(tmp_path: Path) -> None:
    for name, kind in (("a", numpy.float32), ("b", numpy.float64)):
        with HDFWriter(tmp_path / f"{name}.hdf") as writer:
            writer.add(name, {"data": numpy.full((2, 1), 1 / 3, kind)})
    dataset = opened({"class": "ConcatDataset", "datasets": [str(tmp_path / "a.hdf"), str(tmp_path / "b.hdf")]})
    check_contract(dataset)
    assert dataset.sequence(1)["data"][0, 0] == 1 / 3


def test_malformed_unions() -> None:
    assert problems_of({"class": "ConcatDataset", "datasets": []}) == ["train.datasets: missing"]
    assert problems_of({"class": "ConcatDataset", "datasets": ["a.hdf", {"files": "b.hdf", "fil": 1}]}) == [
        "train.datasets.1.fil: unknown-key"
    ]
    assert problems_of(
        {
            "class": "CombinedDataset",
            "datasets": {"a": "a.hdf", "b": "b.hdf"},
            "data_map": {"a": "data", ("c", "data"): "data", ("a", "x"): "data", ("a", "y"): "data"},
            "interleave": 3,
        }
    ) == [
        "train.interleave: unknown-key",
        "train.data_map: wrong-type",
        "train.data_map: unknown-value",
        "train.data_map: duplicate",
        "train.data_map: missing",
    ]


# FilesDataset


def test_few_files_are_open_at_a_time(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.hdf", 3, first=3 * number) for number in range(6)]
    dataset = opened({"class": "FilesDataset", "files": paths, "max_open_files": 2})
    assert isinstance(dataset, FilesDataset)
    pool = dataset._dataset._pool
    assert len(pool._open) == 0
    assert dataset.file_bounds().tolist() == [0, 3, 6, 9, 12, 15, 18]
    for index in numpy.random.default_rng(0).permutation(18).tolist():
        assert dataset.sequence(index)["classes"].tolist() == (index % 5 + 1) * [index]
        assert len(pool._open) <= 2
    assert dataset.tags([17, 0, 9]) == ["seq-17", "seq-0", "seq-9"]
    dataset.close()
    assert len(pool._open) == 0


def test_files_that_change_or_do_not_go_together(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{number}.hdf", 3, first=3 * number) for number in range(2)]
    dataset = opened({"class": "FilesDataset", "files": paths})
    Path(paths[1]).unlink()
    write(tmp_path / "1.hdf", 3, first=40)
    with pytest.raises(DataError, match=r"1.hdf: expected the same lengths as at the start, got different ones in 'data'"):
        dataset.sequence(5)
    with pytest.raises(DataError, match=r"none.hdf: expected an HDF file, got: no such file"):
        opened({"class": "FilesDataset", "files": [*paths, str(tmp_path / "none.hdf")]})
    with pytest.raises(DataError, match=r"^train, data key 'data': .* in .*wide.hdf \(file 2\)$"):
        opened({"class": "FilesDataset", "files": [*paths, write(tmp_path / "wide.hdf", 1, dim=9)]})
    assert problems_of({"class": "FilesDataset", "files": [], "max_open_files": 0}) == ["train.max_open_files: out-of-range"]
    assert problems_of({"class": "FilesDataset", "files": []}) == ["train.files: missing"]
    [misspelt] = parse("train", {"class": "FileDataset", "files": paths}, {})[1]
    assert "FilesDataset?" in misspelt.hint


# MapDataset


def mapped(folder: Path, map_seq: Any, **options: Any) -> Dataset:
    inside = write(folder / "inside.hdf", 30)
    return opened({"class": "MapDataset", "dataset": inside, "map_seq": map_seq, **options})


def halved(arrays: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
    """Every second frame, in another type, and the number of frames as a new key."""
    return {"data": arrays["data"][::2, :1].astype(numpy.float64), "count": numpy.array([len(arrays["data"])])}


HALVED = {
    "map_seq": halved,
    "map_outputs": {"data": {"dim": 1, "dtype": "float64"}, "count": {"dim": 7, "sparse": True, "dtype": "int64"}},
    "map_lengths": lambda lengths: {"data": (lengths["data"] + 1) // 2, "count": numpy.ones_like(lengths["data"])},
}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_outputs_and_lengths_are_those_declared(tmp_path: Path, num_workers: int) -> None:
    dataset = mapped(tmp_path, num_workers=num_workers, **HALVED)
    check_contract(dataset)
    assert dataset.lengths["data"].tolist() == [(number % 7 + 1) // 2 for number in range(30)]
    assert dataset.sequence(4)["count"].tolist() == [4]
    dataset.close()


def test_the_order_keys_of_the_dataset_inside_hold_but_not_its_own_seed() -> None:
    spec, _ = parse("dev", {"class": "Task12AXDataset", "num_seqs": 5, "fixed_random_seed": 3, "seq_ordering": "random"}, {})
    assert spec is not None
    assert (spec.order.fixed_random_seed, spec.order.seq_ordering) == (None, "random")
    inside = {"class": "HDFDataset", "files": "a.hdf", "seq_ordering": "laplace:.10"}
    spec, found = parse("train", {"class": "MapDataset", "dataset": inside, "map_seq": halved, "partition_epoch": 3}, {})
    assert spec is not None, found
    assert (spec.order.seq_ordering, spec.order.partition_epoch) == ("laplace:.10", 3)


@pytest.mark.parametrize(
    ("map_seq", "message"),
    [
        (lambda arrays: None, r"^train.map_seq: expected a dict of arrays, got NoneType for sequence 8"),
        (
            lambda arrays: arrays | {"data": torch.tensor(arrays["data"], requires_grad=True)},
            r"^train.map_seq: expected an array in 'data', got Tensor for sequence 8: Can't call numpy\(\)",
        ),
        (lambda arrays: {"data": arrays["data"]}, r"expected the data key 'classes', got only 'data' for sequence 8"),
        (
            lambda arrays: {**arrays, "data": arrays["data"][:0]},
            r"expected 1 frames in 'data', got 0 for sequence 8 \(return .* map_len",
        ),
        (
            lambda arrays: {**arrays, "data": arrays["data"][:, :2]},
            r"frames of shape \(3,\) in 'data', got float32 of shape \(2,\)",
        ),
        (lambda arrays: {**arrays, "classes": arrays["classes"] / 2}, r"expected int32 frames .*, got float64"),
        (
            lambda arrays: {**arrays, "classes": arrays["classes"] + numpy.int64(2**40)},
            r"expected numbers that int32 holds in 'classes', got int64",
        ),
        (lambda arrays: {**arrays, "classes": 3}, r"expected int32 frames .*, got the number 3"),
    ],
)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_sequences_that_are_not_as_announced(tmp_path: Path, map_seq: Any, message: str, num_workers: int) -> None:
    dataset = mapped(tmp_path, map_seq, num_workers=num_workers)
    with pytest.raises(DataError, match=message):
        dataset.padded(numpy.array([8]))
    dataset.close()


def test_exceptions_come_with_the_workers_traceback_and_the_next_batch_is_right(tmp_path: Path) -> None:
    def sometimes(arrays: dict[str, numpy.ndarray]) -> dict[str, numpy.ndarray]:
        if arrays["classes"][0] == 13:
            raise LookupError("thirteen")
        return arrays

    with pytest.raises(LookupError) as plain:
        mapped(tmp_path, sometimes).sequence(13)
    assert plain.value.__notes__ == ["in train.map_seq, sequence 13"]
    (tmp_path / "inside.hdf").unlink()
    dataset = mapped(tmp_path, sometimes, num_workers=2)
    for _ in range(2):
        with pytest.raises(RuntimeError) as caught:
            dataset.padded(numpy.arange(30))
        assert "LookupError: thirteen\nin train.map_seq, sequence 13\n" in str(caught.value)
        assert "in sometimes" in str(caught.value)
        order = numpy.array([29, 3, 17, 5, 2, 20, 21, 22, 23, 24, 25, 1])
        batch = dataset.padded(order)
        assert batch["classes"].values[:, 0].tolist() == order.tolist()
    dataset.close()


def test_workers_do_the_work_and_end(tmp_path: Path) -> None:
    dataset = mapped(
        tmp_path,
        lambda arrays: {"process": numpy.array([os.getpid()])},
        map_outputs={"process": {"dim": 1 << 30, "sparse": True, "dtype": "int64"}},
        map_lengths=lambda lengths: {"process": numpy.ones(30, int)},
        num_workers=2,
    )
    found = set(dataset.padded(numpy.arange(30))["process"].values[:, 0].tolist())
    assert len(found) == 2
    assert os.getpid() not in found
    dataset.close()
    for process in found:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_workers_end_at_once_while_processes_live_that_were_forked_later() -> None:
    """Those keep the pipes open whose closing would end them."""
    both = [Workers[int](1, lambda number: number + 1) for _ in range(2)]
    for workers in both:
        workers.start()
    processes = [process for workers in both for process in workers._processes]
    began = time.monotonic()
    for workers in both:
        assert workers.results([1]) == [2]
        workers.close()
    assert time.monotonic() - began < 4.5
    assert [process.exitcode for process in processes] == [0, 0]


def planted() -> None:
    raise ValueError("planted")


def hidden() -> None:
    """As RETURNN's threads end after an error."""
    try:
        planted()
    except ValueError:
        sys.exit(1)


@pytest.mark.parametrize("fails", [planted, hidden])
def test_an_error_in_a_thread_is_raised_where_the_main_thread_waits(fails: Callable[[], None]) -> None:
    errors = ThreadErrors()

    def work(target: Callable[[], None]) -> str:
        errors.watch()
        with errors.reraise():
            threading.Thread(target=target).start()
            while target is not sys.exit:
                threading.Event().wait(600)
        return "nothing has failed"

    workers = Workers(1, work)
    workers.start()
    assert workers.results([sys.exit]) == ["nothing has failed"]
    with pytest.raises(RuntimeError, match=r"ValueError: planted(.|\n)*ThreadFailed"):
        workers.results([fails])
    workers.close()


def test_a_worker_that_dies_is_reported(tmp_path: Path) -> None:
    dataset = mapped(tmp_path, lambda arrays: os.kill(os.getpid(), signal.SIGKILL), num_workers=2)
    with pytest.raises(RuntimeError, match=r"worker process 0 ended with exit code -9"):
        dataset.padded(numpy.arange(30))
    dataset.close()


@pytest.mark.parametrize(
    ("map_lengths", "message"),
    [
        (lambda lengths: 3, "expected a dict of lengths, got int"),
        (lambda lengths: {"data": lengths["data"]}, "expected the lengths of 'classes', got only 'data'"),
        (
            lambda lengths: {**lengths, "data": lengths["data"] - 1},
            "expected 30 integers of 0 or more for 'data', got int32 .* from -1",
        ),
        (lambda lengths: {**lengths, "data": lengths["data"] / 2}, "expected 30 integers .*, got float64"),
        (lambda lengths: {**lengths, "data": [1, 2]}, r"expected 30 integers .*, got int64 of shape \(2,\)"),
    ],
)
def test_lengths_that_make_no_sense(tmp_path: Path, map_lengths: Any, message: str) -> None:
    with pytest.raises(DataError, match=rf"^train.map_lengths: {message}"):
        mapped(tmp_path, lambda arrays: arrays, map_lengths=map_lengths)


def test_malformed_maps() -> None:
    value = {
        "class": "MapDataset",
        "dataset": {"class": "HDFDataset", "files": "a.hdf", "fil": 1},
        "map_seq": "not python",
        "map_outputs": {
            "a": 3,
            "b": {"dim": 0, "sparce": 1},
            "c": {"dim": 1, "dtype": "flaot"},
            "d": {"dim": 1, "sparse": True, "dtype": "f4"},
        },
        "num_workers": 0,
    }
    assert problems_of(value) == [
        "train.map_seq: wrong-type",
        "train.map_outputs.a: wrong-type",
        "train.map_outputs.b.dim: out-of-range",
        "train.map_outputs.b.sparce: unknown-key",
        "train.map_outputs.c.dtype: unknown-value",
        "train.map_outputs.d.dtype: unknown-value",
        "train.dataset.fil: unknown-key",
    ]
