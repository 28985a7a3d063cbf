"""The command `hvdtrain dump`: convert any dataset into an HDF file."""

from __future__ import annotations

import argparse
import ast
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.comm.mpi import Alone, Crashed, Peers, open_peers, run_on_all
from hvdtrain.config.check import did_you_mean
from hvdtrain.config.foreign import Watches
from hvdtrain.config.source import COMMAND_LINE, command_parser, is_reference, load, parse_command_line, split_overrides
from hvdtrain.data.combine.user_code import with_own_numbers
from hvdtrain.data.copies import CopyFolder, copy_files
from hvdtrain.data.dataset import Dataset, Item, SequenceSource, as_dataset, as_source, is_map_style
from hvdtrain.data.feed import Feed
from hvdtrain.data.formats.items import ItemForm, ItemsDataset
from hvdtrain.data.formats.iterable import IterableDataset, is_iterable, refuse_batches, takes_epoch
from hvdtrain.data.formats.objects import Objects
from hvdtrain.data.hdf.compression import NAMES as COMPRESSIONS
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.hdf.writer import UNKNOWN_DIM, HDFWriter
from hvdtrain.data.keys import DatasetSpec
from hvdtrain.data.plan.batch_keys import BatchKeys
from hvdtrain.data.plan.chunks import find_listed
from hvdtrain.data.plan.order_keys import OrderKeys, non_default
from hvdtrain.data.remote import is_remote
from hvdtrain.data.sources import OpeningContext, numbers_of_opening, parse
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError, HvdtrainError, PeerFailure, Problem
from hvdtrain.runtime.log import progress_bar, status_line

DESCRIPTION = "Convert a dataset into an HDF file in RETURNN's layout. Without --compression the file can be memory-mapped."

NO_COPIES: Mapping[str, str] = {}

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
    given, overrides_given = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options, more = parser().parse_known_args(given)
    if more:
        files = all(Path(word).exists() for word in [options.source, str(options.out), *more[:-1]])
        hint = f" (several files are written {options.source},{options.out})" if files else ""
        parser().error(f"unrecognized arguments: {' '.join(more)}{hint}")
    peers: Peers = Alone()
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
    made = command_parser("dump", DESCRIPTION, EPILOG)
    add = made.add_argument
    add("source", metavar="SOURCE", help="a config, a dataset dict, HDF files, or 'module:name' of your code")
    add("out", metavar="OUT.hdf", type=Path, help="the file to write")
    add("--dataset", default="train", help="a config's dataset: train (the default), dev, eval or another key")
    add("--epoch", type=int, default=1, help="the epoch whose order and part (partition_epoch) are written; default 1")
    add("--start_seq", "--start-seq", type=int, default=0, help="the first sequence, counted from 0")
    add("--end_seq", "--end-seq", type=int, default=None, help="the last sequence, inclusive as in RETURNN; default: all")
    add("--compression", choices=COMPRESSIONS, help="smaller, but slower to read; zstd, lz4 and blosc2 need hdf5plugin")
    add("--cache-dir", type=Path, help="a folder on a local disk for copies of remote files (s3://..., https://...)")
    add("--overwrite", action="store_true", help="replace OUT.hdf if it exists")
    return made


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


def find_dataset(source: str, name: str, overrides: dict[str, str]) -> DatasetSpec:
    """The dataset that the command line names: in a config, or as a dict, files, or a user's code. Raises: ConfigError."""
    value: Any = source
    defaults: dict[str, Any] = {}
    is_config = source.endswith((".py", ".json", ".config")) and not is_reference(source)
    if source.lstrip().startswith("{"):
        try:
            value = ast.literal_eval(source)
        except (ValueError, SyntaxError) as error:
            raise ConfigError.of("wrong-type", f"dataset dict: expected a Python dict, got {source!r} ({error})") from None
    elif is_config:
        loaded = load([Path(source)], overrides, {}, Watches().builtins)
        values = loaded.values
        from hvdtrain.settings import all_keys  # here, so that --help does not import it

        keys = [key.name for key in all_keys()]
        misspelt = [
            Problem.of(
                "unknown-key", f"{name}: unknown key in {COMMAND_LINE}{did_you_mean(name, [*values.keys() - {name}, *keys])}"
            )
            for name in loaded.unused
            if name not in keys
        ]
        if problems := [*loaded.problems, *misspelt]:
            raise ConfigError(problems)
        named: dict[str, Any] = {key: values[key] for key in ("train", "dev", "eval") if key in values}
        named |= values.get("eval_datasets") or {}
        if name not in named and name not in values:
            hint = f"no datasets (a class or function in it: {source}:NAME)"
            present = f"{', '.join(named)}{did_you_mean(name, list(named))}" if named else hint
            raise ConfigError.of("unknown-value", f"--dataset: expected a dataset of {source}, got {name!r}; it has {present}")
        value = named.get(name, values.get(name))
        if name == "train" and values.get("batching"):
            defaults["seq_ordering"] = values["batching"]
    if overrides and not is_config:
        raise ConfigError.of(
            "unknown-value", f"++{next(iter(overrides))}: expected a config as SOURCE, which has keys, got {source}"
        )
    spec, problems = parse(name, value, defaults)
    if spec is None:
        raise ConfigError(problems)
    return spec


def copy_remote(spec: DatasetSpec, folder: Path | None, peers: Peers, at_the_end: ExitStack) -> Mapping[str, str]:
    """Collective. By URL of a dataset's remote files, their copies. Raises: DataError."""
    urls = [path for part in spec.all() for path in part.copied if is_remote(path)]
    if not urls:
        return NO_COPIES
    if folder is None:
        raise ConfigError.of("missing", "--cache-dir: expected a folder on a local disk for copies of remote files, got none")
    copies = CopyFolder(folder, None)
    at_the_end.callback(copies.close)
    return run_on_all(peers, lambda: copy_files(copies, urls, lambda number: None).places)


@dataclass(frozen=True)
class Selection:
    """Sequences of an epoch in its order, from `start` to `end`, both inclusive; None: to the last one."""

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
        total: the number of sequences, if it is known.
        read: returns the sequences from a first number up to a second one (exclusive; None: to the last).
        labels: the names of the classes, by key.
        dims: the number of classes, by key.
        remark: a message for the user.
        close: closes files and ends processes.
    """

    total: int | None
    read: Callable[[int, int | None], Iterator[Item]]
    labels: Mapping[str, Sequence[str]]
    dims: Mapping[str, int]
    remark: str = ""
    close: Callable[[], None] = lambda: None


def open_source(spec: DatasetSpec, epoch: int, copies: Mapping[str, str] = NO_COPIES) -> Source:
    """Open a dataset in the order of its keys, or a source in its own: anything that can be trained on, and texts.

    Raises:
        DataError: it cannot be read, or its keys would be ignored.
    """
    context = OpeningContext(copies=copies)
    with numbers_of_opening(spec.name, context.scanning):
        opened = spec.open(context)
    dataset = as_dataset(opened)
    if dataset is None and is_map_style(opened) and (not isinstance(opened, Sequence) or spec.order != OrderKeys()):
        of_files = isinstance(opened, SequenceSource)
        dataset = opened.to_train_on(spec.name, context.scanning) if of_files else ItemsDataset(spec.name, opened)
    if dataset is not None:
        dataset = with_own_numbers(spec.name, dataset, context.scanning)
        labels = {name: stream.labels for name, stream in dataset.streams.items() if stream.labels}
        # Unchanged, even if RETURNN's SimpleHDFWriter did not know it: parts of a corpus must not get different ones.
        dims = {name: max(UNKNOWN_DIM, stream.dim) for name, stream in dataset.streams.items() if stream.sparse}
        subset = find_listed(dataset, spec.order.seq_list_filter_file)
        indices = Feed(spec.name, dataset, spec.order, BatchKeys(max_seqs=1), 0, 1, subset=subset).plan(epoch).order
        now = dataset.at_epoch(epoch)
        return Source(len(indices), partial(_read_by_index, now, indices), labels, dims, close=dataset.close)
    if isinstance(opened, Objects):
        raise DataError(
            f"{spec.name}: expected arrays to write, got items for a collate function (without it, items are arrays by data key)"
        )
    if not isinstance(opened, SequenceSource) and is_iterable(opened):
        refuse_batches(spec.name, opened)
        again = spec.repeatable(opened)
        opened = IterableDataset(again) if takes_epoch(again) else opened
    source = as_source(spec.name, opened, ItemForm(lambda number: f"{spec.name}, item {number}").sequence)
    given = non_default(spec.order)
    if refused := [name for name in ("seq_list_filter_file", "partition_epoch", "partition_by") if name in given]:
        raise DataError(
            f"{spec.name}: expected no {' and no '.join(refused)} for {source.name}, which is read from beginning to end, got it "
            "(convert it as it comes, then set the key for the HDF file)"
        )
    remark = f"{spec.name}: written in the order in which {source.name} yields it, without {', '.join(given)}" if given else ""
    total = source.begin_epoch(epoch)
    return Source(total, source.read, source.labels, source.dims, remark)


def _read_by_index(opened: Dataset, indices: Array, start: int, stop: int | None, block: int = 10_000) -> Iterator[Item]:
    """Sequences of a dataset that can be indexed; tags are read in blocks."""
    wanted = indices[start:stop]
    for first in range(0, len(wanted), block):
        some = wanted[first : first + block].tolist()
        for tag, index in zip(opened.tags(some), some, strict=True):
            yield tag, opened.sequence(index)


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
                with progress_bar(items, count, "seq") if writer is not None else nullcontext(items) as drawn:
                    _write(iter(drawn), source, writer, like, folder / f"{peers.rank}.hdf")

            run_on_all(peers, write)

            def join() -> None:
                if writer is not None:
                    for rank in range(1, peers.size):
                        _append(writer, folder / f"{rank}.hdf")
                    with status_line(f"putting the sequences together in {out}"):
                        stack.close()  # here, so that all ranks learn whether it succeeded

            run_on_all(peers, join)
        except KeyboardInterrupt:
            if folder is not None:  # perhaps that of another rank, which may not get to remove it
                shutil.rmtree(folder, ignore_errors=True)
            raise
    if writer is None:
        return ""
    frames = ", ".join(f"{number} frames of {key!r}" for key, number in sorted(writer.num_frames.items()))
    size, seconds = out.stat().st_size / 1e6, time.monotonic() - began
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
    with HDFWriter(path, labels=source.labels, dims=source.dims) as part:
        if like is not None:
            part.expect(*like)
        for tag, arrays in chain([first], items):
            part.add(tag, arrays)


def _append(writer: HDFWriter, path: Path) -> None:
    """Add another rank's part, if it wrote one."""
    if path.exists():
        part = open_hdf([path])
        for tag, arrays in _read_by_index(part, numpy.arange(part.num_sequences), 0, None):
            writer.add(tag, arrays)
        part.close()


def _until_failure(items: Iterable[Item], peers: Peers) -> Iterator[Item]:
    """The same items, until another rank fails. Raises: PeerFailure."""
    for item in items:
        if peers.has_failed():
            raise PeerFailure("stopped, because another rank failed")
        yield item
