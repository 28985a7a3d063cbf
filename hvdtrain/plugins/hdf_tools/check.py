"""The command `hvdtrain check`: reports what HDF files contain, whether they are sound and how fast they read; repacks slow ones.

The end of the file measures how fast a dataset is read in random order, and how much faster a contiguous copy is.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy

from hvdtrain.config.command_line import command_parser
from hvdtrain.data.config_datasets import parse
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.hdf.dataset import open_hdf
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError, DataError, HvdtrainError
from hvdtrain.plugins.hdf_tools.content import check_values, slow_parts, spread, storage
from hvdtrain.plugins.hdf_tools.dump import dump
from hvdtrain.plugins.hdf_tools.peers import Peers
from hvdtrain.plugins.hdf_tools.sources import Selection
from hvdtrain.plugins.hdf_tools.writer import COMPRESSIONS, HDFWriter

EPILOG = """\
exit status
  0  every file is sound, with or without warnings
  1  with --strict: every file is sound, but there are warnings
  2  a file is not sound: the trainer and hvdtrain dump would refuse it for the same reason

The report says what is in a file, how each key is stored, and how many sequences a second are read in random order.
That rate is measured now: data that is already in memory is read faster than data on a disk. Warnings are about what
makes reading slow, values that are not finite, and tags that occur twice. If something makes reading slow, a sample of up
to 128 MB is copied into a temporary contiguous file and both are read from memory: the ratio is what --repack would gain.
--repack writes the same sequences into a contiguous file, which can be memory-mapped.
"""

SAMPLE_SEQUENCES, SAMPLE_BYTES = 5000, 128 << 20
"""The maximal size of the copy: more than the caches of a processor hold, which would favour the copy."""

ROUNDS = 4
"""How many times the dataset and the copy are read in turn."""


@dataclass
class Report:
    """The results of checking a file; only the problems if it cannot be opened."""

    file: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    bytes: int = 0
    sequences: int = 0
    tags: list[str] = field(default_factory=list)
    keys: dict[str, dict[str, Any]] = field(default_factory=dict)
    read: str = ""
    speed: dict[str, float] = field(default_factory=dict)

    @property
    def is_sound(self) -> bool:
        return not self.problems


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit status."""
    options = parser().parse_args(sys.argv[1:] if arguments is None else arguments)
    if options.repack is not None and len(options.files) > 1:
        parser().error("--repack: expected one FILE, got several (hvdtrain dump a.hdf,b.hdf OUT joins several)")
    try:
        reports = [check(path, everything=options.all, seconds=options.seconds) for path in options.files]
        plain = [{"file": report.file, "sound": report.is_sound, **asdict(report)} for report in reports]
        print(json.dumps(plain, indent=2) if options.json else "\n".join(map(_text, reports)))
        if not all(report.is_sound for report in reports):
            return 2
        if options.repack is not None:
            written = repack(options.files[0], options.repack, options.compression, options.overwrite)
            print(written, file=sys.stderr if options.json else sys.stdout)
            return 0
    except HvdtrainError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    return 1 if options.strict and any(report.warnings for report in reports) else 0


def parser() -> argparse.ArgumentParser:
    parser = command_parser("check", "Report what HDF files contain, whether they are sound, and how fast they read.", EPILOG)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    parser.add_argument("--all", action="store_true", help="check the values of all sequences instead of a sample")
    parser.add_argument("--seconds", type=float, default=1.0, help="how long to measure the speed (default 1); 0: do not measure")
    parser.add_argument("--strict", action="store_true", help="exit with 1 if there are warnings")
    parser.add_argument("--json", action="store_true", help="print a list with a dict for every file, for scripts")
    parser.add_argument("--repack", metavar="OUT", type=Path, help="write the sequences of one FILE into a contiguous file")
    parser.add_argument("--compression", choices=COMPRESSIONS, help="compress the repacked file instead")
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it exists")
    return parser


def check(path: Path, *, everything: bool = False, seconds: float = 1.0) -> Report:
    """Check a file.

    Args:
        everything: check all values, not only those of a sample of sequences.
        seconds: how long to measure the reading speed; 0: not at all.
    """
    report = Report(str(path))
    try:
        dataset = open_hdf([path])
    except DataError as error:
        report.problems.append(str(error))
        return report
    report.bytes = path.stat().st_size
    report.sequences = dataset.num_sequences
    if not dataset.num_sequences:
        report.problems.append(f"{path}: expected at least one sequence, got none")
        return report
    report.read = dataset.how_read()
    try:
        report.tags = dataset.tags([0, dataset.num_sequences - 1])
        stored = storage(path)
        for key, stream in dataset.streams.items():
            report.keys[key] = {
                "dtype": str(stream.dtype) if stream.dtype.kind not in "OS" else "text",
                "shape": list(stream.shape),
                "dim": stream.dim,
                "sparse": stream.sparse,
                "labels": len(stream.labels),
                "frames": int(dataset.lengths[key].sum(dtype=numpy.int64)),
                "lengths": spread(dataset.lengths[key]),
                **stored.get(key, {}),
            }
        report.problems, report.warnings = check_values(path, dataset, everything)
        slow = slow_parts(path, dataset.lengths)
        report.warnings += slow
        if report.is_sound and seconds > 0:
            report.speed = measure(dataset, seconds)
            if slow:
                report.speed["gain_of_copy"], report.speed["copied_sequences"] = gain_of_copy(dataset, seconds)
    except DataError as error:
        report.problems.append(str(error))
    finally:
        dataset.close()
    return report


def repack(path: Path, out: Path, compression: str | None = None, overwrite: bool = False) -> str:
    """Write a file's sequences in the same order into a contiguous or compressed file; return a line about it.

    Raises:
        DataError: the file is bad, `out` exists, or it cannot be written.
    """
    spec, problems = parse("file", [str(path)], {})
    if spec is None:
        raise ConfigError(problems)
    return dump(spec, out, Selection(), Peers(), overwrite=overwrite, compression=compression)


def _text(report: Report) -> str:
    verdict = "sound" if report.is_sound else "not sound"
    if report.warnings:
        verdict += f", {len(report.warnings)} warning{'s' if len(report.warnings) > 1 else ''}"
    lines = [f"{report.file}: {verdict}"]
    if report.sequences:
        lines.append(f"  {report.sequences} sequences, {report.bytes / 1e6:.1f} MB, {' to '.join(map(repr, report.tags))}")
    for key, about in report.keys.items():
        lines.append(
            f"  {key}: {_kind(about)}; {about['frames']} frames, {_lengths(about['lengths'])}; {about.get('storage', '')}"
        )
    if report.read:
        lines.append(f"  {report.read}")
    if report.speed:
        lines.append(
            f"  in random order: {report.speed['sequences_per_second']:.0f} sequences/s, "
            f"{report.speed['megabytes_per_second']:.1f} MB/s"
        )
    if "gain_of_copy" in report.speed:
        gain = _times(report.speed["gain_of_copy"])
        lines.append(f"  a contiguous copy of {report.speed['copied_sequences']:.0f} sequences was read {gain} in random order")
    lines += [f"  problem: {problem}" for problem in report.problems]
    lines += [f"  warning: {warning}" for warning in report.warnings]
    return "\n".join(lines)


def _times(gain: float) -> str:
    """How a copy compares. A difference below a quarter may be chance."""
    if 0.8 < gain < 1.25:
        return "about as fast"
    return f"{gain:.1f} times as fast" if gain > 1 else f"at {gain:.1f} of the rate"


def _kind(about: dict[str, Any]) -> str:
    shape: Sequence[int] = about["shape"]
    if about["sparse"]:
        labels = f" with {about['labels']} labels" if about["labels"] else ""
        return f"{about['dtype']}, {about['dim']} classes{labels}"
    return f"{about['dtype']}, {' x '.join(map(str, shape))} features" if shape else about["dtype"]


def _lengths(numbers: dict[str, float]) -> str:
    return f"{numbers['least']} to {numbers['most']} per sequence (mean {numbers['mean']:.1f}, median {numbers['median']:.0f})"


def measure(dataset: Dataset, seconds: float, indices: Array | None = None) -> dict[str, float]:
    """Read sequences in random order for some seconds; return sequences and megabytes per second.

    Args:
        indices: of the sequences to pick from; None: all.
    """
    generator = numpy.random.default_rng(0)
    began = now = time.perf_counter()
    sequences = copied = 0
    while now - began < seconds:
        picked = generator.integers(dataset.num_sequences if indices is None else len(indices), size=100)
        for index in (picked if indices is None else indices[picked]).tolist():
            for values in dataset.sequence(index).values():
                copied += values.copy().nbytes  # a sequence of a mapped file is a view: only copying reads it
            sequences += 1
            now = time.perf_counter()
            if now - began >= seconds:
                break
    return {"sequences_per_second": sequences / (now - began), "megabytes_per_second": copied / 1e6 / (now - began)}


def gain_of_copy(dataset: Dataset, seconds: float) -> tuple[float, int]:
    """How many times as fast a contiguous copy is read, and the number of sequences, spread over the dataset, in the copy.

    The sequences are copied to a temporary file, for at most twice the seconds. Dataset and copy are then read from memory in
    turn, each for half of the seconds. The highest rates are compared, as other programs disturbed them least.

    Raises:
        DataError: the copy cannot be written.
    """
    count = dataset.num_sequences
    spread = numpy.unique(numpy.linspace(0, count - 1, SAMPLE_SEQUENCES, dtype=numpy.int64))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "copy.hdf")
        indices: list[int] = []
        copied = 0
        until = time.perf_counter() + 2 * seconds
        with HDFWriter(path) as writer:
            for index in numpy.random.default_rng(1).permutation(spread).tolist():
                arrays = dataset.sequence(index)
                writer.add(f"{index}", arrays)
                indices.append(index)
                copied += sum(values.nbytes for values in arrays.values())
                if copied >= SAMPLE_BYTES or time.perf_counter() > until:
                    break
        copy = open_hdf([path])
        for index in range(len(indices)):  # into memory, where the original is by now
            copy.sequence(index)
        before, after = [], []
        for _ in range(ROUNDS):
            before.append(measure(dataset, seconds / ROUNDS / 2, numpy.array(indices))["sequences_per_second"])
            after.append(measure(copy, seconds / ROUNDS / 2)["sequences_per_second"])
        copy.close()
    return max(after) / max(before), len(indices)
