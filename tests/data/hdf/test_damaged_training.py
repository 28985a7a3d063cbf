"""Trainings on HDF files that are damaged or changed: refused with the file's name, or the result of the file as it was.

What no file can tell is left out: other values of the right type, where they have no checksum.
"""

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy
import pytest
from forked import run_forked
from fuzzing import cases, generator
from hdf_files import put
from launching import hvdtrain

CONFIG = """
import hvdtrain, torch

train = {"files": "file.hdf", "seq_ordering": "random"}
max_seqs, num_epochs, num_threads, learning_rate, model = 3, 2, 1, 0.1, "model"
extern_data = {"data": {"dim": 2, "dtype": "float32"}, "classes": {"dim": 4, "sparse": True}}

def get_model(**_):
    return torch.nn.Linear(2, 4)

def train_step(*, model, extern_data, **_):
    data, classes = extern_data["data"], extern_data["classes"]
    scores, targets = model(data.raw_tensor)[data.mask], classes.raw_tensor[classes.mask].long()
    hvdtrain.get_run_ctx().mark_as_loss(torch.nn.functional.cross_entropy(scores, targets, reduction="none"), "ce")
"""

LENGTHS = numpy.array([3, 1, 4, 2, 5, 2, 3], "int32")


def write(path: Path, **layout: object) -> None:
    """A file with checksums of its structure (libver)."""
    numbers = numpy.random.default_rng(0)
    total = int(LENGTHS.sum())
    with h5py.File(path, "w", libver="latest") as file:
        file.create_dataset("inputs", data=numbers.normal(size=(total, 2)).astype("float32"), **layout)
        file.create_dataset("targets/data/classes", data=numbers.integers(0, 4, total).astype("int32"), **layout)
        file["seqLengths"] = numpy.stack([LENGTHS, LENGTHS], axis=1)
        file["seqTags"] = numpy.array([f"seq-{number}".encode() for number in range(len(LENGTHS))])
        file.create_group("targets/size").attrs["classes"] = [4, 1]
        file.attrs["inputPattSize"] = 2


LAYOUTS: list[dict[str, object]] = [
    {},
    {"chunks": True, "fletcher32": True},
    {"chunks": True, "compression": "gzip", "fletcher32": True},
]


def values_of(path: Path) -> list[range]:
    """Where in a file the values are that have no checksum."""
    found: list[range] = []

    def visit(name: str, member: object) -> None:
        if isinstance(member, h5py.Dataset) and (start := member.id.get_offset()) is not None:
            found.append(range(start, start + member.id.get_storage_size()))

    with h5py.File(path) as file:
        file.visititems(visit)
    return found


def damage(path: Path, numbers: random.Random) -> None:
    """Flip a bit, overwrite or cut off some bytes, or add some."""
    content, values = bytearray(path.read_bytes()), values_of(path)
    places = [place for place in range(len(content)) if not any(place in some for some in values)]
    kind = numbers.choice(["flip", "flip", "flip", "overwrite", "cut", "add"])
    if kind == "flip":
        content[numbers.choice(places)] ^= 1 << numbers.randrange(8)
    elif kind == "overwrite":
        place = numbers.choice(places)
        for offset in range(place, place + numbers.randrange(1, 64)):
            if offset in places:
                content[offset] = numbers.randrange(256)
    elif kind == "cut":
        del content[numbers.randrange(len(content)) :]
    else:
        content += numbers.randbytes(numbers.randrange(1, 4096))
    path.write_bytes(content)


def as_type(name: str, types: list[str]) -> Callable[[h5py.File, random.Random], None]:
    return lambda file, numbers: put(name, file[name][:].astype(numbers.choice(types)))(file)


def other_class(file: h5py.File, numbers: random.Random) -> None:
    classes = file["targets/data/classes"][:]
    classes[numbers.randrange(len(classes))] = numbers.choice([4, 5, 100, 2**31 - 1, -2, -(2**31)])
    put("targets/data/classes", classes)(file)


def other_length(file: h5py.File, numbers: random.Random) -> None:
    lengths = file["seqLengths"][:]
    lengths[numbers.randrange(len(lengths)), numbers.randrange(2)] += numbers.choice([-9, -1, 1, 2**31 - 20])
    put("seqLengths", lengths)(file)


def other_number(name: str) -> Callable[[h5py.File, random.Random], None]:
    """One row more or less."""

    def change(file: h5py.File, numbers: random.Random) -> None:
        values = file[name][:]
        put(name, values[:-1] if numbers.random() < 0.5 else numpy.concatenate([values, values[:1]]))(file)

    return change


def reshaped(name: str, shapes: list[tuple[int, ...]]) -> Callable[[h5py.File, random.Random], None]:
    def change(file: h5py.File, numbers: random.Random) -> None:
        values = file[name][:]
        put(name, numpy.resize(values, (len(values), *numbers.choice(shapes))))(file)

    return change


def other_size(file: h5py.File, numbers: random.Random) -> None:
    file["targets/size"].attrs["classes"] = numbers.choice(
        [[3, 1], [4, 2], [0, 1], [9, 1], [-4, 1], 4, [2**40, 1], "4", [4.0, 1.0]]
    )


def other_width(file: h5py.File, numbers: random.Random) -> None:
    file.attrs["inputPattSize"] = numbers.choice([0, 1, 3, -1, 2.5, "x"])


def without(file: h5py.File, numbers: random.Random) -> None:
    del file[
        numbers.choice(["inputs", "targets", "targets/data", "targets/data/classes", "targets/size", "seqLengths", "seqTags"])
    ]


def renamed(file: h5py.File, numbers: random.Random) -> None:
    file.move("targets/data/classes", "targets/data/" + numbers.choice(["class", "data", "Classes", "classes "]))


CHANGES: list[Callable[[h5py.File, random.Random], None]] = [
    as_type("inputs", ["float64", "float16", "int32", "uint8", "complex64", "S8", ">f4"]),
    as_type("targets/data/classes", ["int8", "uint8", "int64", "uint64", "float32", "S4", ">i4"]),
    as_type("seqLengths", ["int8", "int64", "uint64", "float32", "S4"]),
    other_class,
    other_length,
    other_number("inputs"),
    other_number("targets/data/classes"),
    other_number("seqLengths"),
    other_number("seqTags"),
    reshaped("inputs", [(), (1,), (3,), (2, 1), (1, 2)]),
    reshaped("targets/data/classes", [(1,), (2,)]),
    reshaped("seqLengths", [(), (1,), (3,), (2, 1)]),
    other_size,
    other_width,
    without,
    renamed,
]


@pytest.mark.fuzz
@pytest.mark.parametrize("how", ["bytes", "members"])
def test_a_changed_file_is_refused_by_name_or_changes_nothing(how: str, tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text(CONFIG)
    write(tmp_path / "first.hdf")
    first = {"model": tmp_path / "first" / "model", "train.files": tmp_path / "first.hdf"}
    assert hvdtrain(tmp_path / "config.py", first).status == 0  # in this process: no child has to import all of it again
    expected = scores_in(tmp_path / "first")
    for number in range(cases(9)):
        numbers = generator(f"training on changed {how}", number)
        layout = numbers.choice(LAYOUTS)
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder / "file.hdf", **layout)
        label = f"case {number}: {layout}"
        if how == "bytes":
            damage(folder / "file.hdf", numbers)
        else:
            change = numbers.choice(CHANGES)
            label += f", {change.__qualname__}"
            with h5py.File(folder / "file.hdf", "a") as file:
                change(file, numbers)
        got = outcome(tmp_path, folder)
        assert got == expected or (isinstance(got, str) and "file.hdf" in got), f"{label}: {got}"


MISSING_KEY = r"; of train \(\S*file\.hdf\)\nif '\w+' is to be a data key: extern_data has "
"""How the traceback of a config's function ends that asks for data that a file, which is whole, does not have."""


def scores_in(folder: Path) -> list[object]:
    return [json.loads(line)["scores"] for line in (folder / "scores.jsonl").read_text().splitlines()]


def outcome(config: Path, folder: Path) -> str | list[object]:
    """What a training on the folder's file is like: its scores, or its error, or what it printed if that was none."""
    finished = run_forked([config / "config.py", "++model", folder / "model", "++train.files", folder / "file.hdf"])
    if finished.status == 0:
        return scores_in(folder)
    if finished.status == 2 or re.search(MISSING_KEY, finished.err):
        return finished.err
    return f"status {finished.status}: {finished.err[-3000:]}".replace("file.hdf", "the file")
