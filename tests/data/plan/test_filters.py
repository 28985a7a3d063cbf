"""Compression that this Python cannot unpack: the message says which package can."""

import subprocess
import sys
from pathlib import Path

import h5py
import numpy
import pytest

from hvdtrain.data.hdf import compression
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError

hdf5plugin = pytest.importorskip("hdf5plugin")

FRAMES = numpy.arange(4000, dtype=numpy.float32).reshape(1000, 4)

WITHOUT_PLUGIN = """
import sys
sys.modules["hdf5plugin"] = None  # as where it is not installed
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError
for path in sys.argv[1:]:
    try:
        open_hdf([path])
    except DataError as error:
        print(error)
"""


def write(path: Path, **options: object) -> Path:
    with h5py.File(path, "w") as file:
        file.create_dataset("inputs", data=FRAMES, chunks=(100, 4), **options)
        file["seqLengths"] = numpy.full((10, 1), 100)
        file["seqTags"] = [f"seq-{number}" for number in range(10)]
        file.create_group("targets/data")
        file.create_group("targets/size")
    return path


def with_filter(path: Path, number: int) -> Path:
    """The same file, but with another number of a filter in the dataset's header."""
    whole = write(path, **hdf5plugin.Zstd()).read_bytes()
    name = whole.index(b"HDF5 zstd")  # behind number, length of the name, flags, number of values: two bytes each
    assert whole[name - 8 : name - 6] == (32015).to_bytes(2, "little")
    path.write_bytes(whole[: name - 8] + number.to_bytes(2, "little") + whole[name - 6 :])
    return path


def test_the_package_is_named_for_each_of_its_filters(tmp_path: Path) -> None:
    made = {
        "bzip2 (307)": hdf5plugin.BZip2(),
        "blosc (32001)": hdf5plugin.Blosc(),
        "lz4 (32004)": hdf5plugin.LZ4(),
        "bitshuffle (32008)": hdf5plugin.Bitshuffle(),
        "zfp (32013)": hdf5plugin.Zfp(),
        "zstd (32015)": hdf5plugin.Zstd(),
        "blosc2 (32026)": hdf5plugin.Blosc2(),
    }
    paths = {name: write(tmp_path / f"{number}.hdf", **options) for number, (name, options) in enumerate(made.items())}
    for path in paths.values():
        read = numpy.concatenate([open_hdf([path]).sequence(index)["data"] for index in range(10)])
        assert numpy.allclose(read, FRAMES, atol=0.1)
    shown = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLUGIN, *map(str, paths.values())], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == [
        f"{path}: expected a compression that can be read in /inputs, got {name} (pip install hdf5plugin)"
        for name, path in paths.items()
    ]


def test_a_filter_that_no_package_has(tmp_path: Path) -> None:
    path = with_filter(tmp_path / "file.hdf", 32100)
    with pytest.raises(DataError) as caught:
        open_hdf([path])
    message = str(caught.value)
    assert message.startswith(f"{path}: expected a compression that can be read in /inputs, got ")
    assert "(32100) (it is not in hdf5plugin; HDF5's list of registered filters" in message


def test_a_filter_that_is_newer_than_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compression.IN_PLUGIN, 32101, "newest")
    path = with_filter(tmp_path / "file.hdf", 32101)
    with pytest.raises(DataError, match=r"\(32101\) \(pip install --upgrade hdf5plugin: this version does not have it\)"):
        open_hdf([path])
