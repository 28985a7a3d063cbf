"""Several sequences at once, through everything that may stand around a MapDataset: its workers make them, in order."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from opened_data import opened

from hvdtrain.data.dataset import Dataset
from hvdtrain.plugins.chunks.fixed import ChunkedDataset, make_chunks
from hvdtrain.plugins.chunks.keys import ChunkKeys
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def with_pid(arrays: dict[str, Any]) -> dict[str, Any]:
    return {**arrays, "data": numpy.concatenate([arrays["data"], numpy.full((len(arrays["data"]), 1), os.getpid())], axis=1)}


@pytest.fixture
def mapped(tmp_path: Path) -> dict[str, Any]:
    """A dataset dict: 12 sequences of 5 frames (number of the sequence, of the frame, of the process that made it)."""
    with HDFWriter(tmp_path / "file.hdf") as writer:
        for number in range(12):
            frames = numpy.array([(number, frame) for frame in range(5)], dtype=numpy.float64)
            writer.add(f"seq-{number}", {"data": frames})
    return {
        "class": "MapDataset",
        "dataset": str(tmp_path / "file.hdf"),
        "map_seq": with_pid,
        "map_outputs": {"data": {"dim": 3, "dtype": "float64"}},
        "num_workers": 2,
    }


AROUND: dict[str, Any] = {
    "nothing": lambda inside: inside,
    "MetaDataset": lambda inside: {"class": "MetaDataset", "datasets": {"a": inside}, "data_map": {"data": ("a", "data")}},
    "ConcatDataset": lambda inside: {"class": "ConcatDataset", "datasets": [inside]},
}


@pytest.fixture(params=AROUND)
def dataset(request: pytest.FixtureRequest, mapped: dict[str, Any]) -> Iterator[Dataset]:
    found = opened(AROUND[request.param](mapped))
    yield found
    found.close()


def test_sequences_come_in_the_order_asked_for_from_the_workers(dataset: Dataset) -> None:
    made = dataset.sequences([7, 3, 7, 11])
    assert [arrays["data"][0, 0] for arrays in made] == [7, 3, 7, 11]
    pids = {arrays["data"][0, 2] for arrays in made}
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert dataset.sequences([]) == []


def test_chunks_come_from_the_workers(dataset: Dataset) -> None:
    chunks = make_chunks(dataset.lengths, ChunkKeys(chunking="2:2"))
    assert chunks is not None
    order = chunks.numbers_of(numpy.array([4, 9, 1, 0]))
    chunked = ChunkedDataset(dataset, chunks)
    made = [chunked.batch(indices) for indices in (order[:4], order[4:5], order[5:])]
    assert [batch.indices.tolist() for batch in made] == [[4, 4, 4, 9], [9], [9, 1, 1, 1, 0, 0, 0]]
    rows = [
        [tuple(frame[:2]) for frame in row[:length]]
        for batch in made
        for row, length in zip(batch.data["data"].values.tolist(), batch.data["data"].seq_lens, strict=True)
    ]
    assert rows == [
        [(number, frame) for frame in range(first, min(first + 2, 5))] for number in (4, 9, 1, 0) for first in (0, 2, 4)
    ]
    pids = {row[0][2] for batch in made for row in batch.data["data"].values.tolist()}
    assert os.getpid() not in pids


def test_whole_sequences_come_from_the_workers(dataset: Dataset) -> None:
    batch = dataset.batch(numpy.arange(12))
    assert batch.data["data"].values[:, 0, 0].tolist() == list(range(12))
    assert len(set(batch.data["data"].values[:, 0, 2].tolist()) - {os.getpid()}) == 2
