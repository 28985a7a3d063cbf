"""The effect of HDFWriter's data alignment: short sequences from an aligned file, and from one without alignment.

python benchmarks/hdf_alignment.py [--sequences 100000] [--rounds 7]
"""

import argparse
import functools
import tempfile
from pathlib import Path
from unittest.mock import patch

import numpy
from measuring import in_batches, machine, table, take_turns

from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools import writer


def write(path: Path, sequences: int, alignment: int) -> None:
    """Write words of 3 to 13 letters with one phone less. An odd number of tags of odd width leads to an odd offset."""
    generator = numpy.random.default_rng(0)
    with patch.object(writer, "ALIGNMENT", alignment), writer.HDFWriter(path, dims={"data": 30, "classes": 40}) as file:
        for number in range(sequences | 1):
            letters = int(generator.integers(3, 14))
            word = {"data": generator.integers(0, 30, letters, numpy.int32)}
            file.add(f"seq{number:06}", word | {"classes": generator.integers(0, 40, letters - 1, numpy.int32)})


def read(file: Dataset, batches: list[numpy.ndarray]) -> float:
    for batch in batches:
        file.padded(batch)
    return float(sum(map(len, batches)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(f"batches of 64 of {options.sequences} words; {machine()}")
    batches = in_batches(options.sequences, 64)
    with tempfile.TemporaryDirectory() as folder:
        files = {}
        for name, alignment in (("aligned", writer.ALIGNMENT), ("not aligned", 1)):
            write(Path(folder, name), options.sequences, alignment)
            files[name] = open_hdf([Path(folder, name)])
        rates = take_turns({name: functools.partial(read, file, batches) for name, file in files.items()}, options.rounds)
    table(rates, "1000 sequences/s", 1000, "aligned")


if __name__ == "__main__":
    main()
