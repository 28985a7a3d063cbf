#!/usr/bin/env python3
"""Look at a dataset, or compute the mean and standard deviation of a data key, as RETURNN's tools/dump-dataset.py.

SOURCE is a config, a dataset dict, HDF files, or whatever else `hvdtrain dump` takes. --type says what is printed for each
sequence: stdout (its arrays), print_tag, print_shape, null (nothing); dump_tag and dump_seq_len write files that begin with
--dump_prefix.
"""

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent.parent))

from hvdtrain.data.dataset import Item  # noqa: E402  # found through the line above
from hvdtrain.errors import HvdtrainError  # noqa: E402
from hvdtrain.plugins.hdf_tools.counted import counted
from hvdtrain.plugins.hdf_tools.sources import find_dataset, open_source

TYPES = ("stdout", "print_tag", "print_shape", "dump_tag", "dump_seq_len", "null")


def main(arguments: list[str] | None = None) -> int:
    """Read the sequences; return the exit status."""
    options = parser().parse_args(arguments)
    try:
        source = open_source(find_dataset(options.source, options.dataset, {}), options.epoch)
        if options.get_num_seqs:
            print(f"num_seqs: {sum(1 for _ in source.read(0, None)) if source.total is None else source.total}")
            return 0
        last = 10 if options.endseq is None else options.endseq
        stop = None if last < 0 else last + 1
        total = None if source.total is None else max(0, min(source.total, stop or source.total) - options.startseq)
        with counted(itertools.islice(source.read(options.startseq, stop), total), total, "seq") as items:
            look_at(iter(items), options)
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    return 0


def parser() -> argparse.ArgumentParser:
    """The parser of the options."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = made.add_argument
    add("source", metavar="SOURCE", help="a config, a dataset dict, or HDF files")
    add("--dataset", default="train", help="a config's dataset (default: train)")
    add("--epoch", type=int, default=1, help="the epoch whose order is used (default: 1)")
    add("--startseq", type=int, default=0, help="the first sequence, counted from 0")
    add("--endseq", type=int, help="the last sequence, inclusive; -1: all (default: 10)")
    add("--get_num_seqs", action="store_true", help="print the number of sequences only")
    add("--type", choices=TYPES, default="stdout", help="what to print or write for each sequence (default: stdout)")
    add("--key", default="data", help="the data key of lengths and statistics (default: data)")
    add("--stats", action="store_true", help="print the mean and standard deviation of --key")
    add("--dump_stats", metavar="PREFIX", help="write them to PREFIX.mean.txt and PREFIX.std_dev.txt")
    add("--dump_prefix", default="", help="what files of --type dump_... begin with")
    add("--verbosity", type=int, default=4, help="accepted; what is printed does not depend on it")
    return made


def look_at(items: Iterator[Item], options: argparse.Namespace) -> None:
    """Print or write what the options ask for. Raises: HvdtrainError."""
    moments = Moments()
    lines = []
    for number, (tag, arrays) in enumerate(items, options.startseq):
        if options.key not in arrays:
            raise HvdtrainError(f"--key: expected one of {', '.join(arrays)}, got {options.key!r} (sequence {tag!r})")
        if options.type in ("print_tag", "dump_tag"):
            print(f"seq {number} tag: {tag}")
            lines.append(str(tag))
        elif options.type == "dump_seq_len":
            lines.append(f"{tag!r}: {len(arrays[options.key])},")
        elif options.type in ("stdout", "print_shape"):
            print(f"seq {number} tag: {tag}")
            for key, values in arrays.items():
                print(f"seq {number} {key}: {values if options.type == 'stdout' else numpy.shape(values)}")
        if options.stats or options.dump_stats:
            moments.add(numpy.asarray(arrays[options.key]))
    if options.type in ("dump_tag", "dump_seq_len"):
        name = f"{options.dump_prefix}{'seq-tags' if options.type == 'dump_tag' else 'seq-lens'}.txt"
        around = ["{", *lines, "}"] if options.type == "dump_seq_len" else lines
        Path(name).write_text("\n".join(around) + "\n", encoding="utf-8")
        print(f"wrote {name}")
    if options.stats or options.dump_stats:
        moments.check(options.key)
        print(f"{options.key}: mean {moments.mean}, standard deviation {moments.std_dev}, {moments.frames} frames")
    if options.dump_stats:
        numpy.savetxt(f"{options.dump_stats}.mean.txt", numpy.atleast_1d(moments.mean))
        numpy.savetxt(f"{options.dump_stats}.std_dev.txt", numpy.atleast_1d(moments.std_dev))
        print(f"wrote {options.dump_stats}.mean.txt and {options.dump_stats}.std_dev.txt")


class Moments:
    """Mean and standard deviation per feature over all frames, in float64, without the cancellation of a sum of squares.

    Source: Chan, Golub, LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """

    def __init__(self) -> None:
        self.frames = 0
        self.mean: numpy.ndarray = numpy.zeros(())
        self._squares: numpy.ndarray = numpy.zeros(())

    def add(self, values: numpy.ndarray) -> None:
        """Add a sequence's frames, an array of shape (frames, ...)."""
        count = len(values)
        if not count:
            return
        mean = values.mean(axis=0, dtype=numpy.float64)
        total = self.frames + count
        apart = mean - self.mean
        self._squares = self._squares + ((values - mean) ** 2).sum(axis=0) + apart**2 * (self.frames * count / total)
        self.mean = self.mean + apart * (count / total)
        self.frames = total

    def check(self, key: str) -> None:
        """Raises: HvdtrainError, if there were no frames."""
        if not self.frames:
            raise HvdtrainError(f"{key}: expected frames to compute a mean of, got none")

    @property
    def std_dev(self) -> numpy.ndarray:
        """The standard deviation per feature, of the population."""
        return numpy.sqrt(self._squares / self.frames)


if __name__ == "__main__":
    sys.exit(main())
