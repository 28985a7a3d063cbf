"""The command `hvdtrain dump`: convert any dataset into an HDF file."""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import chain
from pathlib import Path

import numpy

from hvdtrain.config.absent import import_part
from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.data.dataset import Item
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.remote import is_remote
from hvdtrain.errors import ConfigError, DataError, HvdtrainError, PeerFailure
from hvdtrain.plugins.hdf_tools.counted import counted
from hvdtrain.plugins.hdf_tools.peers import Crashed, Peers, open_peers, run_on_all
from hvdtrain.plugins.hdf_tools.sources import NO_COPIES, Selection, Source, find_dataset, open_source, read_by_index
from hvdtrain.plugins.hdf_tools.writer import COMPRESSIONS, HDFWriter
from hvdtrain.runtime.bars import bars

DESCRIPTION = "Convert a dataset into an HDF file in RETURNN's layout. Without --compression the file can be memory-mapped."


EPILOG = """\
SOURCE is one of
  a config            hvdtrain dump g2p.py dev.hdf --dataset dev
  a dataset dict      hvdtrain dump '{"class": "HDFDataset", "files": ["a.hdf", "b.hdf"]}' both.hdf
  HDF files           hvdtrain dump a.hdf,b.hdf both.hdf
  your Python code    hvdtrain dump my_corpus.py:sequences out.hdf
                      hvdtrain dump '{"class": "my_corpus.py:Corpus", "part": "train"}' out.hdf
  a folder of files   hvdtrain dump '{"class": "FolderDataset", "folder": "wav", "transcript": "text"}' out.hdf
  Hugging Face        hvdtrain dump '{"class": "HuggingFaceDataset", "folder": "saved", "columns": {"data": "x"}}' out.hdf
  RETURNN             hvdtrain dump '{"class": "ReturnnDataset", "dataset": {"class": "OggZipDataset", ...}}' out.hdf

Anything that a config can train on can be written. Your Python code is a function or class that yields (tag, {key: array}), or
other items that can be trained on (docs/datasets.md), when iterated over: arrays of shape (frames,) for class indices,
(frames, features) for vectors. The key 'data' is the input. An attribute `labels` ({key: names of the
classes}) or `dims` ({key: number of classes}) gives the dimension of class indices; the default is the largest index plus
one. With `__len__`, the progress bar shows the remaining time.

A folder's files are .npy arrays or 16-bit PCM .wav, named by tag; the lines of the transcript are `tag text`. A Hugging
Face folder is what `save_to_disk` of the package `datasets` wrote. RETURNN, if it is installed, reads its datasets; a
config may also contain them as in RETURNN. docs/datasets.md has the options.

mpirun -np N python -m hvdtrain dump ... writes the same file with N processes. Each reads a part of the sequences, which
must come in the same order in all of them. A source that can be indexed (HDF files, a folder, a sequence in Python's
sense) gains from it; in one that can only be iterated over, each process skips the others' parts.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    words, overrides_given = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options, more = parser().parse_known_args(words)
    if more:
        files = all(Path(word).exists() for word in [options.source, str(options.out), *more[:-1]])
        hint = f" (several files are written {options.source},{options.out})" if files else ""
        parser().error(f"unrecognized arguments: {' '.join(more)}{hint}")
    peers: Peers = Peers()
    try:
        with sigterm_as_interrupt(), ExitStack() as stack:
            peers = open_peers()

            def find() -> DatasetSpec:
                _, overrides = parse_command_line([options.source, *overrides_given])
                return find_dataset(options.source, options.dataset, overrides)

            spec = run_on_all(peers, find)
            selection = Selection(options.epoch, options.start_seq, options.end_seq)
            copies = copy_remote(spec, options.cache_dir, peers, stack)
            written = dump(
                spec, options.out, selection, peers, overwrite=options.overwrite, compression=options.compression, copies=copies
            )
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


def parser() -> argparse.ArgumentParser:
    parser = command_parser("dump", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("source", metavar="SOURCE", help="a config, a dataset dict, HDF files, or 'module:name' of your code")
    add("out", metavar="OUT.hdf", type=Path, help="the file to write")
    add("--dataset", default="train", help="a config's dataset: train (the default), dev, eval or another key")
    add("--epoch", type=int, default=1, help="the epoch whose order and part (partition_epoch) are written; default 1")
    add("--start_seq", "--start-seq", type=int, default=0, help="the first sequence, counted from 0")
    add("--end_seq", "--end-seq", type=int, default=None, help="the last sequence, inclusive as in RETURNN; default: all")
    add("--compression", choices=COMPRESSIONS, help="smaller, but slower to read; zstd, lz4 and blosc2 need hdf5plugin")
    add("--cache-dir", type=Path, help="a folder on a local disk for copies of remote files (s3://..., https://...)")
    add("--overwrite", action="store_true", help="replace OUT.hdf if it exists")
    return parser


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Handle SIGTERM, which mpirun sends on Ctrl-C, like Ctrl-C: partial output is removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def copy_remote(spec: DatasetSpec, folder: Path | None, peers: Peers, at_the_end: ExitStack) -> Mapping[str, str]:
    """Collective. By URL of a dataset's remote files, their copies. Raises: DataError."""
    urls = [path for each in spec.all() for path in each.copied if is_remote(path)]
    if not urls:
        return NO_COPIES
    if folder is None:
        raise ConfigError.of("missing", "--cache-dir: expected a folder on a local disk for copies of remote files, got none")
    making = import_part("hvdtrain.plugins.copies.folder")
    copies = making.CopyFolder(folder, None)
    at_the_end.callback(copies.close)
    return run_on_all(peers, lambda: making.copy_files(copies, urls, lambda number: None).places)


def dump(
    spec: DatasetSpec,
    out: Path,
    selection: Selection,
    peers: Peers,
    *,
    overwrite: bool = False,
    compression: str | None = None,
    copies: Mapping[str, str] = NO_COPIES,
) -> str:
    """Collective. Write a dataset's sequences into a file, each rank a part of them; return a line about what was written.

    The ranks write their parts into a temporary folder of rank 0's writer, which joins and removes them, also after an error.

    Raises:
        DataError: the source or what it yields is bad, the file exists, or it cannot be written.
    """
    began = time.monotonic()
    folder: Path | None = None
    with ExitStack() as stack:
        try:

            def prepare() -> tuple[Source, HDFWriter | None]:
                selection.check()
                source = open_source(spec, selection.epoch, copies)
                stack.callback(source.close)
                if source.total is None and peers.size > 1:
                    raise DataError(
                        f"{spec.name}: expected a source with a known number of sequences (__len__), to share them out "
                        f"among {peers.size} ranks, got one without (start one process)"
                    )
                writer = HDFWriter(out, labels=source.labels, dims=source.dims, overwrite=overwrite, compression=compression)
                return source, stack.enter_context(writer) if peers.rank == 0 else None

            source, writer = run_on_all(peers, prepare)
            if source.remark and writer is not None:
                print(source.remark, file=sys.stderr)
            items, count = _share(source, selection, peers)
            items, like = run_on_all(peers, lambda: _first(items) if peers.rank == 0 else (items, None))
            folder, like = peers.gather((writer.folder if writer is not None else Path(), like), name="folder")[0]
            items = _until_failure(items, peers)

            def write() -> None:
                with counted(items, count, "seq") if writer is not None else nullcontext(items) as drawn:
                    _write(iter(drawn), source, writer, like, folder / f"{peers.rank}.hdf")

            run_on_all(peers, write)

            def join() -> None:
                if writer is not None:
                    for rank in range(1, peers.size):
                        _append(writer, folder / f"{rank}.hdf")
                    with bars().line(f"putting the sequences together in {out}"):
                        stack.close()  # here, so that all ranks learn whether it succeeded

            run_on_all(peers, join)
        except KeyboardInterrupt:
            if folder is not None:  # perhaps that of another rank, which may not get to remove it
                shutil.rmtree(folder, ignore_errors=True)
            raise
    if writer is None:
        return ""
    frames = ", ".join(f"{number} frames of {key!r}" for key, number in sorted(writer.num_frames.items()))
    size = out.stat().st_size / 1e6
    seconds = time.monotonic() - began
    return f"{out}: {writer.num_sequences} sequences, {frames}, {size:.1f} MB in {seconds:.1f} s"


def _share(source: Source, selection: Selection, peers: Peers) -> tuple[Iterator[Item], int | None]:
    """This rank's sequences, which are consecutive, and their number if it is known."""
    stop = None if selection.end is None else selection.end + 1
    if source.total is None:
        return source.read(selection.start, stop), None
    count = max(0, min(source.total, source.total if stop is None else stop) - selection.start)
    begin, end = (selection.start + count * number // peers.size for number in (peers.rank, peers.rank + 1))
    if peers.rank == peers.size - 1:
        return source.read(begin, stop), end - begin  # a source may have more than it reports
    return source.read(begin, end), end - begin


def _first(items: Iterator[Item]) -> tuple[Iterator[Item], Item | None]:
    """All items, and the tag of the first one with empty arrays of its types and shapes."""
    first = next(items, None)
    if first is None:
        return items, None
    return chain([first], items), (first[0], {key: numpy.asarray(values)[:0] for key, values in first[1].items()})


def _write(items: Iterator[Item], source: Source, writer: HDFWriter | None, like: Item | None, path: Path) -> None:
    """Write this rank's share: rank 0 with its writer, the others into a separate file, unless they have no sequences."""
    if writer is not None:
        for tag, arrays in items:
            writer.add(tag, arrays)
        return
    first = next(items, None)
    if first is None:
        return
    with HDFWriter(path, labels=source.labels, dims=source.dims) as rank_writer:
        if like is not None:
            rank_writer.expect(*like)
        for tag, arrays in chain([first], items):
            rank_writer.add(tag, arrays)


def _append(writer: HDFWriter, path: Path) -> None:
    if path.exists():
        share = open_hdf([path])
        for tag, arrays in read_by_index(share, numpy.arange(share.num_sequences), 0, None):
            writer.add(tag, arrays)
        share.close()


def _until_failure(items: Iterable[Item], peers: Peers) -> Iterator[Item]:
    """The same items, until another rank fails. Raises: PeerFailure."""
    for item in items:
        if peers.has_failed():
            raise PeerFailure("stopped, because another rank failed")
        yield item
