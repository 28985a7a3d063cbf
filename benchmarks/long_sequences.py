#!/usr/bin/env python3
"""Reading long sequences in random order into padded batches: hvdtrain compared with copying memory and RETURNN's HDFDataset.

Two files hold the same frames: a contiguous one, as hvdtrain writes it, and one in small chunks, as RETURNN's SimpleHDFWriter
writes it, which hvdtrain reads after `hvdtrain check --repack`. Rates are megabytes of frames (without padding) per second of CPU
time, with a warm page cache. RETURNN reads

- sequence by sequence with `load_seqs` and `get_data`, without batches and padding;
- in batches, through its data pipeline for PyTorch, in this process;
- in batches with its default cache (70 % of the memory), in the first epoch, which fills the cache, and in the following ones.
"""

import argparse
import tempfile
import time
from pathlib import Path

import h5py
import numpy
import returnn_reader
from measuring import in_batches, machine, table, take_turns, write_frames

from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.plugins.hdf_tools.check import repack


def main() -> None:
    """Create the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--sequences", type=int, default=1000, help="number of sequences, of 550 frames on average (1000: 176 MB)"
    )
    parser.add_argument(
        "--frames", type=int, nargs=2, default=[300, 800], help="frames of the shortest and the longest sequence (300 800)"
    )
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (16)")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds (7)")
    options = parser.parse_args()
    returnn_reader.check()
    print(machine())
    with tempfile.TemporaryDirectory() as folder:
        contiguous, chunked, repacked = (Path(folder) / name for name in ("contiguous.hdf", "chunked.hdf", "repacked.hdf"))
        write_frames(contiguous, options.sequences, *options.frames)
        dataset = open_hdf([contiguous])
        returnn_reader.write(chunked, (dataset.sequence(index)["data"] for index in range(dataset.num_sequences)))
        repack(chunked, repacked)
        print(f"\nThe contiguous file, {contiguous.stat().st_size / 1e6:.0f} MB")
        contest(contiguous, contiguous, options.batch, options.rounds)
        with h5py.File(chunked) as file:
            print(f"\nThe file written by SimpleHDFWriter, chunks {file['inputs'].chunks}; hvdtrain reads it after repacking")
        contest(repacked, chunked, options.batch, options.rounds)
        print("\nRETURNN's default cache, on the contiguous file: MB per second of wall time")
        cached(contiguous, options.batch)
    print(machine())


def contest(own: Path, other: Path, size: int, rounds: int) -> None:
    """Compare hvdtrain on one file, RETURNN on the other, and copying memory."""
    dataset = open_hdf([own])
    share = in_batches(dataset.num_sequences, size)
    frame = dataset.sequence(0)["data"][0].nbytes
    original = returnn_reader.open_dataset(other)
    memory = numpy.concatenate([dataset.sequence(index)["data"] for index in range(dataset.num_sequences)])
    target = numpy.empty_like(memory[: len(memory) // len(share)])  # about a batch
    epochs = iter(range(1, 1000))

    def copied() -> float:
        for start in range(0, len(share) * len(target), len(target)):
            numpy.copyto(target, memory[start : start + len(target)])
        return target.nbytes * len(share)

    def of_hvdtrain() -> float:
        return frame * sum(int(batch.data["data"].seq_lens.sum()) for batch in map(dataset.batch, share))

    def one_by_one() -> float:
        return sum(dataset.sequence(index)["data"].copy().nbytes for batch in share for index in batch.tolist())

    def of_returnn() -> float:
        return sum(sequence["data"].nbytes for sequence in returnn_reader.sequences(original, next(epochs)))

    def of_returnn_in_batches() -> float:
        found = returnn_reader.batches(original, next(epochs), size)
        return frame * sum(int(batch["data:seq_len"].sum()) for batch in found)

    contestants = {
        "copying memory in order": copied,
        "hvdtrain, batches": of_hvdtrain,
        "hvdtrain, sequences copied one by one": one_by_one,
        "RETURNN, sequences": of_returnn,
        "RETURNN, batches": of_returnn_in_batches,
    }
    table(take_turns(contestants, rounds), "MB/s", 1e6, "hvdtrain, batches")


def cached(path: Path, size: int) -> None:
    """Compare with RETURNN's cache, by wall time, as RETURNN sleeps while a thread fills its cache."""
    dataset = open_hdf([path])
    own = in_batches(dataset.num_sequences, size)
    original = returnn_reader.open_dataset(path, returnn_reader.default_cache_bytes())
    frame = dataset.sequence(0)["data"][0].nbytes
    for epoch in (1, 2, 3):
        began = time.perf_counter()
        frames = sum(int(batch["data:seq_len"].sum()) for batch in returnn_reader.batches(original, epoch, size))
        theirs = frame * frames / 1e6 / (time.perf_counter() - began)
        began = time.perf_counter()
        frames = sum(int(batch.data["data"].seq_lens.sum()) for batch in map(dataset.batch, own))
        ours = frame * frames / 1e6 / (time.perf_counter() - began)
        print(f"epoch {epoch}: RETURNN {theirs:,.0f}, hvdtrain without a cache {ours:,.0f}, {ours / theirs:.2f} times as fast")


if __name__ == "__main__":
    main()
