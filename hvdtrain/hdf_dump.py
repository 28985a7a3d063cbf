"""Converting any dataset into an HDF file: `python -m hvdtrain.hdf_dump`, or tools/hdf_dump.py in a checkout."""

from __future__ import annotations

import argparse
import ast
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hvdtrain.cli import parse as parse_command_line
from hvdtrain.comm.mpi import open_peers
from hvdtrain.comm.peers import Alone, Crashed, Peers, agreed
from hvdtrain.config.reference import is_reference
from hvdtrain.config.source import load
from hvdtrain.data.compression import NAMES as COMPRESSIONS
from hvdtrain.data.sources import DatasetSpec, parse
from hvdtrain.dump import Selection, dump
from hvdtrain.errors import ConfigError, HvdtrainError
from hvdtrain.returnn_layer.imports import Layer

EPILOG = """\
SOURCE is one of
  a config            tools/hdf_dump.py g2p.py dev.hdf --dataset dev
  a dataset dict      tools/hdf_dump.py '{"class": "HDFDataset", "files": ["a.hdf", "b.hdf"]}' both.hdf
  HDF files           tools/hdf_dump.py a.hdf,b.hdf both.hdf
  Python of your own  tools/hdf_dump.py my_corpus.py:sequences out.hdf
                      tools/hdf_dump.py '{"class": "my_corpus.py:Corpus", "part": "train"}' out.hdf
  a folder of files   tools/hdf_dump.py '{"class": "FolderDataset", "folder": "wav", "transcript": "text"}' out.hdf
  Hugging Face        tools/hdf_dump.py '{"class": "HuggingFaceDataset", "folder": "saved", "columns": {"data": "x"}}' out.hdf
  RETURNN             tools/hdf_dump.py '{"class": "ReturnnDataset", "dataset": {"class": "OggZipDataset", ...}}' out.hdf

Python of your own is a function or class that can be iterated over and yields (tag, {key: array}): arrays of shape
(frames,) for class indices, (frames, features) for vectors. The key 'data' is the input. An attribute `labels`
({key: names of the classes}) or `dims` ({key: number of classes}) gives the dimension of class indices, else it is the
largest index plus one; `__len__` lets the remaining time be shown.

A folder's files are .npy arrays or 16-bit PCM .wav, named by tag; the lines of the transcript are `tag text`. Hugging Face's is
what `save_to_disk` of the package `datasets` wrote. A dataset of RETURNN is read by RETURNN, which has to be installed; one
that RETURNN alone has may also stand in a config as it is. docs/datasets.md has their options.

mpirun -np N tools/hdf_dump.py ... converts on N processes: each a part of the sequences, which must come in the same order
in all of them, joined into the same file that one process writes. What can be indexed (HDF files, a folder, a sequence in
Python's sense) gains from it; of what can only be iterated over, each process skips the others' parts.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the tool; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="hdf_dump.py",
        description="Convert a dataset into an HDF file in RETURNN's layout, contiguous, so that it can be memory-mapped.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", metavar="SOURCE", help="a config, a dataset dict, HDF files, or 'module:name' of your own")
    parser.add_argument("out", metavar="OUT.hdf", type=Path, help="the file to be")
    parser.add_argument("--dataset", default="train", help="of a config: train (the default), dev, eval or another key")
    parser.add_argument("--epoch", type=int, default=1, help="whose order and part of the data (partition_epoch); default 1")
    parser.add_argument("--start_seq", type=int, default=0, help="the first sequence, counted from 0")
    parser.add_argument("--end_seq", type=int, default=None, help="the last sequence, inclusive as in RETURNN; default: all")
    parser.add_argument(
        "--compression", choices=COMPRESSIONS, help="smaller, but slower to read: gzip, lzf, or with hdf5plugin zstd, lz4, blosc2"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.hdf if it exists")
    given = sys.argv[1:] if arguments is None else arguments
    overrides_from = next((i for i, argument in enumerate(given) if argument.startswith("++")), len(given))
    options = parser.parse_args(given[:overrides_from])
    peers: Peers = Alone()
    try:
        with terminating():
            peers = open_peers()

            def find() -> DatasetSpec:
                _, overrides = parse_command_line([options.source, *given[overrides_from:]])
                return find_dataset(options.source, options.dataset, overrides)

            spec = agreed(peers, find)
            selection = Selection(options.epoch, options.start_seq, options.end_seq)
            written = dump(spec, options.out, selection, peers, overwrite=options.overwrite, compression=options.compression)
    except HvdtrainError as error:
        if peers.rank == 0:  # all ranks have the same error
            print(error, file=sys.stderr)
        return 1 if isinstance(error, Crashed) else 2
    except KeyboardInterrupt:
        if peers.rank == 0:
            print(f"\ninterrupted; {options.out} was not written", file=sys.stderr, flush=True)
        peers.abort(130)
        return 130
    if peers.rank == 0:
        print(written)
    return 0


@contextmanager
def terminating() -> Iterator[None]:
    """Take a request to terminate, which mpirun makes out of Ctrl-C, for Ctrl-C: what was begun is cleared away."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def find_dataset(source: str, name: str, overrides: dict[str, str]) -> DatasetSpec:
    """What the command line names: a config's dataset, a dict, files, or a user's Python. Raises: ConfigError."""
    value: Any = source
    if source.lstrip().startswith("{"):
        try:
            value = ast.literal_eval(source)
        except (ValueError, SyntaxError) as error:
            raise ConfigError([f"dataset dict: expected a Python dict, got {source!r} ({error})"]) from None
    elif source.endswith((".py", ".json", ".config")) and not is_reference(source):
        loaded = load([Path(source)], overrides, {}, Layer.unless_installed())
        if loaded.problems:
            raise ConfigError(loaded.problems)
        values = loaded.values
        if name not in values and name not in (values.get("eval_datasets") or {}):
            raise ConfigError([f"--dataset: expected a dataset of {source}, got {name!r}"])
        value = values[name] if name in values else values["eval_datasets"][name]
    spec, problems = parse(name, value, {})
    if spec is None:
        raise ConfigError(problems)
    return spec


if __name__ == "__main__":
    sys.exit(main())
