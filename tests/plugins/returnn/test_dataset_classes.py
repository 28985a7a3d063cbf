"""The classes of RETURNN's datasets one by one: what is trained on is what RETURNN's own object gives.

More of them are in test_dataset_training.py.
"""

import pickle
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import h5py
import numpy
import pytest
import soundfile
from launching import ROOT
from returnn.datasets.lm import ConfusionNetworkDataset
from returnn.sprint.cache import FileArchive
from returnn_epochs import MAX_SEQS, assert_equal, epochs_by_returnn, hdf, opened, read

from hvdtrain.errors import DataError
from hvdtrain.plugins.returnn.dataset_dicts import BY_RETURNN

Maker = Callable[[Path], dict[str, Any]]
first = itemgetter(0)
WORDS = "eins zwei drei vier".split()
IN_TWO = {"seq_ordering": "random", "partition_epoch": 2}


def task12ax(folder: Path) -> dict[str, Any]:
    return {"class": "ReturnnDataset", "dataset": {"class": "Task12AXDataset", "num_seqs": 15, **IN_TWO}}


def dummy(folder: Path) -> dict[str, Any]:
    inside = {"class": "DummyDataset", "num_seqs": 13, "input_dim": 3, "output_dim": 4, "seq_len": 5, **IN_TWO}
    return {"class": "ReturnnDataset", "dataset": inside}


def anything(folder: Path) -> dict[str, Any]:
    """It takes over the sequences of another one."""
    keys = {"data": {"shape": (None, 3), "dim": 3, "dtype": "float32"}}
    inside = {
        "anything": {"class": "AnythingDataset", "data_keys": keys},
        "corpus": {"class": "HDFDataset", "files": [hdf(folder)], **IN_TWO},
    }
    data_map = {"data": ("corpus", "data"), "zeros": ("anything", "data")}
    return {"class": "MetaDataset", "datasets": inside, "data_map": data_map, "seq_order_control_dataset": "corpus"}


def clusters(folder: Path) -> dict[str, Any]:
    items = "\n".join(f'<map-item key="seq-{number}" value="{number % 3}"/>' for number in range(20))
    (folder / "clusters.xml").write_text(f'<?xml version="1.0"?>\n<coprus-key-map>\n{items}\n</coprus-key-map>\n')
    inside = {"class": "HDFDataset", "files": [hdf(folder)], **IN_TWO}
    return {"class": "ClusteringDataset", "dataset": inside, "cluster_map_file": str(folder / "clusters.xml"), "n_clusters": 3}


def confusion_networks(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)

    def slot() -> str:
        return "__".join(f"{word}|{rng.uniform():.3f}" for word in rng.choice(WORDS, rng.randint(1, 4)))

    def plain() -> str:
        return " ".join(rng.choice(WORDS, rng.randint(1, 6)))

    networks = [" ".join(["__ALT__", *(slot() for _ in range(rng.randint(1, 6)))]) for _ in range(8)]
    for side, lines in {"source": [*networks, *(plain() for _ in range(7))], "target": [plain() for _ in range(15)]}.items():
        (folder / f"{side}.train").write_text("\n".join(lines) + "\n", encoding="utf-8")
        labels = {word: number for number, word in enumerate([*WORDS, "<unk>"])}
        (folder / f"{side}.vocab.pkl").write_bytes(pickle.dumps(labels))
    keys = {"path": str(folder), "file_postfix": "train", "max_density": 3, "unknown_label": "<unk>"}
    return {"class": "ConfusionNetworkDataset", **keys, **IN_TWO}


def enwik8(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    with h5py.File(folder / "enwik8.hdf5", "w") as file:
        file.attrs["unique"] = numpy.array([10, 97, 98, 195, 164], "uint8")
        file["split/training/default"] = rng.randint(0, 5, 100)
    return {"class": "Enwik8Corpus", "path": str(folder), "subset": "training", "seq_len": 7, **IN_TWO}


SPRINT = """
import pickle, random, re, struct, sys
with open(sys.argv[1], "rb") as file:
    begin, *sequences, end = pickle.load(file)
arguments = " ".join(sys.argv)
random.Random(re.search("--[*][.]seed=([0-9]+)", arguments)[1]).shuffle(sequences)
part = re.search("select-partition=([0-9])", arguments)
with open(int(re.search("c2p_fd:([0-9]+)", arguments)[1]), "wb") as pipe:
    for message in [begin, *sequences[int(part[1]) if part else 0 :: 2], end]:
        pipe.write(struct.pack("<i", len(message)) + message)
"""
"""What stands for the program Sprint: it sends what was given to it, in another order for every seed."""


def extern_sprint(folder: Path) -> dict[str, Any]:
    sequences = []
    for number in range(20):
        frames = numpy.full((2, 1 + number % 5), number, "float32")
        targets = {"classes": numpy.full(frames.shape[1], number % 4, "int32"), "orth": WORDS[number % 4]}
        sequences.append(("data", (f"seq-{number}", frames, targets)))
    messages = [pickle.dumps(message) for message in [("init", (2, 4, 20)), *sequences, ("exit", None)]]
    (folder / "messages").write_bytes(pickle.dumps(messages))
    program = [sys.executable, "-I", "-S", "-c", SPRINT, str(folder / "messages")]
    return {"class": "ExternSprintDataset", "sprintTrainerExecPath": program, "sprintConfigStr": "", "partition_epoch": 2}


def noise(path: Path, rng: numpy.random.RandomState, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, rng.uniform(-0.5, 0.5, rng.randint(200, 900)), 16000, **options)


def libri_speech(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    for speaker in (3, 5):
        chapter = folder / "train-clean-100" / str(speaker) / "7"
        lines = []
        for number in range(7):
            noise(chapter / f"{speaker}-7-{number:04}.flac", rng)
            lines.append(f"{speaker}-7-{number:04} {' '.join(rng.choice(WORDS, rng.randint(1, 5)))}")
        (chapter / f"{speaker}-7.trans.txt").write_text("\n".join(lines) + "\n")
    audio = {"features": "raw", "peak_normalization": False}
    targets = {"class": "Utf8ByteTargets"}
    return {"class": "LibriSpeechCorpus", "path": str(folder), "prefix": "train", "audio": audio, "targets": targets, **IN_TWO}


def megatron(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    lengths = rng.randint(1, 8, 17).astype("<i4")
    (folder / "tokens.bin").write_bytes(rng.randint(0, 50, lengths.sum()).astype("<u2").tobytes())
    starts = 2 * numpy.concatenate([[0], numpy.cumsum(lengths)[:-1]]).astype("<i8")
    documents = numpy.array([0, 3, 9, 17], "<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(documents))
    (folder / "tokens.idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())
    files = {"data_file": str(folder / "tokens.bin"), "index_file": str(folder / "tokens.idx")}
    return {"class": "MegatronDataset", "vocab_size": 50, **files, "seq_ordering": "laplace:.4", "partition_epoch": 2}


def raw_wav(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    paths = [folder / f"{number}.wav" for number in range(9)]
    for path in paths:
        noise(path, rng, subtype="PCM_16")
    (folder / "list").write_text("\n".join(map(str, paths)) + "\n")
    frames = {"frameLength": 80, "frameShift": 40}
    return {"class": "RawWavDataset", "listFile": str(folder / "list"), "num_outputs": 1, **frames, "seq_ordering": "random"}


def sprint_cache(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    archive = FileArchive(str(folder / "features.cache"), must_exists=False)
    for number in range(13):
        frames = rng.uniform(size=(rng.randint(1, 6), 3)).astype("float32")
        archive.add_feature_cache(f"corpus/{number}", frames, [(place, place + 1.0) for place in range(len(frames))])
    archive.finalize()
    archive.f.close()
    return {"class": "SprintCacheDataset", "data": {"data": {"filename": str(folder / "features.cache")}}, **IN_TWO}


def stereo(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    with h5py.File(folder / "stereo.hdf", "w") as file:
        for number in range(11):
            frames = rng.randint(1, 6)
            file[f"inputs/{number}"] = rng.uniform(size=(frames, 3)).astype("float32")
            file[f"outputs/{number}"] = rng.uniform(size=(frames, 2)).astype("float32")
    return {"class": "StereoHdfDataset", "hdfFile": str(folder / "stereo.hdf"), **IN_TWO}


def with_context(folder: Path) -> dict[str, Any]:
    return {**stereo(folder), "class": "DatasetWithTimeContext", "tau": 2}


def two_numbers(audio: Any, random_state: numpy.random.RandomState, **_: object) -> Any:
    """Features of every fifty samples, with random numbers that are drawn from one sequence to the next."""
    frames = numpy.stack([audio[:-100:50], audio[1:-99:50]], axis=1)
    return (frames + random_state.uniform(size=frames.shape)).astype("float32")


def timit(folder: Path) -> dict[str, Any]:
    """Five sequences in an epoch, of which the first one is loaded when the epoch begins."""
    rng = numpy.random.RandomState(1)
    tags = [f"dr1-{speaker}/s{number}" for speaker in ("a", "b") for number in range(5)]
    for tag in tags:
        noise(folder / "train" / f"{tag}.wav", rng)
        phones = rng.choice(["pau", "aa", "b", "q"], rng.randint(1, 6))
        lines = [f"{place} {place + 1} {phone}" for place, phone in enumerate(phones)]
        (folder / "train" / f"{tag}.phn").write_text("\n".join(lines) + "\n")
    (folder / "train" / "filelist.phn").write_text("\n".join(f"{tag}.phn" for tag in tags) + "\n")
    features = {"features": two_numbers, "num_feature_filters": 2, "random_permute_audio": False}
    return {"class": "TimitDataset", "timit_dir": str(folder), "num_phones": 39, **features, **IN_TWO}


def hugging_face(folder: Path) -> dict[str, Any]:
    import datasets

    rng = numpy.random.RandomState(1)
    lists = [rng.randint(0, 9, rng.randint(1, 6)).tolist() for _ in range(13)]
    rows = {"id": [f"row-{number}" for number in range(13)], "tokens": lists}
    features = datasets.Features({"id": datasets.Value("string"), "tokens": datasets.Sequence(datasets.Value("int32"))})
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(folder / "saved")
    keys = {"data_format": {"tokens": {"shape": (None,), "dtype": "int32", "dim": None}}}
    return {"class": "HuggingFaceDataset", "dataset_opts": str(folder / "saved"), **keys, **IN_TWO}


MAKERS = [
    *(task12ax, dummy, anything, clusters, confusion_networks, enwik8, extern_sprint, libri_speech, megatron, raw_wav),
    *(sprint_cache, stereo, with_context, timit, hugging_face),
]


@pytest.fixture(autouse=True)
def _packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In place of packages that are not installed: librosa, of which the features here need nothing, and a function of scipy."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # RawWavDataset leaves files
    wavfile = SimpleNamespace(read=lambda path: soundfile.read(path, dtype="int16")[::-1])
    io = SimpleNamespace(wavfile=wavfile)
    packages = {
        "librosa": {"librosa": SimpleNamespace()},
        "scipy": {"scipy": SimpleNamespace(io=io), "scipy.io": io, "scipy.io.wavfile": wavfile},
    }
    for package, modules in packages.items():
        if find_spec(package) is None:
            for name, module in modules.items():
                monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _complete(monkeypatch: pytest.MonkeyPatch) -> None:
    """ConfusionNetworkDataset starts its thread before the list that the thread fills: without this, it fails now and then."""
    main = ConfusionNetworkDataset._thread_main

    def wait(dataset: Any) -> None:
        while "sparse_weights" not in dataset._data:
            time.sleep(0.01)
        main(dataset)

    monkeypatch.setattr(ConfusionNetworkDataset, "_thread_main", wait)


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_epochs_are_those_of_returnn(tmp_path: Path, maker: Maker) -> None:
    (tmp_path / "corpus").mkdir()
    options = maker(tmp_path / "corpus")
    inside = options["dataset"] if options["class"] == "ReturnnDataset" else options
    theirs = epochs_by_returnn(inside, 1, 2, 3)
    with opened(options, tmp_path / "lengths") as dataset:
        for epoch in (1, 2, 3, 1):
            assert_equal(read(dataset, epoch), theirs[epoch])
    scans: list[str] = []
    with opened(options, tmp_path / "lengths", scans, size=2) as dataset:  # a new run, which continues within an epoch
        assert_equal(read(dataset, 2, position=1), theirs[2][MAX_SEQS:])
        for position in (0, 1):
            shared = [item for rank in (0, 1) for item in read(dataset, 2, rank, 2, position)]
            assert_equal(sorted(shared, key=first), sorted(theirs[2][MAX_SEQS * position :], key=first))
    assert scans == []


def bliss(folder: Path) -> dict[str, Any]:
    segment = '<segment name="1" start="0" end="1"><orth>eins</orth></segment>'
    recording = f'<recording name="r" audio="r.wav">{segment}</recording>'
    (folder / "corpus.xml").write_text(f'<corpus name="c">{recording}</corpus>')
    (folder / "codes").write_text("#version: 0.2\n")
    (folder / "vocabulary").write_text(repr({word: number for number, word in enumerate([*WORDS, "UNK"])}))
    names = {"path": "corpus.xml", "bpe_file": "codes", "vocab_file": "vocabulary"}
    return {"class": "BlissDataset", **{key: str(folder / name) for key, name in names.items()}}


def chunks(folder: Path) -> dict[str, Any]:
    return {"class": "ChunkShuffleDataset", "dataset": {"class": "HDFDataset", "files": [hdf(folder)]}}


def numpy_dump(folder: Path) -> dict[str, Any]:
    for number in range(4):
        (folder / f"{number}.data.txt").write_text("1 2\n3 4\n")
        (folder / f"{number}.targets.txt").write_text("1\n0\n")
    outputs = {"data": (2, 2), "classes": (2, 1)}
    return {"class": "NumpyDumpDataset", "prefix": f"{folder}/", "postfix": ".txt", "num_inputs": 2, "num_outputs": outputs}


def assignments(folder: Path) -> dict[str, Any]:
    return {"class": "TaskVariableAssignmentDataset", "num_seqs": 5}


@pytest.mark.parametrize(
    ("maker", "error"),
    [(bliss, NotImplementedError), (chunks, RecursionError), (numpy_dump, AssertionError), (assignments, ValueError)],
    ids=lambda value: value.__name__,
)
def test_what_returnn_itself_cannot_read(tmp_path: Path, maker: Maker, error: type[Exception]) -> None:
    options = maker(tmp_path)
    with pytest.raises(error):
        epochs_by_returnn(options, 1)
    with pytest.raises(DataError, match=f"^{options['class']} of RETURNN: expected .* got {error.__name__}"), opened(options):
        pass


@pytest.mark.parametrize(
    ("options", "package"),
    [
        ({"class": "NltkTimitDataset"}, "nltk"),
        ({"class": "NemoSpeechDataset", "nemo_config": {}, "draws_per_epoch": 5}, "omegaconf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_packages_that_a_class_needs_are_named(options: dict[str, Any], package: str) -> None:
    if find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(DataError, match=f"^{options['class']} of RETURNN: .* No module named '{package}"), opened(options):
        pass


def siamese(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    with h5py.File(folder / "words.hdf", "w") as file:
        file["seq_names"] = [f"seq-{number}" for number in range(12)]
        for name, kind in {"features": "feature_sequence", "words": "sparse"}.items():
            stream = file.create_group(f"streams/{name}")
            stream.attrs["parser"] = kind
            if kind == "sparse":
                stream["feature_names"] = WORDS
            for number in range(12):
                frames = rng.uniform(size=(3, 2)).astype("float32")
                stream[f"data/seq-{number}"] = frames if name == "features" else numpy.array([number % 4], "int32")
    return {"class": "SiameseHDFDataset", "files": [str(folder / "words.hdf")], "input_stream_name": "features", **IN_TWO}


def test_triplets_are_drawn_without_a_seed(tmp_path: Path) -> None:
    """The first of every three is that of RETURNN; the others are of the same word and of another one."""
    options = siamese(tmp_path)
    theirs = epochs_by_returnn(options, 1, 2)
    with opened(options) as dataset:
        [warning] = [line for line in dataset.warnings() if "other sequences" in line]
        assert warning.startswith("SiameseHDFDataset of RETURNN yields other sequences when an epoch begins again")
        for epoch in (1, 2):
            ours = read(dataset, epoch)
            anchors, expected = (
                [(tag, {key: data[key] for key in ("data", "words_0")}) for tag, data in items] for items in (ours, theirs[epoch])
            )
            assert_equal(anchors, expected)
            for _, data in ours:
                anchor, same, other = (int(data[f"words_{number}"][0]) for number in range(3))
                assert anchor == same != other


@pytest.fixture
def within_a_minute() -> Iterator[None]:
    def too_long(*_: object) -> None:
        raise TimeoutError("a minute is over")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def unknown_word(folder: Path) -> dict[str, Any]:
    options = {**confusion_networks(folder), "class": "TranslationDataset", "unknown_label": None}
    options.pop("max_density")
    (folder / "source.train").write_text("eins sechs\n" * 15)
    return options


def without_phones(folder: Path) -> dict[str, Any]:
    options = timit(folder)
    (folder / "train" / "dr1-b/s1.phn").unlink()
    return options


def broken_pipe(folder: Path) -> dict[str, Any]:
    """The program ends before it has said so, in every second part of an epoch."""
    options = extern_sprint(folder)
    options["sprintTrainerExecPath"][-2] = SPRINT.replace(", end]", ", end][: -4 if part and int(part[1]) else None]")
    return options


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (unknown_word, "TranslationDataset .* Exception: Can not handle unknown token without unknown_label: 'sechs'"),
        (without_phones, r"TimitDataset .* AssertionError in .*generating.py, line \d+$"),
        (broken_pipe, "ExternSprintDataset .* EOFError"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.usefixtures("within_a_minute")
def test_an_error_in_a_thread_of_returnns_ends_the_training(tmp_path: Path, maker: Maker, message: str) -> None:
    """Instead of waiting for the thread for ever, or taking what it has read for the whole epoch."""
    with pytest.raises(DataError, match=message) as raised, opened(maker(tmp_path), tmp_path / "lengths") as dataset:
        dataset.at_epoch(2)
    assert "expected a dataset whose threads can read it, got" in str(raised.value)
    assert list(tmp_path.glob("lengths/*epoch-2*")) == []


@pytest.mark.parametrize(
    "options",
    [
        {"class": "CopyTaskDataset", "nsymbols": 5, "minlen": 2, "maxlen": 6, "maxlen_epoch_factor": 1.0},
        {"class": "ReturnnDataset", "dataset": {"class": "Task12AXDataset"}},
        {"class": "AnythingDataset", "data_keys": {"data": {"shape": (None, 3), "dim": 3, "dtype": "float32"}}},
    ],
    ids=lambda options: options.get("dataset", options)["class"],
)
@pytest.mark.usefixtures("within_a_minute")
def test_an_endless_dataset_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"whose epochs end, got one without end \(set num_seqs in its dict;"), opened(options):
        pass


def test_the_table_of_the_documentation_has_every_class() -> None:
    table = (ROOT / "docs" / "returnn.md").read_text(encoding="utf-8").partition("## Datasets")[2].partition("\n## ")[0]
    assert [name for name in BY_RETURNN if f"`{name}`" not in table] == []
