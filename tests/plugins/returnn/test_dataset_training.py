"""Datasets of the real RETURNN, trained on as they are: the sequences that RETURNN yields, in its order, each on one rank."""

import ast
import importlib.util
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import h5py
import numpy
import pytest
from launching import TOY
from returnn.config import Config, get_global_config, set_global_config
from returnn.datasets.hdf import NextGenHDFDataset
from returnn_epochs import assert_equal, by_returnn, hdf, opened, read
from trainings import Run, Trained, assert_same, trains

from hvdtrain.comm.single import SingleCommunicator
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.describe import feed_lines
from hvdtrain.data.feed import Feed
from hvdtrain.data.kinds import KINDS, SOURCES
from hvdtrain.data.opening import open_dataset
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.returnn.dataset_dicts import BY_RETURNN
from hvdtrain.settings import read_settings
from hvdtrain.start_up.data import open_feeds

WORDS = "eins zwei drei vier".split()


def lm(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(1)
    lines = [" ".join(rng.choice(WORDS, rng.randint(1, 9))) for _ in range(23)]
    (folder / "words.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "vocabulary.py").write_text(repr({word: number for number, word in enumerate([*WORDS, "</s>"])}), encoding="utf-8")
    return {
        "class": "LmDataset",
        "corpus_file": str(folder / "words.txt"),
        "orth_symbols_map_file": str(folder / "vocabulary.py"),
        "orth_replace_map_file": "",
        "word_based": True,
        "seq_end_symbol": "</s>",
        "seq_ordering": "random",
        "partition_epoch": 2,
    }


def translation(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(2)
    for side in ("source", "target"):
        lines = [" ".join(rng.choice(WORDS, rng.randint(1, 7))) for _ in range(17)]
        (folder / f"{side}.train").write_text("\n".join(lines) + "\n", encoding="utf-8")
        (folder / f"{side}.vocab.pkl").write_bytes(pickle.dumps({word: number for number, word in enumerate(WORDS)}))
    return {
        "class": "TranslationDataset",
        "path": str(folder),
        "file_postfix": "train",
        "seq_ordering": "random",
        "partition_epoch": 2,
    }


def ogg_zip(folder: Path) -> dict[str, Any]:
    import soundfile

    rng = numpy.random.RandomState(3)
    entries = []
    with zipfile.ZipFile(folder / "corpus.zip", "w") as archive:
        for number in range(13):
            samples = rng.randint(200, 900)
            audio = BytesIO()
            soundfile.write(audio, rng.uniform(-0.5, 0.5, samples), 16000, format="WAV")
            archive.writestr(f"corpus/{number}.wav", audio.getvalue())
            entries.append({"text": WORDS[number % 4], "duration": samples / 16000, "file": f"{number}.wav"})
        archive.writestr("corpus.txt", repr(entries))
    targets = {"class": "Utf8ByteTargets"}
    audio_keys = {"features": "raw", "sample_rate": 16000, "peak_normalization": False}
    return {"class": "OggZipDataset", "path": str(folder / "corpus.zip"), "audio": audio_keys, "targets": targets} | {
        "seq_ordering": "laplace:.3",
        "partition_epoch": 2,
    }


def noisy(sequence: Any, *, rng: numpy.random.RandomState, **_: object) -> Any:
    """Other numbers in every epoch, and sometimes one frame less."""
    data = sequence.data["data"]
    data.raw_tensor = (data.raw_tensor + rng.uniform(size=data.raw_tensor.shape))[rng.randint(2) :].astype("float32")
    return sequence


def mapped(folder: Path) -> dict[str, Any]:
    inside = {"class": "HDFDataset", "files": [hdf(folder)], "seq_ordering": "random"}
    return {"class": "PostprocessingDataset", "dataset": inside, "map_seq": noisy}


def mapped_parts(folder: Path) -> dict[str, Any]:
    """The parts are those of the dataset inside."""
    options = mapped(folder)
    return {**options, "dataset": {**options["dataset"], "partition_epoch": 2}}


def twice(sequences: Any, **_: object) -> Any:
    for sequence in sequences:
        yield sequence
        yield sequence


def streamed(folder: Path) -> dict[str, Any]:
    data, classes = {"shape": (None, 2), "dtype": "float32"}, {"shape": (None,), "dim": 3, "sparse": True}
    outputs = {name: {"batch_dim_axis": None, **one} for name, one in {"data": data, "classes": classes}.items()}
    return mapped(folder) | {"map_seq": None, "map_seq_stream": twice, "map_outputs": outputs}


def of_files(files: list[str]) -> dict[str, Any]:
    return {"class": "HDFDataset", "files": files, "seq_ordering": "random"}


def distributed(folder: Path) -> dict[str, Any]:
    files = [hdf(folder, f"part-{number}", 10 * number, 3 + number) for number in range(6)]
    return {"class": "DistributeFilesDataset", "files": files, "get_sub_epoch_dataset": of_files} | {
        "partition_epoch": 3,
        "seq_ordering": "random",
    }


def several_epochs(folder: Path) -> dict[str, Any]:
    return {"class": "MultiEpochDataset", "dataset": lm(folder), "multi_epoch": 2}


def variable(folder: Path) -> dict[str, Any]:
    """Another corpus in every second epoch, whose sequences have the same numbers."""
    paths = [hdf(folder, "even", 0, 7), hdf(folder, "odd", 30, 9)]
    return {"class": "VariableDataset", "get_dataset": lambda *, epoch, **_: of_files([paths[epoch % 2]])}


def joined(folder: Path) -> dict[str, Any]:
    """Around a dataset that only RETURNN has, the whole is RETURNN's."""
    inside = [of_files([hdf(folder)]), of_files([hdf(folder, "b", 50, 4)])]
    mapped = [{"class": "PostprocessingDataset", "dataset": each, "map_seq": noisy} for each in inside]
    return {"class": "ConcatDataset", "datasets": mapped}


def factored(folder: Path) -> dict[str, Any]:
    rng = numpy.random.RandomState(5)
    for side in ("source", "target"):
        lines = [" ".join(f"{word}|{rng.choice(['u', 'l'])}" for word in rng.choice(WORDS, rng.randint(1, 7))) for _ in range(17)]
        (folder / f"{side}.train").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for name, labels in {"source": WORDS, "target": WORDS, "case": ["u", "l"], "target_case": ["u", "l"]}.items():
        (folder / f"{name}.vocab.pkl").write_bytes(pickle.dumps({label: number for number, label in enumerate(labels)}))
    factors = {"source_factors": ["case"], "target_factors": ["target_case"]}
    return {
        "class": "TranslationFactorsDataset",
        "path": str(folder),
        "file_postfix": "train",
        "seq_ordering": "random",
        "partition_epoch": 2,
    } | factors


def searched(folder: Path) -> dict[str, Any]:
    (folder / "search.py").write_text(repr({f"seq-{number}": " ".join(WORDS[: 1 + number % 4]) for number in range(17)}))
    (folder / "vocabulary.txt").write_text(repr({word: number for number, word in enumerate([*WORDS, "<unk>"])}))
    vocabulary = {"class": "Vocabulary", "vocab_file": str(folder / "vocabulary.txt"), "unknown_label": "<unk>"}
    return {"class": "TextDictDataset", "filename": str(folder / "search.py"), "item_format": "single", "vocab": vocabulary} | {
        "seq_ordering": "random",
        "partition_epoch": 2,
    }


def in_pairs(folder: Path) -> dict[str, Any]:
    (folder / "pairs").write_text("".join(f"seq-{number};seq-{number + 1}\n" for number in range(0, 20, 2)))
    (folder / "lengths.py").write_text(repr({f"seq-{number}": 1 + number % 5 for number in range(20)}))
    lists = {"seq_list_file": str(folder / "pairs"), "seq_len_file": str(folder / "lengths.py")}
    inside = {"class": "HDFDataset", "files": [hdf(folder)]}
    return {"class": "ConcatSeqsDataset", "dataset": inside, "seq_ordering": "random", "partition_epoch": 2} | lists


def arrays() -> list[dict[str, Any]]:
    rng = numpy.random.RandomState(4)
    sizes = rng.randint(1, 6, (13, 2))
    return [
        {"data": rng.uniform(size=(frames, 2)).astype("float32"), "classes": rng.randint(0, 3, labels).astype("int32")}
        for frames, labels in sizes
    ]


def static(folder: Path) -> dict[str, Any]:
    dims = {"input_dim": 2, "output_dim": {"data": (2, 2), "classes": (3, 1)}}
    return {
        "class": "StaticDataset",
        "data": arrays(),
        "target_list": ["classes"],
        "seq_ordering": "random",
        "partition_epoch": 2,
    } | dims


def map_style(folder: Path) -> dict[str, Any]:
    def make() -> Any:
        from returnn.datasets.map import FromListDataset

        types = {"data": {"shape": (None, 2)}, "classes": {"shape": (None,), "dim": 3, "sparse": True}}
        return FromListDataset(arrays(), sort_data_key="data", data_types=types)

    return {"class": "MapDatasetWrapper", "map_dataset": make, "seq_ordering": "laplace:.2", "partition_epoch": 2}


def generated(name: str, **options: Any) -> Callable[[Path], dict[str, Any]]:
    """A class that makes up its sequences."""

    def maker(folder: Path) -> dict[str, Any]:
        return {"class": name, "num_seqs": 17, "partition_epoch": 2, **options}

    maker.__name__ = name
    return maker


SEQ_LEN, DIMS = {"data": 7, "classes": 3}, {"data": 3, "classes": 4}
TEMPLATE = {"data": {"shape": (None, 3)}, "classes": {"shape": (None,), "dim": 4, "sparse": True}}
MAKERS = [
    *(lm, translation, ogg_zip, mapped, mapped_parts, streamed, distributed, several_epochs, variable, joined),
    *(factored, searched, in_pairs, static, map_style),
    generated("CopyTaskDataset", nsymbols=5, minlen=2, maxlen=6, maxlen_epoch_factor=1.0),
    generated("TaskEpisodicCopyDataset"),
    generated("TaskXmlModelingDataset"),
    generated("TaskNumberBaseConvertDataset"),
    generated("DummyDatasetMultipleSequenceLength", input_dim=3, output_dim=4, seq_len=SEQ_LEN),
    generated("DummyDatasetMultipleDataKeys", data_keys=["data", "classes"], seq_len=SEQ_LEN, output_dim=DIMS),
    generated("DummyGenericDataset", data_template=TEMPLATE, seq_lens=(2, 7)),
]


@pytest.mark.parametrize("maker", MAKERS, ids=lambda maker: maker.__name__)
def test_epochs_are_those_of_returnn_over_any_number_of_ranks(tmp_path: Path, maker: Callable[[Path], dict[str, Any]]) -> None:
    options = maker(tmp_path)
    with opened(options, tmp_path / "lengths", size=2) as dataset:
        for epoch in (1, 2, 3, 1):
            expected = by_returnn(options, epoch)
            assert_equal(read(dataset, epoch), expected)
            assert dataset.at_epoch(epoch).num_sequences == len(expected)
        shares = [read(dataset, 2, rank, 2) for rank in (0, 1)]
        assert sorted(tag for share in shares for tag, _ in share) == sorted(tag for tag, _ in by_returnn(options, 2))
        # A run that resumes within the epoch.
        assert_equal(read(dataset, 2, 0, 1, position=2), by_returnn(options, 2)[6:])
    assert list(tmp_path.glob("lengths/*.unfinished")) == []


def nextgen(path: Path, numbers: range) -> str:
    """Sequences in three streams, one of every kind."""
    rng = numpy.random.RandomState(numbers.start)
    kinds = {"features": "feature_sequence", "words": "sparse", "states": "segment_alignment"}
    with h5py.File(path, "w") as file:
        file["seq_names"] = [f"corpus/{number}" for number in numbers]
        for name, kind in kinds.items():
            file.create_group(f"streams/{name}/data").parent.attrs["parser"] = kind
            if kind != "feature_sequence":
                file[f"streams/{name}/feature_names"] = ["a", "b", "c"]
        for number in numbers:
            arrays = {
                "features": rng.uniform(size=(rng.randint(1, 9), 4)).astype("float32"),
                "words": rng.randint(0, 3, rng.randint(1, 5)).astype("int32"),
                "states": numpy.stack([rng.randint(0, 3, 3), rng.randint(1, 4, 3)], axis=1).astype("int32"),
            }
            for name, values in arrays.items():
                file[f"streams/{name}/data"][f"corpus\\{number}"] = values
    return str(path)


@pytest.mark.parametrize(
    ("order", "partition_epoch"), [("default", 1), ("sorted", 3), ("reverse", 1), ("random", 3), ("laplace:6", 3)]
)
def test_nextgen_files_are_read_as_by_returnn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, partition_epoch: int
) -> None:
    """RETURNN's class takes names for strings, which h5py has returned as bytes since its version 3."""
    monkeypatch.setattr(NextGenHDFDataset, "_normalize_seq_name", lambda self, name: name.decode().replace("/", "\\"))
    paths = [nextgen(tmp_path / f"{first}.hdf", range(first, first + 9)) for first in (0, 9)]
    keys = {"seq_ordering": order, "partition_epoch": partition_epoch}
    options = {"class": "NextGenHDFDataset", "files": paths, "input_stream_name": "features", **keys}
    with opened(options) as dataset:
        for epoch in (1, 2, 3, 4):
            theirs = [
                (tag.decode(), {"data": data["features"], "words": data["words"], "states": data["states"]})  # type: ignore[attr-defined]
                for tag, data in by_returnn(options, epoch)
            ]
            assert len(theirs) == 18 // partition_epoch
            assert_equal(read(dataset, epoch, order=keys), theirs)


def test_lengths_are_found_once_and_kept(tmp_path: Path) -> None:
    """In every part of an epoch once, and never again while nothing changes."""
    options, folder = lm(tmp_path), tmp_path / "lengths"
    scans: list[str] = []
    with opened(options, folder, scans) as dataset:
        assert len(scans) == 1
        for epoch in (1, 2, 3, 4):
            dataset.at_epoch(epoch)
        assert [scan.rpartition(" ")[2] for scan in scans] == ["1", "2"]
        assert dataset.warnings() == []
        first = read(dataset, 3)
    again: list[str] = []
    with opened(options, folder, again) as dataset:
        assert_equal(read(dataset, 3), first)
        assert dataset.streams["data"].labels == (*WORDS, "</s>")
    assert again == []
    [kept] = folder.glob("*.index")
    kept.write_bytes(kept.read_bytes()[:100])  # a damaged file is as good as none
    with opened(options, folder, again) as dataset:
        assert_equal(read(dataset, 3), first)
    assert len(again) == 2
    with (tmp_path / "words.txt").open("a") as file:
        file.write("eins\n")
    with opened(options, folder, again):
        assert len(again) == 3, "the corpus has changed"


def test_what_is_found_out_about_a_dataset_is_reported(tmp_path: Path) -> None:
    with opened(translation(tmp_path), size=2) as dataset:
        assert dataset.warnings() == []
    with opened(ogg_zip(tmp_path), size=2) as dataset:
        assert dataset.warnings() == []
    constant = {**mapped(tmp_path), "map_seq": lambda sequence, **_: sequence}
    with opened(constant, size=2) as dataset:
        [warning] = dataset.warnings()
        assert warning.startswith("PostprocessingDataset of RETURNN can only be read from its beginning")
    with opened(lm(tmp_path), size=2) as dataset:
        [warning] = dataset.warnings()
        assert warning.startswith("LmDataset of RETURNN can only be read from its beginning: each of the 2 ranks reads all of it")
    scans: list[str] = []
    options = mapped(tmp_path)
    with opened(options, tmp_path / "lengths", scans) as dataset:
        assert "is read once for its lengths before it is trained on" in dataset.warnings()[0]
        dataset.at_epoch(7)
        assert scans[-1].endswith("epoch 7")
    with opened(options, tmp_path / "lengths", scans) as dataset:
        dataset.at_epoch(7)
        assert len(scans) == 2, "kept for each epoch"


def unseeded(sequence: Any, **_: object) -> Any:
    data = sequence.data["data"]
    data.raw_tensor = data.raw_tensor + numpy.random.default_rng().uniform(size=data.raw_tensor.shape).astype("float32")
    return sequence


def test_a_dataset_that_does_not_repeat_itself_is_reported(tmp_path: Path) -> None:
    with opened({**mapped(tmp_path), "map_seq": unseeded}) as dataset:
        feed = Feed("train", dataset, parse("x", "x.hdf", {})[0].order, BatchKeys(), 0, 1)  # type: ignore[union-attr]
        [line] = [line for level, line in feed_lines(feed) if "when an epoch begins again" in line and level == 2]
        assert line.startswith("train: PostprocessingDataset of RETURNN yields other sequences")
        assert len(read(dataset, 1)) == 20


def longer(sequence: Any, **_: object) -> Any:
    data = sequence.data["data"]
    data.raw_tensor = numpy.concatenate([data.raw_tensor] * (1 + int(os.environ.get("LONGER", "0"))))
    return sequence


def test_other_lengths_than_those_that_were_found_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a function reads from the environment does not identify the source; values of its module do."""
    options = {**mapped(tmp_path), "map_seq": longer}
    with opened(options, tmp_path / "lengths") as dataset:
        assert len(read(dataset, 1)) == 20
    monkeypatch.setenv("LONGER", "1")
    with opened(options, tmp_path / "lengths") as dataset, pytest.raises(DataError) as raised:
        read(dataset, 1)
    [kept] = (tmp_path / "lengths").glob("*.epoch-1.index")
    assert f"in {kept}: if the data or a function has changed since then, remove this file; if lengths differ" in str(
        raised.value
    )
    assert "train: expected sequence 0 of epoch 1" in str(raised.value)
    scans: list[str] = []
    with opened(options, tmp_path / "lengths", scans) as dataset:  # from now on for each epoch
        monkeypatch.delenv("LONGER")
        assert len(read(dataset, 1)) == len(read(dataset, 2)) == 20
        assert len(scans) == 2


def meta(folder: Path) -> dict[str, Any]:
    files = {name: hdf(folder, name) for name in ("a", "b")}
    inside = {"a": of_files([files["a"]]) | {"partition_epoch": 2}, "b": {"class": "HDFDataset", "files": [files["b"]]}}
    data_map = {"data": ("a", "data"), "classes": ("b", "classes")}
    return {"class": "MetaDataset", "datasets": inside, "data_map": data_map, "seq_order_control_dataset": "a"}


def concatenated(folder: Path) -> dict[str, Any]:
    files = [hdf(folder), hdf(folder, "b", 50, 4)]
    return {"class": "ConcatDataset", "datasets": [{"class": "HDFDataset", "files": [path]} for path in files]}


@pytest.mark.parametrize("maker", [meta, concatenated])
def test_what_is_made_of_files_is_that_of_returnn(tmp_path: Path, maker: Callable[[Path], dict[str, Any]]) -> None:
    """By hvdtrain alone: RETURNN reads for the comparison only."""
    options = maker(tmp_path)
    spec, problems = parse("train", options, {})
    assert spec is not None, problems
    dataset = open_dataset(spec)
    feed = Feed("train", dataset, spec.order, BatchKeys(max_seqs=3), 0, 1)
    for epoch in (1, 2, 3):
        indices = feed.plan(epoch).order.tolist()
        ours = [(tag, dataset.sequence(index)) for tag, index in zip(dataset.tags(indices), indices, strict=True)]
        assert_equal(
            ours, [(tag, {key: arrays[key] for key in ("data", "classes")}) for tag, arrays in by_returnn(options, epoch)]
        )
    dataset.close()


def test_every_dataset_of_returnn_is_known() -> None:
    """By hvdtrain, or as one that RETURNN reads. Some classes are no datasets by themselves."""
    [place] = importlib.util.find_spec("returnn").submodule_search_locations  # type: ignore[union-attr, misc]
    bases: dict[str, set[str]] = {}
    for path in Path(place, "datasets").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases[node.name] = {base.id for base in node.bases if isinstance(base, ast.Name)}
    found: set[str] = set()
    while more := {name for name, own in bases.items() if own & {"Dataset", *found}} - found:
        found |= more
    parts = {
        "CachedDataset",
        "CachedDataset2",
        "GeneratingDataset",
        "SingleStreamPipeDataset",
        "SprintDatasetBase",
        "StereoDataset",
    }
    assert found - parts - {*KINDS, *SOURCES, *BY_RETURNN, "MultiProcDataset"} == set()


def test_a_multi_proc_dataset_is_what_is_inside(tmp_path: Path) -> None:
    """With as many processes of ours, where it can be read from anywhere."""
    outer = {"class": "MultiProcDataset", "num_workers": 2, "buffer_size": 3}
    options = translation(tmp_path)
    with opened({**outer, "dataset": options}) as dataset:
        for epoch in (1, 2):
            assert_equal(read(dataset, epoch), by_returnn(options, epoch))
        assert len({process.pid for process in dataset._reader._pool._processes}) == 2  # type: ignore[attr-defined]
    inside = mapped(tmp_path)
    spec, problems = parse("train", {**outer, "dataset": {"files": inside["dataset"]["files"]}, "seq_ordering": "random"}, {})
    assert spec is not None, problems
    assert spec.order.seq_ordering == "random"
    assert list(spec.files) == inside["dataset"]["files"]
    spec, problems = parse("train", {**outer, "dataset": lambda: {"files": inside["dataset"]["files"]}}, {})
    assert spec is not None, problems
    assert list(spec.files) == inside["dataset"]["files"]
    with opened({**inside, "dataset": {**outer, "dataset": inside["dataset"]}}) as dataset:
        assert_equal(read(dataset, 2), by_returnn(inside, 2))


def test_the_processes_end_with_the_program(tmp_path: Path) -> None:
    """Even if the dataset is not closed, as after an error."""
    program = f"""
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.opening import open_dataset
spec, _ = parse("train", {{"class": "ReturnnDataset", "num_workers": 2, "dataset": {of_files([hdf(tmp_path)])!r}}}, {{}})
dataset = open_dataset(spec)
raise SystemExit(3)
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == 3


def test_every_rank_has_the_same_order_whatever_launched_it(tmp_path: Path) -> None:
    """RETURNN would shift the seed of a rank by what the config says of the launch."""
    options = translation(tmp_path)
    expected = by_returnn(options, 2)
    before = get_global_config()
    set_global_config(Config({"use_horovod": True, "torch_distributed": {}, "backend": "torch"}))
    try:
        with opened(options) as dataset:
            assert_equal(read(dataset, 2), expected)
    finally:
        set_global_config(before)


def test_a_map_dataset_around_a_dataset_of_returnn(tmp_path: Path) -> None:
    options = translation(tmp_path)
    with opened(
        {"class": "MapDataset", "dataset": options, "map_seq": lambda arrays: {**arrays, "data": arrays["data"] + 1}}
    ) as found:
        for epoch in (1, 2):
            ours = [(tag, {**arrays, "data": arrays["data"] - 1}) for tag, arrays in read(found, epoch)]
            assert_equal(ours, by_returnn(options, epoch))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"chunking": 5}, "train: expected no chunking with a dataset that RETURNN reads in its own order, got it"),
        ({"shuffle_batches": True}, "train: expected no shuffle_batches with"),
        ({"balance_ranks": 2}, "train: expected no balance_ranks with"),
        ({"online_shuffle_batches": 2}, "train: expected no online_shuffle_batches with"),
        ({"train": {"class": "ReturnnDataset", "seq_ordering": "random"}}, "train.seq_ordering: expected no order keys around"),
        (
            {"train": {"class": "MetaDataset", "data_map": {"data": ("a", "data")}}},
            "train.datasets.a: expected a dataset that can be",
        ),
    ],
)
def test_what_needs_another_order_is_refused(tmp_path: Path, more: dict[str, Any], message: str) -> None:
    inner = translation(tmp_path)
    train = dict(more.get("train", inner))
    if train["class"] == "ReturnnDataset":
        train["dataset"] = inner
    elif train["class"] == "MetaDataset":
        train["datasets"] = {"a": {"class": "ReturnnDataset", "dataset": inner}}
    keys = {"model": str(tmp_path / "model"), "learning_rate": 0.1, "max_seqs": 3, "lengths_dir": None, **more, "train": train}
    lines = [f"{name} = {value!r}" for name, value in keys.items()]
    (tmp_path / "config.py").write_text(
        "\n".join([*lines, "def get_model(**_): ...", "def train_step(**_): ..."]), encoding="utf-8"
    )
    with pytest.raises((ConfigError, DataError)) as raised:
        open_feeds(read_settings([tmp_path / "config.py"], {}), SingleCommunicator())
    assert message in str(raised.value)


def test_without_returnn_a_training_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "returnn", None)
    with (
        pytest.raises(
            DataError,
            match=r"^train: expected the package returnn for LmDataset, "
            r"got none \(pip install returnn dm-tree rapidfuzz soundfile\)$",
        ),
        opened(lm(tmp_path)),
    ):
        pass


CONFIG = """
train = {"class": "ReturnnDataset", "dataset": {**train, "class": "HDFDataset", "files": [train["files"]]}}
lengths_dir = LENGTHS
"""


@trains(Run("torch", "single", 1), Run("torch", "horovod", 2))
def trainings(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    (folder / "returnn.py").write_text(CONFIG.replace("LENGTHS", repr(str(folder / "lengths"))), encoding="utf-8")
    common = {"num_epochs": 2, "record": True}
    return {"native": common, "returnn": {**common, "configs": [TOY, folder / "returnn.py"]}}


@pytest.mark.parametrize("run", [Run("torch", "single", 1), Run("torch", "horovod", 2)], ids=str)
def test_training_is_that_on_the_same_sequences(trained: Trained, run: Run) -> None:
    """RETURNN's reader of HDF files, in its order, against ours: the same weights, and each sequence once."""
    results = trained(trainings, run)
    assert_same(results.weights("native"), results.weights("returnn"))
    assert results.trained_on("native") == results.trained_on("returnn")
    assert set(results.trained_on("returnn").values()) == {1}
    assert "sequences, in its own order; read by RETURNN (HDFDataset of RETURNN)" in results.out("returnn")
