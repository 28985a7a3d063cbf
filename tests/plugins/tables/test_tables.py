"""Parquet and Arrow files: the same arrays from either, whatever the types and the groups of rows are."""

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy
import opened_data
import pyarrow
import pyarrow.parquet
import pytest
import soundfile
from hdf_files import free_descriptors

from hvdtrain.data.broken import BrokenSequences
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.errors import DataError
from hvdtrain.plugins.tables import tables

LENGTHS = (3, 5, 0, 7, 1, 4, 6)
FLOATS = pyarrow.float32()


def frames(number: int) -> numpy.ndarray:
    return numpy.random.default_rng(number).normal(size=(LENGTHS[number], 4)).astype(numpy.float32)


def sound(length: int) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, numpy.arange(length * 10) / 100, 8000, format="WAV", subtype="FLOAT")
    return stream.getvalue()


COLUMNS: dict[str, tuple[list[Any], pyarrow.DataType]] = {
    "name": ([f"utt-ä{number}" for number in range(7)], pyarrow.string()),
    "lists": ([frames(number).tolist() for number in range(7)], pyarrow.list_(pyarrow.list_(FLOATS))),
    "fixed": ([frames(number).tolist() for number in range(7)], pyarrow.large_list(pyarrow.list_(FLOATS, 4))),
    "single": ([number % 5 for number in range(7)], pyarrow.int16()),
    "several": ([list(range(length)) for length in LENGTHS], pyarrow.list_(pyarrow.int64())),
    "text": (["ab" * length for length in LENGTHS], pyarrow.large_string()),
    "letters": ([list("ab" * length) for length in LENGTHS], pyarrow.list_(pyarrow.string())),
    "repeated": (["a", "b", "a", "a", "b", "b", "a"], pyarrow.dictionary(pyarrow.int8(), pyarrow.string())),
    "sound": (
        [{"bytes": sound(length + 1), "path": None} for length in LENGTHS],
        pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string()}),
    ),
    "flag": ([number % 2 == 0 for number in range(7)], pyarrow.bool_()),
}
FEATURES = {"single": {"_type": "ClassLabel", "names": list("vwxyz")}, "text": {"dtype": "string", "_type": "Value"}}
METADATA = {"huggingface": json.dumps({"info": {"features": FEATURES}})}


def table(**changed: tuple[list[Any], pyarrow.DataType]) -> pyarrow.Table:
    columns = COLUMNS | changed
    arrays = {name: pyarrow.array(values, kind) for name, (values, kind) in columns.items()}
    return pyarrow.table(arrays).replace_schema_metadata(METADATA)


def write(path: Path, rows: pyarrow.Table, size: int = 2) -> str:
    """Write some rows in groups of a size: as parquet, or as an Arrow file or stream."""
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(rows, path, row_group_size=size)
    else:
        make = pyarrow.ipc.new_file if path.suffix == ".arrow" else pyarrow.ipc.new_stream
        with make(path, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=size)
    return str(path)


def opened(files: Any, **options: Any) -> Dataset:
    name = files if isinstance(files, str) else files[0]
    kind = "ParquetDataset" if name.endswith(".parquet") else "ArrowDataset"
    return opened_data.opened({"class": kind, "files": files, **options})


SUFFIXES = ["parquet", "arrow", "stream"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_rows_are_the_arrays_that_were_written(tmp_path: Path, suffix: str) -> None:
    files = [write(tmp_path / f"{number}.{suffix}", rows) for number, rows in enumerate([table()[:5], table()[5:]])]
    (tmp_path / "letters").write_text("b\na\n")
    columns = {name: name for name in COLUMNS if name != "name"}
    vocabulary = dict.fromkeys(("text", "letters", "repeated"), str(tmp_path / "letters"))
    dataset = opened(str(tmp_path / f"{{0..1}}.{suffix}"), columns=columns, tag="name", vocabulary=vocabulary)
    assert dataset.num_sequences == 7
    assert dataset.tags([6, 0]) == ["utt-ä6", "utt-ä0"]
    assert dataset.file_bounds().tolist() == [0, 5, 7]
    for number in (6, 2, 0, 1, 5, 3, 4):
        arrays = dataset.sequence(number)
        length = LENGTHS[number]
        for name in ("lists", "fixed"):
            assert numpy.array_equal(arrays[name], frames(number))
            assert arrays[name].dtype == numpy.float32
        assert arrays["single"].tolist() == [number % 5]
        assert arrays["single"].dtype == numpy.int16
        assert arrays["several"].tolist() == list(range(length))
        assert arrays["text"].tolist() == arrays["letters"].tolist() == [1, 0] * length
        assert arrays["repeated"].tolist() == [int(COLUMNS["repeated"][0][number] == "a")]
        assert numpy.allclose(arrays["sound"][:, 0], numpy.arange(length * 10 + 10) / 100)
        assert arrays["flag"].tolist() == [number % 2 == 0]
    assert dataset.lengths["lists"].tolist() == list(LENGTHS)
    assert dataset.streams["single"].labels == tuple("vwxyz")
    assert dataset.streams["several"].dim == 7
    assert opened(files[1], columns={"data": "lists"}).tags([1]) == ["row-1"]


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("kind", ["struct", "with rate", "large", "bytes", "large bytes"])
def test_sound_and_texts_as_other_programs_write_them(tmp_path: Path, suffix: str, kind: str) -> None:
    """Polars writes string_view and large_binary; recordings come with their rate, or as mere bytes."""
    encoded = [sound(length + 1) for length in LENGTHS]
    view = pyarrow.string_view() if suffix != "parquet" else pyarrow.large_string()
    fields = {"bytes": pyarrow.large_binary() if kind == "large" else pyarrow.binary(), "path": view}
    if kind == "with rate":
        fields = {"bytes": pyarrow.binary(), "sampling_rate": pyarrow.int32()}
    values: list[Any] = [{"bytes": content, "path": None, "sampling_rate": 8000} for content in encoded]
    column = pyarrow.struct(fields)
    if "bytes" in kind:
        values, column = encoded, pyarrow.large_binary() if "large" in kind else pyarrow.binary()
    texts = {name: (COLUMNS[name][0], view) for name in ("text", "name")}
    file = write(tmp_path / f"a.{suffix}", table(sound=(values, column), **texts))
    (tmp_path / "letters").write_text("b\na\n")
    dataset = opened(file, columns={"data": "sound", "text": "text"}, tag="name", vocabulary={"text": str(tmp_path / "letters")})
    assert dataset.tags([6]) == ["utt-ä6"]
    for number in (4, 0):
        assert numpy.allclose(dataset.sequence(number)["data"][:, 0], numpy.arange(LENGTHS[number] * 10 + 10) / 100)
        assert dataset.sequence(number)["text"].tolist() == [1, 0] * LENGTHS[number]


def test_sound_that_is_not_there_or_of_another_rate(tmp_path: Path) -> None:
    fields = pyarrow.struct({"bytes": pyarrow.binary(), "path": pyarrow.string(), "sampling_rate": pyarrow.int32()})
    for value, message in (
        ({"bytes": None, "path": None}, "expected a sound file, got neither its bytes nor a path"),
        ({"bytes": sound(1), "sampling_rate": 16000}, "expected 16000 samples per second, got 8000"),
    ):
        rows = [{"bytes": sound(1)}] * 3 + [value] + [{"bytes": sound(1)}] * 3
        file = write(tmp_path / "a.parquet", table(sound=(rows, fields)))
        with pytest.raises(DataError, match=f"a.parquet, column 'sound', row 3: {message}"):
            opened(file, columns={"data": "sound"})


def test_what_datasets_notes_of_a_column_is_that_of_all_files(tmp_path: Path) -> None:
    def noted(name: str, **feature: Any) -> str:
        about = {"huggingface": json.dumps({"info": {"features": {"single": feature, "sound": feature}}})}
        return write(tmp_path / name, table().replace_schema_metadata(about))

    first, other = (noted(f"{names}.parquet", _type="ClassLabel", names=list(names)) for names in ("vwxyz", "zyxwv"))
    with pytest.raises(
        DataError, match=r"zyxwv.parquet: expected .*'v', .* in column 'single', as in .*vwxyz.parquet, got .*'z', "
    ):
        opened([first, other], columns={"data": "single"})
    for about, message in (
        ({"sampling_rate": 16000}, "16000 samples per second"),
        ({"num_channels": 2}, "sound with as many .*, 2, "),
    ):
        with pytest.raises(DataError, match=rf"a.parquet, column 'sound', row 0: expected {message}"):
            opened(noted("a.parquet", _type="Audio", **about), columns={"data": "sound"})


def test_parts_of_a_row_group_stay_apart() -> None:
    """Together, the texts of a row group may have more bytes than an array can."""
    parts = [["a", "bb"], [], ["ccc"], ["d", "", "ff"]]
    rows = pyarrow.table({"x": pyarrow.chunked_array(parts, pyarrow.string()), "y": pyarrow.chunked_array([[1, 2, 3, 4, 5, 6]])})
    group = tables.Group("a.parquet", 100, rows)
    assert [group.value("x", row) for row in range(100, 106)] == [text for part in parts for text in part]
    assert [group.value("y", row).tolist() for row in (105, 100)] == [[6], [1]]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_more_files_than_a_process_may_open(tmp_path: Path, suffix: str) -> None:
    files = [write(tmp_path / f"{number}.{suffix}", table()) for number in range(9)]
    opened(files[:1], columns={"data": "lists"})
    with free_descriptors(6):
        dataset = opened(files, columns={"data": "lists"}, tag="name")
        for number in (60, 3, 8):
            assert numpy.array_equal(dataset.sequence(number)["data"], frames(number % 7))
    with free_descriptors(0), pytest.raises(DataError, match="got: the limit of .* open files of a process"):
        opened(files[:1], columns={"data": "lists"})


@pytest.mark.parametrize("suffix", ["arrow", "stream"])
def test_record_batches_are_decompressed_when_they_are_read(tmp_path: Path, suffix: str) -> None:
    rows = pyarrow.table({"x": numpy.zeros(1 << 20), "text": pyarrow.array(["a", "b"] * (1 << 19)).dictionary_encode()})
    make = pyarrow.ipc.new_file if suffix == "arrow" else pyarrow.ipc.new_stream
    with make(tmp_path / "a", rows.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(rows, max_chunksize=1 << 16)
    before = pyarrow.total_allocated_bytes()
    file = tables.ArrowFile(str(tmp_path / "a"))
    assert pyarrow.total_allocated_bytes() - before < 1 << 16
    assert file.bounds.tolist() == list(range(0, (1 << 20) + 1, 1 << 16))
    batch = file.read(3, ["x"])
    assert (batch.num_rows, pyarrow.total_allocated_bytes() - before < 2 << 20) == (1 << 16, True)


def test_rows_of_gigabytes_are_read_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As pyarrow fails for lists with more than 2 GiB of texts."""
    few = pyarrow.parquet.ParquetFile.iter_batches

    def fail(*args: Any, **options: Any) -> Any:
        raise pyarrow.ArrowNotImplementedError

    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "read_row_group", fail)
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda file, rows, **more: few(file, rows, **more) if rows == 1 else fail()
    )
    dataset = opened(write(tmp_path / "a.parquet", table(), 4), columns={"data": "lists"})
    assert numpy.array_equal(dataset.sequence(6)["data"], frames(6))
    monkeypatch.setattr(pyarrow.parquet.ParquetFile, "iter_batches", fail)
    with pytest.raises(DataError, match="expected rows of less than 2 GiB, got a larger one in row group 0"):
        opened(str(tmp_path / "a.parquet"), columns={"data": "lists"})


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_tensors_keep_their_axes(tmp_path: Path, suffix: str) -> None:
    values = numpy.arange(24, dtype=numpy.int32).reshape(4, 3, 2)
    rows = pyarrow.table({"x": pyarrow.FixedShapeTensorArray.from_numpy_ndarray(values)})
    dataset = opened(write(tmp_path / f"a.{suffix}", rows[1:], 2))
    assert [dataset.sequence(index)["x"].tolist() for index in range(3)] == values[1:].tolist()
    missing = pyarrow.concat_arrays([rows["x"].chunk(0), pyarrow.nulls(1, rows["x"].type)])
    with pytest.raises(DataError, match="column 'x', row 4: expected a value, got none"):
        opened(write(tmp_path / f"c.{suffix}", pyarrow.table({"x": missing})))
    kind = pyarrow.fixed_shape_tensor(pyarrow.float32(), [2, 3], permutation=[1, 0])
    turned = pyarrow.ExtensionArray.from_storage(kind, pyarrow.array([[0.0] * 6], pyarrow.list_(pyarrow.float32(), 6)))
    with pytest.raises(DataError, match=r"got extension<arrow.fixed_shape_tensor"):
        opened(write(tmp_path / f"b.{suffix}", pyarrow.table({"x": turned})))


@pytest.mark.parametrize("deltas", [False, True])
def test_batches_of_a_stream_may_replace_dictionaries_or_add_to_them(tmp_path: Path, deltas: bool) -> None:
    batches = [
        pyarrow.record_batch({"x": pyarrow.array(texts).dictionary_encode()})
        for texts in (["a", "b", "a"], ["a", "b", "c"], ["c", "a"], ["b"])
    ]
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd", emit_dictionary_deltas=deltas)
    with pyarrow.ipc.new_stream(tmp_path / "a.stream", batches[0].schema, options=options) as writer:
        for batch in batches:
            writer.write_batch(batch)
    (tmp_path / "letters").write_text("c\nb\na\n")
    dataset = opened(str(tmp_path / "a.stream"), vocabulary={"x": str(tmp_path / "letters")})
    texts = [text for batch in batches for text in batch.column("x").to_pylist()]
    for index in (8, 0, 5, 3, 1, 7):
        assert dataset.sequence(index)["x"].tolist() == ["cba".index(texts[index])]


def test_row_groups_are_kept_within_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a.parquet", table())
    read: list[int] = []
    original = tables.ParquetFile.read

    def note(self: Any, number: int, columns: Any) -> Any:
        read.append(number)
        return original(self, number, columns)

    monkeypatch.setattr(tables.ParquetFile, "read", note)
    dataset = opened(file, columns={"data": "lists"})
    assert read == [0, 1, 2, 3]
    for number in (6, 0, 3, 6, 1):
        dataset.sequence(number)
    assert read == [0, 1, 2, 3]
    monkeypatch.setattr(tables, "CACHE_BYTES", 1)
    dataset = opened(file, columns={"data": "lists"})
    read.clear()
    for number in (6, 0, 1, 6):
        assert numpy.array_equal(dataset.sequence(number)["data"], frames(number))
    assert read == [0, 3]


# ------------------------------------------------------------------------------------------------ what may be wrong


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_file_that_was_cut_off_is_named(tmp_path: Path, suffix: str) -> None:
    good, bad = (Path(write(tmp_path / f"{name}.{suffix}", table())) for name in ("good", "bad"))
    content = bad.read_bytes()
    for size in (len(content) - 1, len(content) - 8, len(content) * 2 // 3, 100, 3, 0):
        bad.write_bytes(content[:size])
        with pytest.raises(DataError, match=rf"bad.{suffix}: expected "):
            opened([str(good), str(bad)], columns={"data": "lists"})
    bad.write_bytes(content[: len(content) // 3] + bytes(100) + content[len(content) // 3 + 100 :])
    bad.unlink()
    with pytest.raises(DataError, match=rf"bad.{suffix}: expected an? (Arrow|parquet) file, got: .*No such file"):
        opened([str(good), str(bad)], columns={"data": "lists"})


def test_sound_that_cannot_seek_is_read(tmp_path: Path) -> None:
    encoded = io.BytesIO()
    soundfile.write(encoded, numpy.sin(numpy.arange(640) / 9) / 2, 8000, format="WAV", subtype="GSM610")
    dataset = opened(write(tmp_path / "a.parquet", pyarrow.table({"x": [encoded.getvalue()]})))
    expected = soundfile.read(io.BytesIO(encoded.getvalue()), dtype="float32", always_2d=True)[0]
    assert numpy.array_equal(dataset.sequence(0)["x"], expected)


def test_batches_of_a_file_are_where_its_footer_says(tmp_path: Path) -> None:
    """Polars' files begin with something else than a message, and its categories are views."""
    categories = pyarrow.DictionaryArray.from_arrays([0, 1, 0, 1, 1, 0, 0], pyarrow.array(["b", "a"], pyarrow.string_view()))
    path = Path(write(tmp_path / "rows.arrow", table().append_column("category", categories)))
    content = bytearray(path.read_bytes())
    content[8:16] = bytes.fromhex("04000000f2ffffff")
    path.write_bytes(content)
    (tmp_path / "letters").write_text("b\na\n")
    columns = {"data": "lists", "category": "category"}
    dataset = opened(str(path), columns=columns, vocabulary={"category": str(tmp_path / "letters")})
    read = [dataset.sequence(number) for number in range(7)]
    assert [numpy.array_equal(arrays["data"], frames(number)) for number, arrays in enumerate(read)] == [True] * 7
    assert [arrays["category"].tolist() for arrays in read] == [[0], [1], [0], [1], [1], [0], [0]]


def test_a_damaged_row_group_is_named(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "bad.parquet", table(), size=4))
    content = bytearray(path.read_bytes())
    place = pyarrow.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    start = place.dictionary_page_offset or place.data_page_offset
    content[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad.parquet: expected a whole row group 1, got: "):
        opened(str(path), columns={"data": "lists"})
    options = {"compression": "none", "use_dictionary": False, "write_page_checksum": True}
    pyarrow.parquet.write_table(pyarrow.table({"data": numpy.arange(999.0)}), path, **options)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1  # of one number, which looks like any other
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"bad.parquet: expected a whole row group 0, got: .*checksum"):
        opened(str(path))


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no column": ({}, {"data": "list"}, r"train.columns.data: expected a column of .*a.parquet \(name, lists, .*\), got 'list'"),
    "no text": ({}, {"data": "text"}, "train.vocabulary: expected a vocabulary for 'data', which has texts, got none"),
    "other type": (
        {"lists": ([[[["x"]]]] * 7, pyarrow.list_(pyarrow.list_(pyarrow.list_(pyarrow.string()))))},
        {"data": "lists"},
        "train.columns.data: expected a column of numbers, lists .*, got list<.*> in column 'lists' of .*a.parquet",
    ),
    "missing": (
        {"single": ([1, 2, 3, 4, 0, None, 2], pyarrow.int16())},
        {"data": "single"},
        "a.parquet, column 'single', row 5: expected a value, got none",
    ),
    "missing in a list": (
        {"several": ([[1], [2], [3], [4, 4, None], [5], [6], [7]], pyarrow.list_(pyarrow.int64()))},
        {"data": "several"},
        "a.parquet, column 'several', row 3: expected a value, got none",
    ),
    "missing in a frame": (
        {"lists": ([[[1.0]], [[2.0]], [], [[3.0], [None]], [], [], []], pyarrow.list_(pyarrow.list_(FLOATS)))},
        {"data": "lists"},
        "a.parquet, column 'lists', row 3: expected a value, got none",
    ),
    "missing text": (
        {"letters": ([["a"], ["a"], ["a"], ["a", None], ["a"], ["a"], ["a"]], pyarrow.list_(pyarrow.string()))},
        {"data": "letters"},
        "a.parquet, column 'letters', row 3: expected a value, got none",
    ),
    "ragged": (
        {"lists": ([[[1.0]], [[2.0]], [], [[3.0], [4.0, 5.0]], [], [], []], pyarrow.list_(pyarrow.list_(FLOATS)))},
        {"data": "lists"},
        "a.parquet, column 'lists', row 3: expected frames of 1 numbers each, got frames of other sizes",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_value_is_named_with_column_and_row(tmp_path: Path, what: str) -> None:
    changed, columns, expected = BAD[what]
    file = write(tmp_path / "a.parquet", table(**changed), size=4)
    (tmp_path / "letters").write_text("b\na\n")
    vocabulary = {"data": str(tmp_path / "letters")} if what == "missing text" else {}
    if what in ("no column", "no text", "other type"):
        with pytest.raises(DataError, match=expected):
            opened(file, columns=columns, vocabulary=vocabulary)
        return
    broken = BrokenSequences("train", 1)
    value = {"class": "ParquetDataset", "files": file, "columns": columns, "vocabulary": vocabulary}
    assert opened_data.opened(value, scanning=Scanning(broken=broken)).num_sequences == 6, "the others of its group can be read"
    assert re.search(expected, broken.warnings()[0])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_row_without_frames_has_the_width_of_others(tmp_path: Path, suffix: str) -> None:
    files = [
        write(tmp_path / f"{number}.{suffix}", pyarrow.table({"x": pyarrow.array(rows, pyarrow.list_(pyarrow.list_(FLOATS)))}))
        for number, rows in enumerate([[[], [], []], [[], [[1.0, 2.0]]], [[[3.0]]]])
    ]
    dataset = opened(files[:2])
    assert [dataset.sequence(index)["x"].shape for index in range(5)] == [(0, 2)] * 4 + [(1, 2)]
    with pytest.raises(DataError, match=rf"item 5 \({files[2]}, 'row-5'\), 'x': expected float32 frames of shape \(2,\)"):
        opened(files)


def test_other_mistakes(tmp_path: Path) -> None:
    first = write(tmp_path / "a.parquet", table())
    other = write(tmp_path / "b.parquet", table(single=([1.0] * 7, FLOATS)))
    with pytest.raises(DataError, match=r"b.parquet: expected int16 in column 'single', as in .*a.parquet, got float"):
        opened([first, other], columns={"data": "single"})
    with pytest.raises(DataError, match=r"train.tag: expected a column of texts, got int16 in column 'single' of "):
        opened(first, columns={"data": "lists"}, tag="single")
    wrong = {"class": "ParquetDataset", "files": [], "columns": {"data": "a"}, "vocabulary": {"date": "a"}}
    assert opened_data.problems_of(wrong) == ["train.files: missing", "train.vocabulary: unknown-value"]
    with pytest.raises(DataError, match=re.escape("a.parquet: expected an Arrow file, got: ")):
        opened_data.opened({"class": "ArrowDataset", "files": first})
