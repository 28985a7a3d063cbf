"""Sequences per second, and what the first opening costs: the same vectors in HDF, tar, Arrow and parquet files.

python benchmarks/shards.py [--sequences 4000] [--rounds 5]

The batches have a random order, except where the name says blocks: then rows of a parquet file come from one row group at a time.
If the package webdataset is installed, it reads the tar file from beginning to end, sequence by sequence.
"""

import argparse
import functools
import io
import tarfile
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pyarrow
import pyarrow.parquet
from measuring import in_batches, machine, table, take_turns

from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset, Scanning
from hvdtrain.data.opening import OpeningContext, open_dataset
from hvdtrain.plugins.hdf_tools.writer import HDFWriter

FEATURES = 40
GROUP = 500
"""Rows of a row group."""


def write(folder: Path, sequences: list[numpy.ndarray]) -> None:
    """Write the sequences as all.hdf, all.tar, all.arrow and all.parquet, each with its number as a class."""
    with HDFWriter(folder / "all.hdf", dims={"classes": 10}) as hdf, tarfile.open(folder / "all.tar", "w") as tar:
        for number, frames in enumerate(sequences):
            hdf.add(f"{number:06}", {"data": frames, "classes": numpy.array([number % 10], numpy.int32)})
            stream = io.BytesIO()
            numpy.save(stream, frames)
            for suffix, content in {"npy": stream.getvalue(), "cls": str(number % 10).encode()}.items():
                member = tarfile.TarInfo(f"{number:06}.{suffix}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    vectors = pyarrow.list_(pyarrow.list_(pyarrow.float32(), FEATURES))
    columns = {"data": pyarrow.array(map(list, sequences), vectors), "classes": [number % 10 for number in range(len(sequences))]}
    rows = pyarrow.table(columns)
    pyarrow.parquet.write_table(rows, folder / "all.parquet", row_group_size=GROUP)
    with pyarrow.ipc.new_file(folder / "all.arrow", rows.schema) as writer:
        writer.write_table(rows)


def opened(folder: Path, config: dict[str, Any]) -> Dataset:
    spec, problems = parse("train", config, {})
    if spec is None:
        raise ValueError(problems)
    return open_dataset(spec, OpeningContext(scanning=Scanning(folder / "lengths")))


def read(dataset: Dataset, batches: list[numpy.ndarray]) -> float:
    for batch in batches:
        dataset.batch(batch)
    return float(sum(map(len, batches)))


def stream_of_webdataset(path: Path) -> float:
    import webdataset

    return float(sum(1 for _ in webdataset.WebDataset(str(path), shardshuffle=False).decode()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=4_000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    generator = numpy.random.default_rng(0)
    lengths = generator.integers(50, 400, options.sequences)
    print(f"batches of 64 of {options.sequences} sequences of 50 to 400 vectors of {FEATURES}; {machine()}")
    shuffled = in_batches(options.sequences, 64)
    in_order = [numpy.sort(batch) for batch in numpy.array_split(numpy.arange(options.sequences), len(shuffled))]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, [generator.normal(size=(length, FEATURES)).astype(numpy.float32) for length in lengths])
        kinds = {"HDF": "HDFDataset", "tar": "TarDataset", "Arrow": "ArrowDataset", "parquet": "ParquetDataset"}
        works: dict[str, Callable[[], float]] = {}
        for what, kind in kinds.items():
            seconds = []
            for _ in range(2):
                began = time.process_time()
                dataset = opened(folder, {"class": kind, "files": str(folder / f"all.{what.lower()}")})
                seconds.append(time.process_time() - began)
            print(f"{what}: opened in {seconds[0]:.2f} s of CPU time, again in {seconds[1]:.2f} s")
            works[what] = functools.partial(read, dataset, shuffled)
        works["parquet in blocks"] = functools.partial(read, dataset, in_order)
        try:
            stream_of_webdataset(folder / "all.tar")
            works["webdataset"] = functools.partial(stream_of_webdataset, folder / "all.tar")
        except ImportError:
            print("webdataset: not installed")
        rates = take_turns(works, options.rounds)
    table(rates, "1000 sequences/s", 1000, "HDF")


if __name__ == "__main__":
    main()
