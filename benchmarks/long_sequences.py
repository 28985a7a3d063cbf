#!/usr/bin/env python3
"""Long sequences in random order, into padded batches: hvdtrain against copying memory and against RETURNN's HDFDataset.

Two files hold the same frames: a contiguous one, as hvdtrain writes them, and one in small chunks, as RETURNN's SimpleHDFWriter
makes them; the latter is repacked by `hvdtrain check --repack` for hvdtrain. Rates are megabytes of frames (without
padding) a second of the processor, the page cache is warm. RETURNN reads

- sequence by sequence, with `load_seqs` and `get_data`, and nothing else: no batch, no padding;
- in batches, through the parts of its pipeline for PyTorch, in this process;
- the same with its default cache (70 % of the memory) in the first epoch, in which the cache is filled, and in the second one.
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
from hvdtrain.hdf_tools.check import repack


def main() -> None:
    """Make the files, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=1000, help="of 550 frames in the mean; default 1000: 176 MB")
    parser.add_argument("--frames", type=int, nargs=2, default=[300, 800], help="of the shortest and the longest (300 800)")
    parser.add_argument("--batch", type=int, default=16, help="sequences in a batch (16)")
    parser.add_argument("--rounds", type=int, default=7, help="in turn (7)")
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
            print(f"\nThe file by SimpleHDFWriter, chunks {file['inputs'].chunks}; hvdtrain reads it repacked")
        contest(repacked, chunked, options.batch, options.rounds)
        print("\nRETURNN's default cache, on the contiguous file: seconds of the clock, MB a second")
        cached(contiguous, options.batch)
    print(machine())


def contest(own: Path, other: Path, size: int, rounds: int) -> None:
    """hvdtrain on one file, RETURNN on the other, and memory beside them."""
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
        "memory copied, from first to last": copied,
        "hvdtrain, batches": of_hvdtrain,
        "hvdtrain, sequences copied one by one": one_by_one,
        "RETURNN, sequences": of_returnn,
        "RETURNN, batches": of_returnn_in_batches,
    }
    table(take_turns(contestants, rounds), "MB/s", 1e6, "hvdtrain, batches")


def cached(path: Path, size: int) -> None:
    """RETURNN fills its cache in a thread that it does not wait for with the processor: the clock counts."""
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
