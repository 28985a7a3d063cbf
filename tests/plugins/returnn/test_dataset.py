"""With the real RETURNN: its datasets become HDF files, and what the writer writes it reads to the same values."""

import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
from hdf_files import BY_RETURNN as REFERENCE
from returnn.datasets.basic import init_dataset
from returnn_epochs import Item, by_returnn

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.dump import dump, main
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.plugins.hdf_tools.writer import HDFWriter


def texts(values: Any) -> list[Any]:
    """Plain lists, with bytes as the text they are."""
    return [value.decode("utf-8") if isinstance(value, bytes) else value for value in values.tolist()]


def assert_same(ours: Path, theirs: list[Item]) -> None:
    """Whether a file, as we read it, holds the same sequences in the same order."""
    dataset = open_hdf([ours])
    assert dataset.tags(range(dataset.num_sequences)) == [tag for tag, _ in theirs]
    for number, (_, arrays) in enumerate(theirs):
        read = dataset.sequence(number)
        assert read.keys() == arrays.keys()
        for key, values in arrays.items():
            assert texts(read[key]) == texts(values), (number, key)
    dataset.close()


@pytest.mark.parametrize("name", ["a.hdf", "b.hdf", "c.hdf"])
def test_returnns_own_files_become_the_same_through_returnn(tmp_path: Path, name: str) -> None:
    inside = {"class": "HDFDataset", "files": [str(REFERENCE / name)], "seq_ordering": "random"}
    out = tmp_path / "out.hdf"
    assert main([str({"class": "ReturnnDataset", "dataset": inside}), str(out), "--epoch", "3"]) == 0
    assert_same(out, by_returnn(inside, 3))
    ours = tmp_path / "ours.hdf"
    assert main([str(inside), str(ours), "--epoch", "3"]) == 0  # the same dict: our own reader, in RETURNN's order
    assert_same(ours, by_returnn({"class": "HDFDataset", "files": [str(out)]}, 1))
    assert open_hdf([ours]).streams == open_hdf([out]).streams


def test_generated_data_and_parts_of_an_epoch(tmp_path: Path) -> None:
    inside = {"class": "Task12AXDataset", "num_seqs": 12, "partition_epoch": 2}
    for epoch in (1, 2):
        out = tmp_path / f"{epoch}.hdf"
        assert main([str({"class": "ReturnnDataset", "dataset": inside}), str(out), "--epoch", str(epoch)]) == 0
        assert_same(out, by_returnn(inside, epoch))
    few = tmp_path / "few.hdf"
    assert main([str({"class": "ReturnnDataset", "dataset": inside}), str(few), "--start_seq", "2", "--end_seq", "4"]) == 0
    assert_same(few, by_returnn(inside, 1)[2:5])
    assert open_hdf([few]).streams["classes"].dim == 2
    assert open_hdf([few]).streams["data"].shape == (9,)


def test_a_class_that_only_returnn_knows_needs_no_wrapping(tmp_path: Path) -> None:
    """As it stands in a RETURNN config; its length is not known beforehand."""
    (tmp_path / "words.txt").write_text("hallo welt\nwelt\n\nhallo hallo\n", encoding="utf-8")
    (tmp_path / "vocabulary.py").write_text("{'hallo': 0, 'welt': 1, '<unk>': 2, '</s>': 3}", encoding="utf-8")
    inside = {
        "class": "LmDataset",
        "corpus_file": str(tmp_path / "words.txt"),
        "orth_symbols_map_file": str(tmp_path / "vocabulary.py"),
        "orth_replace_map_file": "",
        "word_based": True,
        "seq_end_symbol": "</s>",
        "unknown_symbol": "<unk>",
        "auto_replace_unknown_symbol": True,
    }
    (tmp_path / "returnn.config").write_text(f"task = 'train'\ntrain = {inside!r}\n", encoding="utf-8")
    out = tmp_path / "out.hdf"
    assert main([str(tmp_path / "returnn.config"), str(out)]) == 0
    assert_same(out, by_returnn(inside, 1))
    read = open_hdf([out])
    assert read.sequence(0)["data"].tolist() == [0, 1, 3]
    assert read.streams["data"].labels == ("hallo", "welt", "<unk>", "</s>")
    read.close()


def test_what_returnn_makes_of_its_postprocessing(tmp_path: Path) -> None:
    """A number of sequences that is unknown beforehand."""

    def twice(sequences: Any, **_: object) -> Any:
        for sequence in sequences:
            yield sequence
            yield sequence

    inside = {"class": "Task12AXDataset", "num_seqs": 3}
    config = {"class": "PostprocessingDataset", "dataset": inside, "map_seq_stream": twice}
    spec, problems = parse("train", {"class": "ReturnnDataset", "dataset": config}, {})
    assert spec is not None, problems
    dump(spec, tmp_path / "out.hdf", Selection(start=1), Peers())
    read = open_hdf([tmp_path / "out.hdf"])
    once = [arrays["classes"].tolist() for _, arrays in by_returnn(inside, 1)]
    assert [read.sequence(number)["classes"].tolist() for number in range(5)] == [once[0], once[1], once[1], once[2], once[2]]
    read.close()


SEQUENCES: list[Item] = [
    (
        "tag-é",
        {"data": numpy.arange(6, dtype="float32").reshape(3, 2), "classes": numpy.array([1, 0]), "text": numpy.array(["ü"])},
    ),
    (
        "tag-with-a-longer-name",
        {"data": numpy.ones((1, 2), "float32"), "classes": numpy.array([], "int64"), "text": numpy.array(["a b"])},
    ),
    ("x", {"data": numpy.zeros((4, 2), "float32"), "classes": numpy.array([2, 2, 1]), "text": numpy.array([""])}),
]


@pytest.mark.parametrize("compression", [None, "gzip", "lzf"])
@pytest.mark.parametrize("keys", [("data", "classes", "text"), ("data",), ("classes",), ("data", "extra"), ("sparse", "classes")])
def test_returnn_reads_what_is_written(tmp_path: Path, keys: tuple[str, ...], compression: str | None) -> None:
    """Dense and sparse inputs, several targets, texts, no input, no target; labels, dimensions and tags."""
    path = tmp_path / "written.hdf"
    given: list[Item] = []
    for tag, arrays in SEQUENCES:
        arrays = {**arrays, "extra": arrays["data"] * 2, "sparse": arrays["classes"]}
        given.append((tag, {("data" if key == "sparse" else key): arrays[key] for key in keys}))
    labels = {"classes": ["a", "b", "ç"]}
    if "sparse" in keys:
        labels["data"] = ["p", "q", "r"]
    with HDFWriter(path, labels=labels, compression=compression) as writer:
        for tag, arrays in given:
            writer.add(tag, arrays)
    read = by_returnn({"class": "HDFDataset", "files": [str(path)]}, 1)
    assert [tag for tag, _ in read] == [tag for tag, _ in given]
    for (_, theirs), (_, ours) in zip(read, given, strict=True):
        assert set(theirs) == set(ours)
        for key, values in ours.items():
            assert texts(theirs[key]) == values.tolist()
            assert theirs[key].dtype == values.dtype or key == "text"
    assert_same(path, read)
    dataset = init_dataset({"class": "HDFDataset", "files": [str(path)]})
    for key in given[0][1]:
        sparse = key in labels
        assert dataset.is_data_sparse(key) == sparse
        assert dataset.get_data_dim(key) == {"text": 1}.get(key, 3 if sparse else 2)
        if sparse:
            assert list(dataset.labels[key]) == labels[key]


def test_mistakes_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.hdf")
    small = "{'class': 'Task12AXDataset', 'num_seqs': 1}"
    for source, message in {
        "{'class': 'ReturnnDataset', 'dataset': {'class': 'NoSuchDataset'}}": "Dataset class 'NoSuchDataset' not found",
        "{'class': 'ReturnnDataset', 'dataset': {'files': []}}": "expected a dataset dict of RETURNN with 'class'",
        "{'class': 'TextDictDataset'}": "TextDictDataset of RETURNN: expected a dataset that it can open, got TypeError",
        f"{{'class': 'ReturnnDataset', 'dataset': {small}, 'seq_ordering': 'random'}}": "expected no order keys",
        "{'class': 'TextDictDatset'}": "did you mean TextDictDataset?",
    }.items():
        assert main([source, out]) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_without_returnn_its_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "returnn"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["{'class': 'OggZipDataset', 'path': 'x.zip'}", str(tmp_path / "out.hdf")]) == 2
    shown = capsys.readouterr().err
    assert "expected the packages returnn and dm-tree" in shown
    assert "(pip install returnn dm-tree rapidfuzz soundfile)" in shown
