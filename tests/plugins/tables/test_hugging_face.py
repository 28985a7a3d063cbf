"""A folder of the Hugging Face package `datasets` becomes an HDF file."""

import io
import os
import sys
from pathlib import Path
from typing import Any

import datasets
import numpy
import pytest
import soundfile

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError
from hvdtrain.plugins.hdf_tools.dump import main
from hvdtrain.plugins.tables.hugging_face import HuggingFaceDataset

datasets.disable_progress_bars()

SIZE = 67


def sound(samples: list[int], kind: str, rate: int = 8000) -> dict[str, Any]:
    encoded = io.BytesIO()
    soundfile.write(encoded, numpy.array(samples, numpy.int16), rate, format=kind)
    return {"bytes": encoded.getvalue(), "path": None}


def row(number: int) -> dict[str, Any]:
    """Lengths differ, and are zero now and then."""
    return {
        "id": f"täg {number}",
        "text": f"hé {number}",
        "words": ["a", f"{number % 3}"][: number % 3],
        "token_ids": list(range(number % 5)),
        "features": [[float(number), frame / 2] for frame in range(1 + number % 4)],
        "array": [[number, 1], [2, 3]][: 1 + number % 2],
        "label": number % 2,
        "states": [number % 3] * (number % 4),
        "score": number / 4,
        "pitch": [0.5] * (number % 3),
        "audio": sound([0, number, -number, 16384], "FLAC" if number % 2 else "WAV"),
    }


FEATURES = {
    "id": datasets.Value("string"),
    "text": datasets.Value("large_string"),
    "words": datasets.List(datasets.Value("string")),
    "token_ids": datasets.List(datasets.Value("int64")),
    "features": datasets.List(datasets.List(datasets.Value("float32"))),
    "array": datasets.Array2D(shape=(None, 2), dtype="int32"),
    "label": datasets.ClassLabel(names=["no", "yes"]),
    "states": datasets.List(datasets.ClassLabel(names=["x", "y", "zü"])),
    "score": datasets.Value("float64"),
    "pitch": datasets.List(datasets.Value("float16")),
    "audio": {"bytes": datasets.Value("binary"), "path": datasets.Value("string")},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `all`, one dataset with a column of every type, and `parts`, two datasets."""
    made = tmp_path_factory.mktemp("hugging_face")
    rows = datasets.Dataset.from_list([row(number) for number in range(SIZE)], features=datasets.Features(FEATURES))
    rows = rows.cast_column("audio", datasets.Audio())  # encoding sound takes a package that the test can do without
    rows.save_to_disk(made / "all")
    few = rows.select_columns(["text", "token_ids"]).select(range(2))
    datasets.DatasetDict({"train": few, "test": few.select([1])}).save_to_disk(made / "parts")
    return made


def test_every_type_of_column_is_what_hdf_dump_writes(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.hdf"
    columns = {"data": "features", **{name: name for name in FEATURES if name not in ("id", "features")}}
    source = {"class": "HuggingFaceDataset", "folder": str(folder / "all"), "columns": columns, "tag": "id"}
    assert main([str(source), str(out)]) == 0
    written = open_hdf([out])
    assert written.num_sequences == SIZE
    assert {key: (stream.sparse, stream.dim) for key, stream in written.streams.items() if stream.dtype.kind != "O"} == {
        "data": (False, 2),
        "array": (False, 2),
        "audio": (False, 1),
        "label": (True, 2),
        "pitch": (False, 1),
        "score": (False, 1),
        "states": (True, 3),
        "token_ids": (True, 4),
    }
    assert written.streams["states"].labels == ("x", "y", "zü")
    assert written.streams["data"].dtype == numpy.float32
    assert written.streams["pitch"].dtype == numpy.float16
    assert written.tags([0, SIZE - 1]) == ["täg 0", f"täg {SIZE - 1}"]
    for number in range(SIZE):
        given, got = row(number), written.sequence(number)
        assert got["text"].tolist() == [given["text"]]
        assert got["words"].tolist() == given["words"]
        assert got["token_ids"].tolist() == given["token_ids"]
        assert got["data"].tolist() == given["features"]
        assert got["array"].tolist() == given["array"]
        assert got["label"].tolist() == [given["label"]]
        assert got["states"].tolist() == given["states"]
        assert got["score"].tolist() == [given["score"]]
        assert got["pitch"].tolist() == given["pitch"]
        assert (got["audio"] * 32768).tolist() == [[0], [number], [-number], [16384]]


def test_rows_are_looked_up_by_number(folder: Path) -> None:
    rows = HuggingFaceDataset(str(folder / "all"), columns={"data": "token_ids"})
    assert [(tag, arrays["data"].tolist()) for tag, arrays in rows] == [
        (f"row-{number}", list(range(number % 5))) for number in range(SIZE)
    ]
    assert rows[-1][0] == f"row-{SIZE - 1}"
    assert [tag for tag, _ in rows[1:3]] == ["row-1", "row-2"]
    with pytest.raises(IndexError):
        rows[SIZE]
    before = rows.identity()
    (folder / "all" / "cache-1.arrow").write_text("what another job has mapped")
    assert (rows[-1][0], rows.identity()) == (f"row-{SIZE - 1}", before)


def test_a_part_of_several_and_all_its_columns(folder: Path) -> None:
    rows = HuggingFaceDataset(str(folder / "parts"), part="test")
    ((tag, arrays),) = rows
    before = rows.identity()
    os.utime(next((folder / "parts" / "test").glob("*.arrow")), (0, 0))
    assert rows.identity() != before
    assert (tag, {key: values.tolist() for key, values in arrays.items()}) == ("row-0", {"text": ["hé 1"], "token_ids": [0]})


def test_strings_become_classes_of_a_vocabulary(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "characters").write_text("h\né\n \n0\n1\n<unk>\n", encoding="utf-8")
    (tmp_path / "words").write_text("a\n1\n2\n", encoding="utf-8")
    vocabulary = {"text": str(tmp_path / "characters"), "words": str(tmp_path / "words")}
    rows = HuggingFaceDataset(str(folder / "all"), columns={key: key for key in vocabulary}, vocabulary=vocabulary)
    assert rows.labels == {"text": ["h", "é", " ", "0", "1", "<unk>"], "words": ["a", "1", "2"]}
    assert rows[1][1]["text"].tolist() == [0, 1, 2, 4]
    assert rows[2][1]["text"].tolist() == [0, 1, 2, 5]
    assert rows[5][1]["words"].tolist() == [0, 2]
    as_words = HuggingFaceDataset(
        str(folder / "all"), columns={"text": "text"}, vocabulary={"text": str(tmp_path / "words")}, units="words"
    )
    with pytest.raises(DataError, match="got 'hé' in sequence 'hé 0' .an entry <unk> would cover it"):
        as_words[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"folder": "{folder}/nothing"}, "nothing: expected a folder that save_to_disk of the package datasets wrote, got: "),
        ({"folder": "{folder}"}, "expected a folder that save_to_disk of the package datasets wrote"),
        ({"folder": "{folder}/parts"}, "part: expected one of train, test, got None in "),
        ({"folder": "{folder}/all", "part": "dev"}, "part: expected none, as the folder holds one dataset, got 'dev' in "),
        ({"folder": "{folder}/all", "columns": {"data": "fetures"}}, "columns.data: expected a column of .*, got 'fetures'"),
        ({"folder": "{folder}/all", "tag": "name"}, r"tag: expected a column of .*\(id, text, .*\), got 'name'"),
        (
            {"folder": "{folder}/all", "tag": "words"},
            r"tag: expected a column of strings or integers, got List\(.*\) in column 'words'",
        ),
        ({"folder": "{folder}/odd"}, r"expected columns of numbers, .* got \{'x': .*\} in column 'nested' of "),
        ({"folder": "{folder}/odd", "columns": {"data": "missing"}}, "column 'missing', row 1: expected a value, got none"),
        (
            {"folder": "{folder}/odd", "columns": {"data": "ragged"}},
            "column 'ragged', row 0: expected frames of 1 numbers each, got frames of other sizes",
        ),
        ({"folder": "{folder}/odd", "columns": {"data": "noise"}}, "column 'noise', row 0: expected a sound file, got: "),
        (
            {"folder": "{folder}/odd", "columns": {"data": "rates"}},
            "column 'rates', row 1: expected 8000 samples per second, got 16000",
        ),
    ],
)
def test_mistakes_are_reported(folder: Path, tmp_path: Path, options: dict[str, Any], message: str) -> None:
    encoded = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    rows = [
        {"nested": {"x": 1}, "missing": [1], "ragged": [[1.0], [1.0, 2.0]], "noise": {"bytes": b"no", "path": None}},
        {"nested": {"x": 1}, "missing": None, "ragged": [], "noise": {"bytes": b"no", "path": None}},
    ]
    for rate, one in zip((8000, 16000), rows, strict=True):
        one["rates"] = sound([1, 2], "WAV", rate)
    features = {
        "nested": {"x": datasets.Value("int8")},
        "missing": datasets.List(datasets.Value("int8")),
        "ragged": datasets.List(datasets.List(datasets.Value("float32"))),
        "noise": encoded,
        "rates": encoded,
    }
    odd = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    odd.cast_column("noise", datasets.Audio()).cast_column("rates", datasets.Audio()).save_to_disk(folder / "odd")
    options = {**options, "folder": options["folder"].format(folder=folder)}
    with pytest.raises(DataError, match=message):
        list(HuggingFaceDataset(**options))


@pytest.mark.parametrize("column", ["number", "numbers", "words", "tag"])
def test_a_missing_value_is_no_number_and_no_text(tmp_path: Path, column: str) -> None:
    rows = [{"number": 2**53 + 1, "numbers": [0.1, 1.0], "words": ["a"], "tag": "one"}] * 2
    rows.append({**rows[0], column: {"number": None, "numbers": [0.1, None], "words": ["a", None], "tag": None}[column]})
    features = {"number": datasets.Value("int64"), "numbers": datasets.List(datasets.Value("float64"))}
    features |= {"words": datasets.List(datasets.Value("string")), "tag": datasets.Value("string")}
    datasets.Dataset.from_list(rows, features=datasets.Features(features)).save_to_disk(tmp_path / "rows")
    (tmp_path / "words").write_text("a\n<unk>\n")
    with pytest.raises(DataError, match=f"column {column!r}, row 2: expected a value, got none"):
        HuggingFaceDataset(str(tmp_path / "rows"), tag="tag", vocabulary={"words": str(tmp_path / "words")})[2]
    whole = datasets.Dataset.from_list(rows[:2], features=datasets.Features(features))
    whole.save_to_disk(tmp_path / "whole")
    _, arrays = HuggingFaceDataset(str(tmp_path / "whole"), tag="tag")[1]
    assert (arrays["number"].tolist(), arrays["numbers"].tolist()) == ([2**53 + 1], [0.1, 1.0])


def test_without_the_package_its_extra_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert main(['{"class": "HuggingFaceDataset", "folder": "x"}', "out.hdf"]) == 2
    assert capsys.readouterr().err == "HuggingFaceDataset: expected the package datasets, got none (pip install datasets)\n"


def test_misspelt_and_missing_options_are_reported_before_anything_is_opened(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["{'class': 'HuggingFaceDataset', 'colums': {}}", "out.hdf"]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [
        "  train.colums: unknown key of HuggingFaceDataset (did you mean columns?)",
        "  train.folder: expected a value, got none for HuggingFaceDataset",
    ]


def test_order_keys_are_followed_as_in_training_and_epochs_are_refused(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = {"class": "HuggingFaceDataset", "folder": str(folder / "parts"), "part": "test"}
    numbers = {**source, "part": "train", "columns": {"data": "token_ids"}, "seq_ordering": "reverse"}
    assert main([str(numbers), str(tmp_path / "out.hdf")]) == 0
    written = open_hdf([tmp_path / "out.hdf"])
    assert written.tags(range(written.num_sequences)) == [f"row-{n}" for n in reversed(range(written.num_sequences))]
    capsys.readouterr()
    assert main([str(source), "out.hdf", "--epoch", "2"]) == 2
    assert capsys.readouterr().err == "--epoch: expected 1 for HuggingFaceDataset, which has no epochs, got 2\n"
