"""Damaged HDF files: cut off, with flipped bits, with claims that are not true. Each is refused in a message, at once.

Every file is read in a separate process, which has five seconds of a core and little memory: a crash of the HDF5 library, an
endless loop and a claim that is believed would be seen. `HVDTRAIN_FUZZ_SEED=N` repeats a run, whose seed pytest names at the end.
"""

import os
import random
import resource
import signal
from pathlib import Path

import h5py
import numpy
import pytest
from fuzzing import SEED, cases
from hdf_files import EXPECTED, Change, contents, put, write

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.errors import DataError

NUMBER = cases(25)
"""Files that are cut off, and as many with flipped bits."""

SECONDS = 5
MEMORY = 8 << 30
"""Bytes of address space, on top of what PyTorch and its dependencies take."""

pytestmark = pytest.mark.fuzz

LAYOUTS: list[dict[str, object]] = [
    {},
    {"chunks": True},
    {"chunks": True, "compression": "gzip"},
    {"chunks": True, "fletcher32": True},
]


def outcome(path: Path) -> str:
    """'as written', 'other data', a message, or how the process that read the file ended."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(12 * SECONDS)  # where it waits
        limit = MEMORY + int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            dataset = open_hdf([path])
            text = "as written" if contents(dataset) == EXPECTED else "other data"
        except DataError as error:
            text = str(error)
        except BaseException as error:  # would be a traceback
            text = f"raises {error!r}"
        os.write(writer, text.encode()[:4000])
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        text = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return text if os.WIFEXITED(status) else f"ended by {signal.Signals(os.WTERMSIG(status)).name}"


def is_message(path: Path, text: str) -> bool:
    """One line that begins with the file's name, as all of the project's."""
    return text.startswith(f"{path}: ") and "\n" not in text


def write_laid_out(path: Path, generator: random.Random) -> Path:
    """A good file in some layout and some version of the format."""
    layout = generator.choice(LAYOUTS)

    def change(file: h5py.File) -> None:
        for name in ("inputs", "targets/data/classes", "seqLengths"):
            values = file[name][:]
            del file[name]
            file.create_dataset(name, data=values, **layout)

    return write(path, change, libver=generator.choice(["earliest", "latest"]))


def test_files_that_are_cut_off(tmp_path: Path) -> None:
    generator = random.Random(SEED)
    path = tmp_path / "cut.hdf"
    for number in range(NUMBER):
        size = write_laid_out(path, generator).stat().st_size
        os.truncate(path, kept := generator.randrange(size))
        text = outcome(path)
        assert text == "as written" or is_message(path, text), (SEED, number, kept, text)


def test_flipped_bits(tmp_path: Path) -> None:
    """Values may differ: nothing in a file says what they were. But nothing else happens."""
    generator = random.Random(SEED + 1)
    path = tmp_path / "flipped.hdf"
    refused = 0
    for number in range(NUMBER):
        contents = bytearray(write_laid_out(path, generator).read_bytes())
        places = [generator.randrange(8 * len(contents)) for _ in range(generator.choice([1, 8, 64]))]
        for place in places:
            contents[place // 8] ^= 1 << place % 8
        path.write_bytes(contents)
        text = outcome(path)
        assert text in ("as written", "other data") or is_message(path, text), (SEED, number, places, text)
        refused += is_message(path, text)
    assert refused > NUMBER // 10


HUGE = 2**40


def claims(name: str, shape: tuple[int, ...], **layout: object) -> Change:
    """A dataset that says it has this shape, of which nothing is stored."""

    def lie(file: h5py.File) -> None:
        kind = file[name].dtype
        del file[name]
        file.create_dataset(name, shape, kind, **layout)

    return lie


def filled_until(rows: int, of: int, **layout: object) -> Change:
    """A dataset with a chunk for every row, of which its writer has come to write only the first ones."""

    def lie(file: h5py.File) -> None:
        del file["inputs"]
        file.create_dataset("inputs", (of, 1), "u1", chunks=(1, 1), **layout)[:rows] = 1
        del file["seqLengths"]
        file["seqLengths"] = numpy.array([[of - 2, 1], [2, 3]])

    return lie


def of_time(file: h5py.File) -> None:
    del file["inputs"]
    kind, space = h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((5,))
    h5py.h5d.create(file.id, b"inputs", kind, space)


def attribute(place: str, name: str, value: object) -> Change:
    return lambda file: file[place].attrs.__setitem__(name, value)


# More of them, without a limit on memory and time, are in test_hdf.py (MALFORMED).
LIES: dict[str, Change] = {
    "rows of lengths": claims("seqLengths", (HUGE, 2), chunks=(1024, 2)),
    "rows of lengths, contiguous": claims("seqLengths", (HUGE, 2)),
    "columns": claims("inputs", (5, HUGE), chunks=(1, 4096)),
    "columns, contiguous": claims("inputs", (5, HUGE)),
    "rows and columns": claims("inputs", (HUGE, HUGE), chunks=(1024, 1024), compression="gzip"),
    "rows that were never written": claims("inputs", (2_000_000_000, 2), chunks=(65536, 2)),
    "rows that were never compressed": claims("inputs", (2_000_000_000, 2), chunks=(65536, 2), compression="gzip"),
    "a last chunk": filled_until(29, 30),
    "a last chunk, compressed": filled_until(29, 30, compression="gzip"),
    "the last of many chunks": filled_until(2999, 3000),
    "the last of many chunks, compressed": filled_until(2999, 3000, compression="gzip"),
    "half of many chunks": filled_until(1500, 3000),
    "no column": put("inputs", numpy.zeros((5, 0), numpy.float32)),
    "a time": of_time,
    "classes": attribute("targets/size", "classes", [HUGE, 1]),
    "fewer classes than none": attribute("targets/size", "classes", [-4, 1]),
    "tags in Latin-1": put("seqTags", numpy.array(["Stra\xdfe".encode("latin-1"), b"two"])),
    "labels in Latin-1": put("targets/labels/classes", numpy.array(["Stra\xdfe".encode("latin-1")] * 4)),
    "no target": put("targets/data/classes", None),
    "a link to itself": put("inputs", h5py.SoftLink("/inputs")),
    "another file": put("inputs", h5py.ExternalLink("/etc/passwd", "/")),
}


@pytest.mark.parametrize("name", LIES)
def test_claims_that_are_not_true(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "lies.hdf", LIES[name])
    text = outcome(path)
    assert is_message(path, text), text
    assert "expected" in text


def test_pipes_and_devices(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.hdf")
    assert outcome(tmp_path / "pipe.hdf") == f"{tmp_path}/pipe.hdf: expected an HDF file, got a pipe or device"
