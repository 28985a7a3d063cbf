"""A contract of every source, within every view: the same bits, however they are asked for. A new source is a line of SOURCES."""

import io
import tarfile
import threading
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import datasets
import h5py
import lhotse
import numpy
import pyarrow
import pyarrow.parquet
import pytest
import torch
from opened_data import opened
from speech_files import write_folder

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.feed import Feed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.order_keys import OrderKeys
from hvdtrain.data.types import Batch, Stream
from hvdtrain.data.views import OneAtATime, View
from hvdtrain.plugins.cache.budget import Budget
from hvdtrain.plugins.hdf_tools.dump import dump
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

datasets.disable_progress_bars()

LENGTHS = (3, 5, 1, 7, 2, 4, 6)

Item = tuple[str, dict[str, numpy.ndarray]]
Made = tuple[str, bytes]
"""The tag of a sequence, and all of its arrays with their types and shapes."""


def item(number: int, corpus: int = 0) -> Item:
    """A sequence of one of two corpora, which have equal names, sizes and lengths."""
    frames = numpy.random.default_rng([number, corpus]).normal(size=(LENGTHS[number], 4)).astype(numpy.float32)
    classes = (numpy.arange(LENGTHS[number]) * 3 + number + corpus).astype(numpy.int32) % 11
    return f"seq-{number}", {"data": frames, "classes": classes}


def items(corpus: int = 0) -> list[Item]:
    return [item(number, corpus) for number in range(len(LENGTHS))]


def write_hdf(path: Path, some: list[Item], dims: dict[str, int] = {"classes": 11}) -> str:  # noqa: B006  it is read
    with HDFWriter(path, dims=dims, overwrite=True) as writer:
        for tag, arrays in some:
            writer.add(tag, arrays)
    return str(path)


def files(folder: Path, corpus: int) -> list[str]:
    some = items(corpus)
    return [write_hdf(folder / f"{number}.hdf", some[a:b]) for number, (a, b) in enumerate([(0, 2), (2, 3), (3, 7)])]


def unaligned(folder: Path, corpus: int) -> str:
    path = write_hdf(folder / "chunked.hdf", items(corpus))
    with h5py.File(path, "r+") as file:
        values = file["inputs"][:]
        del file["inputs"]
        file.create_dataset("inputs", data=values, chunks=(3, 4), compression="gzip")
    return path


def virtual(folder: Path, corpus: int) -> dict[str, Any]:
    """A file whose frames are parts of others."""
    others = files(folder, corpus)
    path = write_hdf(folder / "virtual.hdf", items(corpus))
    layout, place = h5py.VirtualLayout((sum(LENGTHS), 4), "f4"), 0
    for other in others:
        with h5py.File(other) as file:
            shape = file["inputs"].shape
        layout[place : place + shape[0]] = h5py.VirtualSource(Path(other).name, "inputs", shape)
        place += shape[0]
    with h5py.File(path, "r+") as file:
        del file["inputs"]
        file.create_virtual_dataset("inputs", layout)
    return {"class": "HDFDataset", "files": [path], "allow_external": True}


def saved(folder: Path, corpus: int) -> dict[str, Any]:
    """Rows as the package `datasets` saves them."""
    tags, found = zip(*items(corpus), strict=True)
    types = {"tag": datasets.Value("string"), "data": datasets.List(datasets.List(datasets.Value("float32")))}
    types["classes"] = datasets.List(datasets.Value("int32"))
    rows = {"tag": list(tags), **{key: [one[key].tolist() for one in found] for key in ("data", "classes")}}
    datasets.Dataset.from_dict(rows, features=datasets.Features(types)).save_to_disk(folder / "saved")
    return {"class": "HuggingFaceDataset", "folder": str(folder / "saved"), "tag": "tag"}


def folder_of_arrays(folder: Path, corpus: int) -> dict[str, Any]:
    (folder / "arrays").mkdir()
    for tag, one in items(corpus):
        numpy.save(folder / "arrays" / f"{tag}.npy", one["data"])
    (folder / "text").write_text("".join(f"seq-{number} {'ab' * number}\n" for number in range(len(LENGTHS))))
    return {"class": "FolderDataset", "folder": str(folder / "arrays"), "transcript": str(folder / "text")}


def tar(folder: Path, corpus: int) -> str:
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for tag, arrays in items(corpus):
            for key, values in arrays.items():
                stream = io.BytesIO()
                numpy.save(stream, values)
                about = tarfile.TarInfo(f"{tag}.{key}.npy")
                about.size = len(stream.getvalue())
                archive.addfile(about, io.BytesIO(stream.getvalue()))
    return str(folder / "shard.tar")


def table(folder: Path, corpus: int, kind: Literal["parquet", "arrow", "stream"]) -> str:
    tags, arrays = zip(*items(corpus), strict=True)
    rows = pyarrow.table(
        {
            "seq_tag": list(tags),
            "data": pyarrow.array([one["data"].tolist() for one in arrays], pyarrow.list_(pyarrow.list_(pyarrow.float32(), 4))),
            "classes": pyarrow.array([one["classes"].tolist() for one in arrays], pyarrow.list_(pyarrow.int32())),
        }
    )
    path = folder / f"rows.{kind}"
    if kind == "parquet":
        pyarrow.parquet.write_table(rows, path, row_group_size=3)
    else:
        make = pyarrow.ipc.new_file if kind == "arrow" else pyarrow.ipc.new_stream
        with make(path, rows.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
            writer.write_table(rows, max_chunksize=3)
    return str(path)


def use_threads() -> None:
    """Compute with torch's threads, which a process that was forked does not have."""
    torch.ones(1 << 16).exp()


class Items:
    """Of a user, with torch, and not made for two threads: it notes what it reads, and reads that."""

    def __init__(self, corpus: int, named: bool) -> None:
        self._corpus, self._named, self._now = corpus, named, 0

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self._now = index
        use_threads()
        tag, arrays = item(self._now, self._corpus)
        return {**arrays, "seq_tag": tag} if self._named else dict(arrays)


class Foreign:
    """Of a user, with the members of a dataset only."""

    def __init__(self, corpus: int) -> None:
        self._items = items(corpus)
        self.num_sequences = len(LENGTHS)
        self.lengths = dict.fromkeys(("data", "classes"), numpy.array(LENGTHS, numpy.int32))
        self.streams = {
            "data": Stream(numpy.dtype("float32"), (4,), 4, False),
            "classes": Stream(numpy.dtype("int32"), (), 11, True),
        }

    def sequence(self, index: int) -> dict[str, numpy.ndarray]:
        return self._items[index][1]

    def tags(self, indices: list[int]) -> list[str]:
        return [self._items[index][0] for index in indices]

    def file_bounds(self) -> numpy.ndarray:
        return numpy.array([0, 4, 7])


class Iterated:
    def __init__(self, corpus: int) -> None:
        self.corpus = corpus

    def __iter__(self) -> Iterator[Item]:
        return iter(items(self.corpus))


def of_epoch(corpus: int, *, epoch: int) -> Iterator[Item]:
    """The same in all epochs, which only the user knows."""
    return iter(items(corpus))


def kaldi(folder: Path, corpus: int) -> dict[str, Any]:
    write_folder(folder / "train")
    return {"class": "KaldiFolder", "folder": str(folder / "train"), "vocabulary_from": str(folder / "train" / "text")}


def segments(folder: Path, corpus: int) -> dict[str, Any]:
    """Parts of recordings, whose lengths are found by reading; the last one ends with its recording."""
    value = kaldi(folder, corpus)
    lines = [
        f"utt{number:02}-{part} utt{number:02} {part * 0.03} {0.03 * part + 0.03}\n" for number in range(4) for part in (0, 1)
    ]
    (folder / "train" / "segments").write_text("".join([*lines, "utt05-0 utt05 0.02 -1\n"]))
    names = [line.split()[0] for line in (folder / "train" / "segments").read_text().splitlines()]
    (folder / "train" / "text").write_text("".join(f"{name} {'one two'[: 2 + number]}\n" for number, name in enumerate(names)))
    return value


def cuts(folder: Path, corpus: int, kind: Literal["lines", "memory", "shar"] = "lines") -> dict[str, Any]:
    """The sound and the texts of a Kaldi folder as cuts of Lhotse."""
    write_folder(folder / "train")
    texts = [line.partition(" ") for line in (folder / "train" / "text").read_text().splitlines()]
    recordings = lhotse.RecordingSet.from_dir(folder / "train" / "audio", "*.wav")
    supervisions = [
        lhotse.SupervisionSegment(id=name, recording_id=name, start=0, duration=recordings[name].duration, text=text)
        for name, _, text in texts
    ]
    made = lhotse.CutSet.from_manifests(recordings, lhotse.SupervisionSet.from_segments(supervisions)).to_eager()
    value: Any = made
    if kind == "lines":
        value = str(folder / "cuts.jsonl")
        made.to_file(value)
    elif kind == "shar":
        value = str(folder / "shar")
        (folder / "shar").mkdir()
        made.to_shar(folder / "shar", fields={"recording": "wav"}, shard_size=4)
    return {"class": "LhotseDataset", "cuts": value, "vocabulary_from": str(folder / "train" / "text")}


def next_gen(folder: Path, corpus: int) -> dict[str, Any]:
    """Two files with a dataset for every sequence."""
    for number, some in enumerate((items(corpus)[:3], items(corpus)[3:])):
        with h5py.File(folder / f"{number}.hdf", "w") as file:
            file["seq_names"] = [tag for tag, _ in some]
            for key, parser in (("data", "feature_sequence"), ("classes", "sparse")):
                stream = file.create_group(f"streams/{key}")
                stream.attrs["parser"] = parser
                stream["feature_names"] = [str(label) for label in range(11)]
                for tag, arrays in some:
                    stream[f"data/{tag}"] = arrays[key]
    paths = [str(folder / f"{number}.hdf") for number in range(2)]
    return {"class": "NextGenHDFDataset", "files": paths, "input_stream_name": "data"}


SOURCES: dict[str, Callable[[Path, int], Any]] = {
    "HDF": lambda folder, corpus: write_hdf(folder / "one.hdf", items(corpus)),
    "HDF, compressed": unaligned,
    "HDF, several": lambda folder, corpus: files(folder, corpus),
    "HDF, virtual": virtual,
    "FilesDataset": lambda folder, corpus: {"class": "FilesDataset", "files": files(folder, corpus), "max_open_files": 2},
    "TarDataset": lambda folder, corpus: {"class": "TarDataset", "files": [tar(folder, corpus)]},
    "ParquetDataset": lambda folder, corpus: {
        "class": "ParquetDataset",
        "files": [table(folder, corpus, "parquet")],
        "tag": "seq_tag",
    },
    "ArrowDataset": lambda folder, corpus: {
        "class": "ArrowDataset",
        "files": [table(folder, corpus, "arrow")],
        "tag": "seq_tag",
    },
    "ArrowDataset, stream": lambda folder, corpus: {
        "class": "ArrowDataset",
        "files": [table(folder, corpus, "stream")],
        "tag": "seq_tag",
    },
    "HuggingFaceDataset": saved,
    "FolderDataset": folder_of_arrays,
    "items": lambda folder, corpus: {"class": Items, "corpus": corpus, "named": False},
    "items with tags": lambda folder, corpus: {"class": Items, "corpus": corpus, "named": True},
    "foreign": lambda folder, corpus: {"class": Foreign, "corpus": corpus},
    "iterable": lambda folder, corpus: {"class": "IterableDataset", "iterable": Iterated(corpus)},
    "iterable of an epoch": lambda folder, corpus: {"class": of_epoch, "corpus": corpus},
    "KaldiFolder": kaldi,
    "KaldiFolder, segments": segments,
    "LhotseDataset": cuts,
    "LhotseDataset, in memory": lambda folder, corpus: cuts(folder, corpus, "memory"),
    "LhotseDataset, Shar": lambda folder, corpus: cuts(folder, corpus, "shar"),
    "NextGenHDFDataset": next_gen,
    "ReturnnDataset": lambda folder, corpus: {
        "class": "ReturnnDataset",
        "dataset": {"class": "HDFDataset", "files": files(folder, corpus)},
    },
    "ReturnnDataset, in order": lambda folder, corpus: {
        "class": "ReturnnDataset",
        "dataset": {"class": "PostprocessingDataset", "dataset": {"class": "HDFDataset", "files": files(folder, corpus)}}
        | {"map_seq": lambda sequence, **_: sequence},
    },
}
"""By name, a function that writes one of two corpora into a folder, with the same names, and returns the dataset of a config."""

OTHER_VALUES = (*(name for name in SOURCES if name.startswith(("Kaldi", "Lhotse"))), "FolderDataset")
"""Those that do not have the sequences of `items`, or not with the same types."""

UNNAMED = ("items",)
"""Those without names of sequences."""


def the_same(arrays: dict[str, numpy.ndarray], *, epoch: int) -> dict[str, numpy.ndarray]:
    use_threads()
    return arrays


def joined(inside: Any) -> dict[str, Any]:
    return {
        "class": "MetaDataset",
        "datasets": {"one": inside, "other": inside},
        "data_map": {"data": ("one", "data"), "classes": ("other", "classes")},
    }


VIEWS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda inside: inside,
    "MapDataset": lambda inside: {"class": "MapDataset", "dataset": inside, "map_seq": the_same},
    "MapDataset with workers": lambda inside: {"class": "MapDataset", "dataset": inside, "map_seq": the_same, "num_workers": 2},
    "MetaDataset": joined,
    "ConcatDataset": lambda inside: {"class": "ConcatDataset", "datasets": [inside]},
    "CombinedDataset": lambda inside: {
        "class": "CombinedDataset",
        "datasets": {"one": inside},
        "data_map": {("one", "data"): "data", ("one", "classes"): "classes"},
    },
    "MixingDataset": lambda inside: {"class": "MixingDataset", "datasets": {"one": inside}},
}
READ_IN_ORDER = dict.fromkeys((name for name in SOURCES if name.startswith(("iterable", "Returnn"))), ("alone", "MapDataset"))
"""The views that a source can be in that is read from beginning to end."""

ROWS = [(source, view) for source in SOURCES for view in VIEWS if view in READ_IN_ORDER.get(source, VIEWS)]


def made(tag: str, arrays: dict[str, numpy.ndarray]) -> Made:
    parts = [
        (key, str(values.dtype), values.shape, values.tolist() if values.dtype == object else values.tobytes())
        for key, values in sorted(arrays.items())
    ]
    return tag, repr(parts).encode()


def of_batch(batch: Batch) -> list[Made]:
    """The sequences of a batch."""
    assert batch.seq_tags is not None
    columns = {key: padded.sequences() for key, padded in batch.data.items()}
    rows = zip(*columns.values(), strict=True)
    return [made(tag, dict(zip(columns, row, strict=True))) for tag, row in zip(batch.seq_tags(), rows, strict=True)]


def read(feed: Feed, epoch: int = 1, position: int = 0) -> list[Made]:
    with feed.read(feed.rank_batches(feed.plan(epoch), position), epoch) as batches:
        return [row for batch in batches for row in of_batch(batch)]


def by_index(dataset: Dataset) -> list[Made]:
    now, indices = dataset.at_epoch(1), range(dataset.num_sequences)
    return [made(*pair) for pair in zip(now.tags(indices), map(now.sequence, indices), strict=True)]


def together(dataset: Dataset) -> list[Made]:
    now, indices = dataset.at_epoch(1), list(range(dataset.num_sequences))
    return [made(*pair) for pair in zip(now.tags(indices), now.sequences(indices), strict=True)]


def feed_of(dataset: Dataset, rank: int = 0, size: int = 1, **keys: Any) -> Feed:
    return Feed("train", OneAtATime(dataset), OrderKeys(), BatchKeys(max_seqs=2, **keys), rank, size)


def batched(dataset: Dataset, **keys: Any) -> list[Made]:
    return read(feed_of(dataset, **keys))


def of_two_ranks(dataset: Dataset) -> list[Made]:
    return [row for rank in range(2) for row in read(feed_of(dataset, rank, 2))]


def resumed(dataset: Dataset) -> list[Made]:
    feed = feed_of(dataset)
    with feed.read(feed.rank_batches(feed.plan(1)), 1) as batches:
        first = [row for batch in islice(batches, 2) for row in of_batch(batch)]
    return first + read(feed, position=2)


def with_tags_from_another_thread(dataset: Dataset) -> list[Made]:
    feed, wrong, ended = feed_of(dataset), list[str](), threading.Event()
    expected = dataset.tags(range(dataset.num_sequences))

    def ask() -> None:
        while not ended.wait(0.001):
            for index, tag in enumerate(expected):
                wrong.extend(got for got in feed.dataset.tags([index]) if got != tag)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        return read(feed)
    finally:
        ended.set()
        thread.join()
        assert not wrong


ACCESSES: dict[str, Callable[[Dataset], list[Made]]] = {
    "sequence": by_index,
    "sequences": together,
    "padded": batched,
    "packed": lambda dataset: batched(dataset, packed=True),
    "two ranks": of_two_ranks,
    "resumed": resumed,
    "tags from another thread": with_tags_from_another_thread,
}


@pytest.fixture
def threads(view: str) -> Iterator[None]:
    """Torch computes in several threads where worker processes are forked afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2 if "workers" in view else 1)
    use_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Any]:
    return cache(lambda source, corpus: SOURCES[source](tmp_path_factory.mktemp("corpus"), corpus))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("source", "view"), ROWS, ids=lambda value: str(value).replace(" ", "-"))
def test_every_way_to_read_a_source_gives_the_same(
    source: str, view: str, corpora: Callable[[str, int], Any], tmp_path: Path
) -> None:
    for corpus, budget in enumerate((Budget(0), Budget(None))):  # with the same place for what is found out about both
        value = VIEWS[view](corpora(source, corpus))
        dataset = opened(value, cache=budget, scanning=Scanning(tmp_path / "lengths"))
        expected = [made(*one) for one in items(corpus)] if source not in OTHER_VALUES else by_index(dataset)
        if source in UNNAMED:
            expected = [(tag, arrays) for tag, (_, arrays) in zip(dataset.tags(range(len(LENGTHS))), expected, strict=True)]
        for name, access in ACCESSES.items():
            assert sorted(access(dataset)) == sorted(expected), f"{name}, corpus {corpus}"
        dataset.close()
    spec, problems = parse("train", value, {})
    assert spec is not None, problems
    dump(spec, tmp_path / "dumped.hdf", Selection(), Peers())
    assert sorted(by_index(open_hdf([tmp_path / "dumped.hdf"]))) == sorted(expected), "dump"


def test_a_view_has_every_member_of_a_dataset() -> None:
    """A member that is added to `Dataset` must be forwarded by `View`. Batches are made with what the view itself returns."""
    members = {name for name in {*vars(Dataset), *Dataset.__annotations__} if not name.startswith("_")}
    assert members - vars(View).keys() == {"batch"}
    methods = {name for name, member in vars(View).items() if callable(member) and not name.startswith("_")}
    assert methods - vars(OneAtATime).keys() == {"file_bounds", "how_read", "warnings"}, "those that read do so one at a time"
