"""Converting any dataset into an HDF file: `python -m hvdtrain dump`, or tools/hdf_dump.py in a checkout."""

from __future__ import annotations

import argparse
import ast
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.cli import parse as parse_command_line
from hvdtrain.comm.mpi import Alone, Crashed, Peers, agreed, open_peers
from hvdtrain.config.reference import is_reference
from hvdtrain.config.source import load
from hvdtrain.data.dataset import Dataset, Item, as_dataset, as_source
from hvdtrain.data.hdf.compression import NAMES as COMPRESSIONS
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.hdf.writer import HDFWriter
from hvdtrain.data.plan.order import OrderKeys, full_epoch, non_default, order
from hvdtrain.data.plan.selection import epoch_subset, listed
from hvdtrain.data.sources import DatasetSpec, parse
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError, HvdtrainError, PeerFailure
from hvdtrain.returnn_layer.imports import Layer
from hvdtrain.runtime.progress_bar import noted, shown


@dataclass(frozen=True)
class Selection:
    """Which sequences: of an epoch's order those from `start` to `end`, both inclusive; to the last where `end` is None."""

    epoch: int = 1
    start: int = 0
    end: int | None = None

    def check(self) -> None:
        """Raises: DataError."""
        last = self.start if self.end is None else self.end
        for name, number, least in (("epoch", self.epoch, 1), ("start_seq", self.start, 0), ("end_seq", last, self.start)):
            if number < least:
                raise DataError(f"--{name}: expected {least} or more, got {number}")


@dataclass(frozen=True)
class Source:
    """Sequences in an epoch's order.

    Attributes:
        total: how many there are, where that is known.
        read: the sequences from one number up to (not including) another, or to the last.
        labels: by key, the classes' names.
        dims: by key, how many classes there are.
    """

    total: int | None
    read: Callable[[int, int | None], Iterator[Item]]
    labels: Mapping[str, Sequence[str]]
    dims: Mapping[str, int]


def open_source(spec: DatasetSpec, epoch: int) -> Source:
    """Open the dataset, or the source to convert, that a config or a command line names. Raises: DataError."""
    opened = spec.open()
    dataset = as_dataset(opened)
    if dataset is not None:
        labels = {name: stream.labels for name, stream in dataset.streams.items() if stream.labels}
        # RETURNN writes 1 if it does not know the dimension.
        dims = {name: stream.dim for name, stream in dataset.streams.items() if stream.sparse and stream.dim > 1}
        dataset = dataset.at_epoch(epoch)
        lengths = dataset.lengths
        listed_sequences = listed(dataset, spec.order.seq_list_filter_file)
        subset = epoch_subset(dataset, listed_sequences, full_epoch(spec.order, epoch))
        by = lengths["data"] if "data" in lengths else next(iter(lengths.values()))
        indices = order(by, spec.order, epoch, subset, dataset.file_bounds())
        return Source(len(indices), partial(_by_index, dataset, indices), labels, dims)
    source = as_source(spec.name, opened)
    if spec.order != OrderKeys():
        raise DataError(
            f"{spec.name}: expected no order keys for {source.name}, which cannot be ordered before it is read, got "
            f"{', '.join(non_default(spec.order))} (convert it as it comes, then order the HDF file)"
        )
    total = source.begin_epoch(epoch)
    return Source(total, source.read, source.labels, source.dims)


def dump(
    spec: DatasetSpec,
    out: Path,
    selection: Selection,
    peers: Peers,
    *,
    overwrite: bool = False,
    compression: str | None = None,
) -> str:
    """Collective. Write a dataset's sequences into a file, each rank a part of them; return what was written, in a line.

    The ranks write parts in a folder of rank 0's writer, which takes them over in the end: whatever happens, no part is
    left behind.

    Raises:
        DataError: the source or what it yields is bad, the file exists, or it cannot be written.
    """
    began = time.monotonic()
    folder: Path | None = None
    with ExitStack() as stack:
        try:

            def prepare() -> tuple[Source, HDFWriter | None]:
                selection.check()
                source = open_source(spec, selection.epoch)
                if source.total is None and peers.size > 1:
                    raise DataError(
                        f"{spec.name}: expected a source that tells how many sequences it has (__len__), to share them out "
                        f"among {peers.size} ranks, got one that does not (start one process)"
                    )
                writer = HDFWriter(out, labels=source.labels, dims=source.dims, overwrite=overwrite, compression=compression)
                return source, stack.enter_context(writer) if peers.rank == 0 else None

            source, writer = agreed(peers, prepare)
            items, count = _share(source, selection, peers)
            items, like = agreed(peers, lambda: _first(items) if peers.rank == 0 else (items, None))
            folder, like = peers.gather((writer.folder if writer is not None else Path(), like))[0]
            passed = _watched(items, peers)
            agreed(peers, lambda: _write(shown(passed, count) if writer else passed, source, writer, folder, like, peers))

            def join() -> None:
                if writer is not None:
                    for rank in range(1, peers.size):
                        _append(writer, folder / f"{rank}.hdf")
                    with noted(f"putting the sequences together in {out}"):
                        stack.close()  # here, so that all ranks know how it went

            agreed(peers, join)
        except KeyboardInterrupt:
            if folder is not None:  # another rank's, perhaps, which may not come to remove it
                shutil.rmtree(folder, ignore_errors=True)
            raise
    if writer is None:
        return ""
    frames = ", ".join(f"{number} frames of {key!r}" for key, number in sorted(writer.num_frames.items()))
    seconds = time.monotonic() - began
    return f"{out}: {writer.num_sequences} sequences, {frames}, {out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s"


def _share(source: Source, selection: Selection, peers: Peers) -> tuple[Iterator[Item], int | None]:
    """This rank's sequences, neighbours of each other, and their number where it is known."""
    stop = None if selection.end is None else selection.end + 1
    if source.total is None:
        return source.read(selection.start, stop), None
    count = max(0, min(source.total, source.total if stop is None else stop) - selection.start)
    begin, end = (selection.start + count * number // peers.size for number in (peers.rank, peers.rank + 1))
    if peers.rank == peers.size - 1:
        return source.read(begin, stop), end - begin  # a source may have more than it says
    return source.read(begin, end), end - begin


def _first(items: Iterator[Item]) -> tuple[Iterator[Item], Item | None]:
    """All the items again, and the types and shapes of the first one."""
    first = next(items, None)
    if first is None:
        return items, None
    return chain([first], items), (first[0], {key: numpy.asarray(values)[:0] for key, values in first[1].items()})


def _write(
    items: Iterator[Item], source: Source, writer: HDFWriter | None, folder: Path, like: Item | None, peers: Peers
) -> None:
    """Write this rank's share: rank 0 into the file itself, the others into parts, if they have any."""
    if writer is not None:
        for tag, arrays in items:
            writer.add(tag, arrays)
        return
    first = next(items, None)
    if first is None:
        return
    with HDFWriter(folder / f"{peers.rank}.hdf", labels=source.labels, dims=source.dims) as part:
        if like is not None:
            part.expect(*like)
        for tag, arrays in chain([first], items):
            part.add(tag, arrays)


def _append(writer: HDFWriter, path: Path) -> None:
    if path.exists():
        part = open_hdf([path])
        for tag, arrays in _by_index(part, numpy.arange(part.num_sequences), 0, None):
            writer.add(tag, arrays)
        part.close()


def _by_index(opened: Dataset, indices: Array, start: int, stop: int | None, block: int = 10_000) -> Iterator[Item]:
    """Sequences of a dataset; their tags are read a block at a time."""
    wanted = indices[start:stop]
    for first in range(0, len(wanted), block):
        some = wanted[first : first + block].tolist()
        for tag, index in zip(opened.tags(some), some, strict=True):
            yield tag, opened.sequence(index)


def _watched(items: Iterable[Item], peers: Peers) -> Iterator[Item]:
    """Pass sequences on until another rank fails."""
    for item in items:
        if peers.has_failed():
            raise PeerFailure("stopped, because another rank failed")
        yield item


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
