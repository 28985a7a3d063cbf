#!/usr/bin/env python3
"""Time and memory that a MetaDataset needs to join two files by tag.

The second file has the sequences of the first one in random order; tags have 40 bytes. Joining two files with the same order is
measured, too.
"""

import argparse
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hvdtrain.data.hdf.dataset import open_hdf  # noqa: E402  # found through the line above
from hvdtrain.plugins.combine.meta import TagIndex  # noqa: E402

BLOCK = 1 << 18


def write(path: Path, order: numpy.ndarray) -> None:
    """Write sequences of one frame with the numbers in `order` in their tags."""
    with h5py.File(path, "w") as file:
        file["inputs"] = numpy.zeros(len(order), numpy.int8)
        file.attrs["inputPattSize"] = 1
        file["seqLengths"] = numpy.ones((len(order), 1), numpy.int32)
        for group in ("targets/data", "targets/size", "targets/labels"):
            file.create_group(group)
        tags = file.create_dataset("seqTags", (len(order),), "S40")
        for start in range(0, len(order), BLOCK):
            block = order[start : start + BLOCK].tolist()
            tags[start : start + BLOCK] = [b"corpus/speaker-%05d/recording-%012d" % (number % 9973, number) for number in block]


def timed(what: str, work: Callable[[], object]) -> object:
    """Do some work, print its time and the peak memory of the process so far, and return the result."""
    began, began_computing = time.monotonic(), time.process_time()
    result = work()
    seconds, computing = time.monotonic() - began, time.process_time() - began_computing
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{what:30} {seconds:7.1f} s, {computing:7.1f} s of CPU time, peak memory {peak:7.0f} MB")
    return result


def main() -> None:
    """Write the files, join them, check the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", nargs="?", type=int, default=10_000_000, help="number of sequences (10 million)")
    size = parser.parse_args().size
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first.hdf"), Path(folder, "second.hdf")
        permutation = numpy.random.default_rng(0).permutation(size)
        write(first, numpy.arange(size))
        write(second, permutation)
        inverse = numpy.argsort(permutation)
        control, same, other = open_hdf([first]), open_hdf([first]), open_hdf([second])
        print(f"{size} sequences")
        index = timed("index of the control dataset", lambda: TagIndex("first", control))
        assert isinstance(index, TagIndex)
        assert timed("a file with the same order", lambda: index.positions_in("same", same)) is None
        found = timed("a file with random order", lambda: index.positions_in("second", other))
        assert numpy.array_equal(found, inverse)


if __name__ == "__main__":
    main()
