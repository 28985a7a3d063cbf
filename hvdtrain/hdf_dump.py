"""Converting any dataset into an HDF file: `python -m hvdtrain.hdf_dump`, or tools/hdf_dump.py in a checkout."""

from __future__ import annotations

import argparse
import ast
import sys
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from hvdtrain.cli import parse as parse_command_line
from hvdtrain.config.reference import is_reference
from hvdtrain.config.source import load
from hvdtrain.data.order import order
from hvdtrain.data.selection import listed
from hvdtrain.data.sources import DatasetSpec, parse
from hvdtrain.data.types import Array, Dataset
from hvdtrain.data.writer import HDFWriter
from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.timer import clock_text

EPILOG = """\
SOURCE is one of
  a config            tools/hdf_dump.py g2p.py dev.hdf --dataset dev
  a dataset dict      tools/hdf_dump.py '{"class": "HDFDataset", "files": ["a.hdf", "b.hdf"]}' both.hdf
  HDF files           tools/hdf_dump.py a.hdf,b.hdf both.hdf
  Python of your own  tools/hdf_dump.py my_corpus.py:sequences out.hdf
                      tools/hdf_dump.py '{"class": "my_corpus.py:Corpus", "part": "train"}' out.hdf

Python of your own is a function or class that can be iterated over and yields (tag, {key: array}): arrays of shape
(frames,) for class indices, (frames, features) for vectors. The key 'data' is the input. An attribute `labels`
({key: names of the classes}) or `dims` ({key: number of classes}) gives the dimension of class indices, else it is the
largest index plus one; `__len__` lets the remaining time be shown.
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
    parser.add_argument("--overwrite", action="store_true", help="replace OUT.hdf if it exists")
    given = sys.argv[1:] if arguments is None else arguments
    overrides_from = next((i for i, argument in enumerate(given) if argument.startswith("++")), len(given))
    options = parser.parse_args(given[:overrides_from])
    try:
        _, overrides = parse_command_line([options.source, *given[overrides_from:]])
        spec = find_dataset(options.source, options.dataset, overrides)
        dump(spec, options.out, options.epoch, options.start_seq, options.end_seq, options.overwrite)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"\ninterrupted; {options.out} was not written", file=sys.stderr)
        return 130
    return 0


def find_dataset(source: str, name: str, overrides: dict[str, str]) -> DatasetSpec:
    """What the command line names: a config's dataset, a dict, files, or a user's Python. Raises: ConfigError."""
    value: Any = source
    if source.lstrip().startswith("{"):
        try:
            value = ast.literal_eval(source)
        except (ValueError, SyntaxError) as error:
            raise ConfigError([f"dataset dict: expected a Python dict, got {source!r} ({error})"]) from None
    elif source.endswith((".py", ".json", ".config")) and not is_reference(source):
        loaded = load([Path(source)], overrides, {})
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


def dump(spec: DatasetSpec, out: Path, epoch: int = 1, start: int = 0, end: int | None = None, overwrite: bool = False) -> None:
    """Write a dataset's sequences `start` to `end` (inclusive) of an epoch into a file.

    Raises:
        DataError: the source or what it yields is bad, or the file exists.
    """
    for name, number, least in (("epoch", epoch, 1), ("start_seq", start, 0), ("end_seq", start if end is None else end, start)):
        if number < least:
            raise DataError(f"--{name}: expected {least} or more, got {number}")
    source = spec.open()
    total, sequences = _sequences(spec, source, epoch)
    stop = None if end is None else end + 1
    if total is not None:
        total = max(0, min(total, stop if stop is not None else total) - start)
    labels = {key: list(names) for key, names in dict(getattr(source, "labels", {})).items()}
    dims = dict(getattr(source, "dims", {}))
    for key, stream in dict(getattr(source, "streams", {})).items():
        labels |= {key: list(stream.labels)} if stream.labels else {}
        dims |= {key: stream.dim} if stream.sparse and stream.dim > 1 else {}  # RETURNN writes 1 where it does not know
    began = time.monotonic()
    with HDFWriter(out, labels=labels, dims=dims, overwrite=overwrite) as writer:
        for tag, arrays in _shown(islice(sequences, start, stop), total):
            writer.add(tag, arrays)
    frames = ", ".join(f"{count} frames of {key!r}" for key, count in sorted(writer.num_frames.items()))
    seconds = time.monotonic() - began
    print(f"{out}: {writer.num_sequences} sequences, {frames}, {out.stat().st_size / 1e6:.1f} MB in {seconds:.1f} s")


def _sequences(spec: DatasetSpec, source: Any, epoch: int) -> tuple[int | None, Iterator[tuple[str, dict[str, Array]]]]:
    """How many sequences there are, where that is known, and the sequences in the epoch's order."""
    if hasattr(source, "sequence") and hasattr(source, "lengths"):
        lengths = source.lengths
        by = lengths["data"] if "data" in lengths else next(iter(lengths.values()))
        indices = order(by, spec.order, epoch, listed(source, spec.order.seq_list_filter_file))
        return len(indices), _in_order(source, indices)
    if not hasattr(source, "__iter__"):
        raise DataError(f"{spec.name}: expected something that yields (tag, {{key: array}}), got {type(source).__name__}")
    return (len(source) if hasattr(source, "__len__") else None), _checked(spec.name, source)


def _in_order(source: Dataset, indices: Array, block: int = 10_000) -> Iterator[tuple[str, dict[str, Array]]]:
    """Sequences by index; their tags are read a block at a time."""
    for first in range(0, len(indices), block):
        some = indices[first : first + block].tolist()
        for tag, index in zip(source.tags(some), some, strict=True):
            yield tag, source.sequence(index)


def _checked(name: str, source: Iterable[Any]) -> Iterator[tuple[str, dict[str, Array]]]:
    for number, item in enumerate(source):
        if not (isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str) and isinstance(item[1], dict)):
            raise DataError(f"{name}: expected (tag, {{key: array}}) as sequence {number}, got {str(item)[:80]}")
        yield item


def _shown(sequences: Iterable[tuple[str, dict[str, Array]]], total: int | None) -> Iterator[tuple[str, dict[str, Array]]]:
    """Pass sequences on; on a terminal, show how many went by and how long the rest will take."""
    began = last = time.monotonic()
    shown = sys.stderr.isatty()
    for done, item in enumerate(sequences, start=1):
        yield item
        now = time.monotonic()
        if shown and now - last > 0.2:
            last = now
            rate = done / (now - began)
            rest = f" of {total}, {clock_text((total - done) / rate)} remaining" if total else ""
            print(f"\r{done} sequences{rest}, {rate:.0f}/s ", end="", file=sys.stderr, flush=True)
    if shown and last > began:
        print("\r" + " " * 70 + "\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
