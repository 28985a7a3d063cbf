"""Trainings on shards and with checkpoints in an object store: weights as with local files, on any number of ranks."""

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy
import pyarrow
import pyarrow.parquet
import pytest
from object_store import ObjectStore, object_store
from trainings import ResultsOf, Run, assert_same, marked, trains

from hvdtrain.data.hdf.dataset import open_hdf

pytestmark = pytest.mark.slow

TWO = Run("torch", "horovod", 2)
AGAIN = [Run("torch", "horovod", size) for size in (1, 3)]

SHARDS = 5

ENTRIES = {"data": "npy", "classes": "cls.npy", "id": "id"}

SOURCES: dict[str, dict[str, object]] = {
    "tar": {"class": "TarDataset", "files": "s3://bucket/train-{0..4}.tar", "entries": ENTRIES},
    "parquet": {"class": "ParquetDataset", "files": "s3://bucket/train-{0..4}.parquet", "tag": "name"},
    "arrow": {"class": "ArrowDataset", "files": "s3://bucket/train-{0..4}.arrow", "tag": "name"},
}


STOPPED = ["tar", "parquet"]
"""Those whose trainings are stopped on two ranks."""


def sources_of(run: Run) -> list[str]:
    """All of them on two ranks."""
    return list(SOURCES) if run.size == 2 else STOPPED


SYNCED = {"horovod_reduce_type": "param", "horovod_param_sync_step": 7, "layers": "statistics"}
"""With which the ranks differ within an epoch, so that each has a file."""


@trains(slow=[TWO], apart=True, again=AGAIN)
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    """A local HDF file, and the same sequences from elsewhere."""
    common = {"optimizer": {"class": "adam"}, "num_epochs": 2, "parts": 2, "lengths_dir": folder / "lengths"}
    made: dict[str, dict[str, object]] = {"local": common}
    for name in sources_of(run):
        train = {**SOURCES[name], "seq_ordering": "random", "partition_epoch": 2}
        made[name] = {**common, "train": train, "cache_dir": folder / "near"}
        if run.size == 2 and name in STOPPED:
            made[name] |= {"fault": "SIGTERM,1,3,14", "save_interval_steps": 8}
    if run.size == 2:
        made["whole"] = common | SYNCED
        mirrored = common | SYNCED | {"checkpoint_mirror": "s3://bucket/exp/synced/"}
        made["stopped"] = mirrored | {"fault": "SIGTERM,1,3", "save_interval_steps": 3, "once": True}
        made["moved"] = mirrored  # to another folder, as on another machine
    return made


def npy(array: numpy.ndarray) -> bytes:
    stream = io.BytesIO()
    numpy.save(stream, array)
    return stream.getvalue()


def shards(corpus: Path) -> dict[str, bytes]:
    """The corpus as objects of a store, by name."""
    found = {}
    dataset = open_hdf([corpus / "train.hdf"])
    for number, indices in enumerate(numpy.array_split(numpy.arange(dataset.num_sequences), SHARDS)):
        tags = dataset.tags(indices.tolist())
        sequences = [dataset.sequence(index) for index in indices.tolist()]
        stream = io.BytesIO()
        with tarfile.open(fileobj=stream, mode="w") as tar:
            for tag, arrays in zip(tags, sequences, strict=True):
                for key, suffix in ENTRIES.items():
                    content = str(arrays[key][0]).encode() if key == "id" else npy(arrays[key])
                    member = tarfile.TarInfo(f"{tag}.{suffix}")
                    member.size = len(content)
                    tar.addfile(member, io.BytesIO(content))
        found[f"train-{number}.tar"] = stream.getvalue()
        rows = pyarrow.table(
            {
                "name": tags,
                "data": pyarrow.array(
                    [arrays["data"].tolist() for arrays in sequences], pyarrow.list_(pyarrow.list_(pyarrow.float32()))
                ),
                "classes": pyarrow.array([arrays["classes"] for arrays in sequences], pyarrow.list_(pyarrow.int32())),
                "id": pyarrow.array([int(arrays["id"][0]) for arrays in sequences], pyarrow.int32()),
            }
        )
        for suffix in ("parquet", "arrow"):
            stream = io.BytesIO()
            if suffix == "parquet":
                pyarrow.parquet.write_table(rows, stream, row_group_size=10)
            else:
                with pyarrow.ipc.new_file(stream, rows.schema) as writer:
                    writer.write_table(rows)
            found[f"train-{number}.{suffix}"] = stream.getvalue()
    return found


@pytest.fixture(scope="module", autouse=True)
def store(corpus: Path) -> Iterator[ObjectStore]:
    """The objects, of each of which the first request for its content is refused or cut off."""
    with object_store() as running:
        for name, content in shards(corpus).items():
            running.put(name, content)
        running.fault = lambda request: (
            "" if request.number or request.method != "GET" else "cut" if "-1" in request.path else "refuse"
        )
        yield running


@pytest.mark.parametrize("run", [TWO, *marked(AGAIN)], ids=str)
def test_weights_and_scores_are_those_of_the_local_file(results: ResultsOf, store: ObjectStore, run: Run) -> None:
    store.forget()
    made = results(run)
    for name in sources_of(run):
        for rank in range(run.size):
            assert_same(made.weights("local", rank), made.weights(name, rank))
        assert made.scores(name) == made.scores("local")
        assert ("stopped by SIGTERM" in made.out(name)) == (run.size == 2 and name in STOPPED)
    # One complete answer for each object, though there are several ranks, starts and trainings.
    fetched = {
        (path, count) for (_, path, part), count in store.answered.items() if path.startswith("train") and "bytes=" in part
    }
    used = [path for path in store.names() if any(path.startswith("train") and path.endswith(name) for name in sources_of(run))]
    assert fetched == {(path, 1) for path in used}


def test_a_training_goes_on_elsewhere_from_its_mirror(results: ResultsOf, store: ObjectStore) -> None:
    made = results(TWO)
    assert "Fetched " not in made.out("stopped")
    assert "Fetched " in made.out("moved")
    assert re.search(r"Loaded .*/moved/model.001.step-5.pt: training continues", made.out("moved"))
    for rank in range(2):
        assert_same(made.weights("whole", rank), made.weights("moved", rank))
    assert made.scores("moved")[-1] == made.scores("whole")[-1]
    folder = made.models["moved"].parent
    mirrored = {name.removeprefix("exp/synced/") for name in store.names() if name.startswith("exp/synced/")}
    assert mirrored == {path.name for path in folder.glob("model.*.pt")}
    assert all(store.get(f"exp/synced/{name}") == (folder / name).read_bytes() for name in mirrored)
