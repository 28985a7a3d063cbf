"""The file of the task search, as RETURNN's readers take it."""

import gzip
from pathlib import Path
from typing import Any

import numpy
import pytest

from hvdtrain.data.types import Stream
from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.returnn.keys import SearchKeys
from hvdtrain.plugins.returnn.search_output import SearchWriter

LABELS = ("<s>", "a", "b", "c")
STREAMS = {
    "data": Stream(numpy.dtype("float32"), (9,), 9, False),
    "classes": Stream(numpy.dtype("int32"), (), 4, True, LABELS),
    "other": Stream(numpy.dtype("int32"), (), 2, True, ("x", "y")),
}
ONE = {"output": numpy.array([1, 2, 3]), "scores": numpy.float32([0.5])}
BEAM = {
    "hyps": numpy.array([[1, 2, 0], [3, 0, 0]]),
    "hyps:size1": numpy.array([2, 1]),
    "scores": numpy.array([-1.2, -numpy.inf], numpy.float32),
}


def written(path: Path, *sequences: dict[str, Any], streams: dict[str, Stream] = STREAMS, **keys: Any) -> str:
    keys = {"search_output_file": str(path), **keys}
    with SearchWriter(SearchKeys(**keys), streams) as writer:
        for number, outputs in enumerate(sequences):
            writer.add(f"seq-{number}", outputs)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        return str(file.read())


def test_a_line_for_each_sequence(tmp_path: Path) -> None:
    assert written(tmp_path / "a.txt", ONE, {"output": numpy.array([], dtype=int)}, {"output": numpy.array(3)}) == "a b c\n\nc\n"
    texts = {"output": numpy.array("wörter\nhier", dtype=object)}
    assert written(tmp_path / "b" / "b.txt.gz", texts) == "wörter hier\n"


def test_a_dict_of_python(tmp_path: Path) -> None:
    text = written(tmp_path / "a.py.gz", ONE, ONE, search_output_file_format="py")
    assert text == "{\n'seq-0': 'a b c',\n'seq-1': 'a b c',\n}\n"
    keys = SearchKeys(search_output_file=str(tmp_path / "c.py"), search_output_file_format="py")
    with SearchWriter(keys, STREAMS) as writer:
        writer.add("a", ONE)
        with pytest.raises(DataError, match="c.py: expected every tag once, .*, got 'a' twice"):
            writer.add("a", ONE)
    dense = {"output": numpy.arange(3000, dtype=numpy.float32)}
    text = written(tmp_path / "b" / "b.py", dense, search_output_file_format="py")
    [array] = eval(text, {"array": numpy.array, "float32": numpy.float32}).values()
    assert numpy.array_equal(array, dense["output"])


def test_hypotheses_with_scores(tmp_path: Path) -> None:
    text = written(tmp_path / "a.py", BEAM, search_output_file_format="py")
    assert text == "{\n'seq-0': [\n(-1.2, 'a b'),\n(float('-inf'), 'c'),\n],\n}\n"
    turned = {"hyps": BEAM["hyps"].T, "hyps:size0": BEAM["hyps:size1"], "beam_scores_hyps": BEAM["scores"]}
    assert written(tmp_path / "b" / "b.py", turned, search_output_file_format="py") == text
    with pytest.raises(ConfigError, match=r"expected scores of shape \(2,\) for the hypotheses in 'hyps', .*, got none"):
        written(tmp_path / "c" / "c.py", {"hyps": BEAM["hyps"]})
    assert not list((tmp_path / "c").iterdir())


def test_several_outputs(tmp_path: Path) -> None:
    keys = {"search_output_layer": ["output", "hyps"], "search_output_file_format": "py"}
    text = written(tmp_path / "a.py", {**ONE, **BEAM}, **keys)
    [(tag, outputs)] = eval(text).items()
    assert (tag, outputs) == ("seq-0", {"hyps": [(-1.2, "a b"), (-numpy.inf, "c")], "output": "a b c"})
    with pytest.raises(ConfigError, match="search_output_file_format: expected 'py' with a list of outputs"):
        written(tmp_path / "b.txt", ONE, search_output_layer=["output"])


@pytest.mark.parametrize(
    ("labels", "text"),
    [
        (None, "a b"),
        ("classes", "a b"),
        (["0", "1", "2"], "1 2"),
        (lambda *, name, numbers, **_: f"{name} {numbers.sum()}", "output 3"),
        (lambda **_: None, "a b"),
    ],
)
def test_labels(tmp_path: Path, labels: Any, text: str) -> None:
    assert written(tmp_path / "a.txt", {"output": numpy.array([1, 2])}, search_labels=labels) == f"{text}\n"


def test_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    for error, message, outputs, keys in (
        (
            ConfigError,
            "search_output_layer: expected one of the outputs .*marks .output, scores., got 'x'",
            ONE,
            {"search_output_layer": "x"},
        ),
        (ConfigError, r"marks \(p, q\), got None", {"p": ONE["output"], "q": ONE["output"]}, {}),
        (DataError, r"output 'output': expected numbers below 4 \(the labels\), got 7", {"output": numpy.array([1, 7])}, {}),
        (DataError, "got -1", {"output": numpy.array([-1])}, {}),
        (ConfigError, "search_labels: expected labels for the numbers of the output 'output', got none", ONE, {"streams": {}}),
        (
            ConfigError,
            r"search_labels: expected a data key with labels \(classes, other\), got 'data'",
            ONE,
            {"search_labels": "data"},
        ),
    ):
        with pytest.raises(error, match=message):
            written(path, outputs, **keys)
        assert not list(tmp_path.iterdir())
    path.write_text("")
    with pytest.raises(DataError, match=r"a.txt: expected a file that does not exist yet \(search_output_file\)"):
        written(path, ONE)


def test_a_full_disk(tmp_path: Path) -> None:
    (tmp_path / "a.txt.unfinished").symlink_to("/dev/full")
    with pytest.raises(DataError, match="a.txt: expected to be able to write .search_output_file., got: No space left on device"):
        written(tmp_path / "a.txt", ONE)
    assert not list(tmp_path.iterdir())
