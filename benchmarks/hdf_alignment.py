"""What it brings that HDFWriter aligns data: short sequences from a file by it and from one where HDF5 put them anywhere.

python benchmarks/hdf_alignment.py [--sequences 100001] [--rounds 7]

Sequences a second of this process, in batches of 64 in random order, in turn from both files; medians and their ratio.
"""

import argparse
import tempfile
import time
from pathlib import Path
from unittest.mock import patch

import numpy

from hvdtrain.data import writer
from hvdtrain.data.hdf import open_hdf


def write(path: Path, count: int, alignment: int) -> None:
    """Words of 3 to 13 letters, which come with a phone less. An odd number of tags of odd width leaves odd offsets."""
    generator = numpy.random.default_rng(0)
    with patch.object(writer, "ALIGNMENT", alignment), writer.HDFWriter(path, dims={"data": 30, "classes": 40}) as file:
        for number in range(count):
            letters = int(generator.integers(3, 14))
            word = {
                "data": generator.integers(0, 30, letters, numpy.int32),
                "classes": generator.integers(0, 40, letters - 1, numpy.int32),
            }
            file.add(f"seq{number:06}", word)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_001)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    count = options.sequences | 1
    order = numpy.random.default_rng(1).permutation(count)
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, alignment in (("anywhere", 1), ("aligned", writer.ALIGNMENT)):
            write(Path(folder, name), count, alignment)
            files[name] = open_hdf([Path(folder, name)])
        rates: dict[str, list[float]] = {name: [] for name in files}
        for _ in range(options.rounds):
            for name, file in files.items():
                began = time.process_time()
                for start in range(0, count, 64):
                    file.padded(order[start : start + 64])
                rates[name].append(count / (time.process_time() - began))
        medians = {name: float(numpy.median(measured)) for name, measured in rates.items()}
        for name, rate in medians.items():
            print(f"{name}: {rate:.0f} sequences/s")
        print(f"aligned against anywhere: {medians['aligned'] / medians['anywhere']:.2f}")


if __name__ == "__main__":
    main()
