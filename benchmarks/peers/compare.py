"""The same small training with hvdtrain, RETURNN, Lightning, Accelerate and by hand, side by side.

    pip install -e ".[peers]"
    python benchmarks/peers/compare.py                       # everything; docs/coming_from.md has the results
    python benchmarks/peers/compare.py --rounds 0            # what they do, without their speed
    python benchmarks/peers/compare.py --no_actions          # their speed only
    python benchmarks/peers/compare.py --only hvdtrain ddp --rounds 1 --speed_words 640

An LSTM learns to spell, letter by letter: the same words, order, model, initial weights, optimizer, words per step and number
of threads with every trainer. 969 words in 16 steps of 64 are no multiple of anything: on two ranks there are 31 batches of 32,
of which the last one has 9 words. The model itself records the words of each of its calls (spelling.py), so that no trainer is
asked what it does. Printed are:

    lines       of the user's code, without blank lines, comments and docstrings (spelling.py is the same for all: not counted)
    output      lines that are printed in a training of two epochs on two ranks
    trained, evaluated
                how many words of an epoch on two ranks were used again, or not at all, the mean of two epochs
    dev         the score that is printed on two ranks, less the one that the same weights have on all words, computed here
    2 to 1      the norm of the difference of the weights on two ranks and on one, divided by that of their change in training
    to hvdtrain the same for the trainer on one rank and hvdtrain on one rank
    resumed     the same for a training on two ranks that is killed (SIGKILL) within its second epoch and continues with the same
                command, and one that is not; and the steps that were done again
    ms a step   from one call of the model to the next in the second epoch, median, on the slowest rank; more words, and no
                checkpoints within the epoch. The trainers take turns, and the ratio to hvdtrain is within a round

Run it on an idle machine for the last one; the other columns do not depend on that.
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import re
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import h5py
import numpy
import torch

from hvdtrain.plugins.hdf_tools.writer import HDFWriter

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from measuring import machine  # noqa: E402  # found through the line above

TRAIN_WORDS, DEV_WORDS, EPOCHS, BATCH = 969, 101, 2, 64
SAVE_STEPS, KILL_AT = 4, 26  # the second epoch's tenth step: the newest checkpoint is two steps old
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
MPIRUN = ["mpirun", "--bind-to", "none", "--oversubscribe", "-np"]


@dataclass(frozen=True)
class Trainer:
    """One of those that are compared.

    Attributes:
        file: the user's code.
        printed: matches the score on dev, with the number as its group.
        scores: a file besides the checkpoints that has it with more digits than what is printed.
    """

    file: str
    printed: str = r"dev_ce ([\d.]+)"
    scores: str | None = None

    def command(self, ranks: int) -> list[str]:
        """The command that trains, and that continues after a kill."""
        alone = [sys.executable, str(HERE / self.file)]
        return alone if ranks == 1 else [*TORCHRUN, str(ranks), str(HERE / self.file)]


class ByHand(Trainer):
    def command(self, ranks: int) -> list[str]:
        return [*TORCHRUN, str(ranks), str(HERE / self.file)]


class Returnn(Trainer):
    def command(self, ranks: int) -> list[str]:
        start = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
        return [*start, "-m", "returnn", str(HERE / self.file)]


class Hvdtrain(Trainer):
    def command(self, ranks: int) -> list[str]:
        return [sys.executable, "-m", "hvdtrain", str(HERE / self.file), *(["++ngpu", str(ranks)] if ranks > 1 else [])]


class Horovod(Trainer):
    def command(self, ranks: int) -> list[str]:
        start = [*MPIRUN, str(ranks), sys.executable]
        return [*start, "-m", "hvdtrain", str(HERE / self.file), "++use_horovod", "1"]


TRAINERS: dict[str, Trainer] = {
    "hvdtrain": Hvdtrain("with_hvdtrain.py", r'"dev_loss_ce": ([\d.]+)', "scores.jsonl"),
    "hvdtrain, Horovod": Horovod("with_hvdtrain.py", r'"dev_loss_ce": ([\d.]+)', "scores.jsonl"),
    "ddp": ByHand("with_ddp.py"),
    "accelerate": Trainer("with_accelerate.py"),
    "lightning": Trainer("with_lightning.py"),
    "returnn": Returnn("with_returnn.config", r"evaluation: dev: ([\d.]+)"),
}
LABELS = {
    "hvdtrain": "hvdtrain, `++ngpu`",
    "ddp": "by hand, DDP",
    "accelerate": "Accelerate",
    "lightning": "Lightning",
    "returnn": "RETURNN",
}
NEEDS = {"accelerate": "accelerate", "lightning": "lightning", "returnn": "returnn"}


@dataclass(frozen=True)
class Call:
    """A call of the model in one of the processes: when, whether in training, and the words."""

    seconds: float
    training: bool
    words: tuple[bytes, ...]


@dataclass(frozen=True)
class Run:
    """What a training left behind.

    Attributes:
        status: its exit status; None: it did not end.
        output: all that it printed.
        scores: where its scores are: the output, or the text of a file.
        calls: those of the model, by process.
        weights: the model after the last epoch, by parameter.
    """

    status: int | None
    output: str
    scores: str
    calls: list[list[Call]]
    weights: dict[str, numpy.ndarray]

    def used(self, training: bool) -> Counter[bytes]:
        """How often each word was trained or evaluated, on all ranks together."""
        return Counter(word for calls in self.calls for call in calls if call.training == training for word in call.words)

    def steps(self) -> int:
        """Training steps of the process with the most of them."""
        return max((sum(call.training for call in calls) for calls in self.calls), default=0)

    def seconds_per_step(self) -> float:
        """Between the first and the last step of the last epoch, on the slowest rank."""
        slowest = 0.0
        for calls in self.calls:
            times: list[float] = []
            was_training = False
            for call in calls:
                if call.training:
                    times = [*times, call.seconds] if was_training else [call.seconds]
                was_training = call.training
            if len(times) > 1:
                slowest = max(slowest, float(numpy.median(numpy.diff(times))))
        return slowest


def main() -> int:
    options = parse_options()
    missing = [name for name in options.only if name in NEEDS and not installed(NEEDS[name])]
    names = [name for name in options.only if name not in missing]
    print(machine())
    for name in missing:
        print(f"{name}: not installed (pip install -e '.[peers]')")
    with tempfile.TemporaryDirectory(prefix="peers.") as place:
        folder = Path(place)
        write_words(options.train, folder / "train.hdf", options.words)
        write_words(options.dev, folder / "dev.hdf", DEV_WORDS)
        if options.actions:
            print_actions(names, folder, options.timeout, options.keep)
        if options.rounds:
            write_words(options.train, folder / "train.hdf", options.speed_words)
            print_speed(names, folder, options.timeout, options.rounds, options.ranks)
    return 0


def parse_options() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TRAINERS, default=list(TRAINERS), help="the trainers to compare (all)")
    parser.add_argument("--words", type=int, default=TRAIN_WORDS, help="words of an epoch (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each trainer to measure its speed (%(default)s)")
    parser.add_argument("--speed_words", type=int, default=6400, help="words of an epoch to measure the speed (%(default)s)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="numbers of ranks for these (1 2)")
    parser.add_argument("--timeout", type=float, default=300, help="seconds after which a training counts as hanging (300)")
    parser.add_argument("--no_actions", dest="actions", action="store_false", help="measure the speed only")
    parser.add_argument("--keep", type=Path, help="a folder for what each trainer prints")
    parser.add_argument("--train", type=Path, default=HERE.parent.parent / "data/g2p/train.hdf", help="words to take from")
    parser.add_argument("--dev", type=Path, default=HERE.parent.parent / "data/g2p/dev.hdf", help="words to evaluate")
    options = parser.parse_args()
    for path in (options.train, options.dev):
        if not path.exists():
            parser.error(f"expected an HDF file, got none at {path} (make data)")
    return options


def installed(package: str) -> bool:
    """Whether a package can be imported, as found by its own process: some are slow to import."""
    return subprocess.run([sys.executable, "-c", f"import {package}"], capture_output=True).returncode == 0


def write_words(source: Path, target: Path, count: int) -> None:
    """Copy the first `count` different words of 3 letters or more."""
    target.unlink(missing_ok=True)
    with h5py.File(source) as file, HDFWriter(target, dims={"data": 27}) as writer:
        ends = numpy.cumsum(file["seqLengths"][:, 0], dtype=numpy.int64)
        letters = file["inputs"][:]
        seen: set[bytes] = set()
        for begin, end in zip([0, *ends[:-1]], ends, strict=True):
            word = letters[begin:end].astype(numpy.int32)
            if len(word) >= 3 and word.tobytes() not in seen and len(seen) < count:
                writer.add(f"word-{len(seen)}", {"data": word})
                seen.add(word.tobytes())
    if len(seen) < count:
        raise SystemExit(f"{source}: expected {count} different words, got {len(seen)}")


def train(
    name: str, ranks: int, folder: Path, timeout: float, *, fresh: bool = True, save_steps: int = 0, kill_at: int = 0
) -> Run:
    """Run a training to its end, or until it is killed."""
    checkpoints, record = folder / "checkpoints", folder / "record"
    shutil.rmtree(record, ignore_errors=True)
    record.mkdir()
    if fresh:
        shutil.rmtree(checkpoints, ignore_errors=True)
        checkpoints.mkdir()
    environment = os.environ | {
        "PEERS_TRAIN": str(folder / "train.hdf"),
        "PEERS_DEV": str(folder / "dev.hdf"),
        "PEERS_FOLDER": str(checkpoints),
        "PEERS_RECORD": str(record),
        "PEERS_EPOCHS": str(EPOCHS),
        "PEERS_BATCH": str(BATCH),
        "PEERS_RANKS": str(ranks),
        "PEERS_SAVE_STEPS": str(save_steps),
        "PEERS_KILL_AT": str(kill_at),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")]),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    status: int | None = None
    with open(folder / "output", "w+") as output:
        process = subprocess.Popen(
            TRAINERS[name].command(ranks),
            env=environment,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        end_leftovers(record)
        output.seek(0)
        printed = output.read()
    if kill_at == 0 and status != 0:
        print(f"{name} on {ranks} rank(s): {'hangs' if status is None else f'exit status {status}'}\n{printed[-3000:]}")
    scores = TRAINERS[name].scores
    text = (checkpoints / scores).read_text() if scores and (checkpoints / scores).exists() else printed
    return Run(status, printed, text, read_calls(record), read_weights(record))


def end_leftovers(record: Path) -> None:
    """End what a killed training left behind, such as processes that read data, by its environment."""
    mark = f"PEERS_RECORD={record}\0".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # it has ended, or is another user's
            continue


def read_calls(record: Path) -> list[list[Call]]:
    """What spelling.py recorded of the processes."""
    return [list(parse_calls(path.read_bytes())) for path in sorted(record.glob("*.seen"))]


def parse_calls(data: bytes) -> Iterator[Call]:
    """The calls in the file of one process."""
    head = struct.Struct("d???xii")
    position = 0
    while position < len(data):
        seconds, training, _, _, batch, time = head.unpack_from(data, position)
        position += head.size
        lengths = numpy.frombuffer(data, numpy.int32, batch, position)
        position += 4 * batch
        letters = numpy.frombuffer(data, numpy.int8, batch * time, position).reshape(batch, time)
        position += batch * time
        yield Call(seconds, training, tuple(row[:length].tobytes() for row, length in zip(letters, lengths, strict=True)))


def read_weights(record: Path) -> dict[str, numpy.ndarray]:
    """The weights after the last epoch that was finished."""
    files = sorted(record.glob("*.pt"), key=lambda path: int(path.name.split(".")[1]))
    if not files:
        return {}
    return {name: tensor.numpy() for name, tensor in torch.load(files[-1]).items()}


def words_of(path: Path) -> Counter[bytes]:
    """The words of a file, each once."""
    with h5py.File(path) as file:
        ends = numpy.cumsum(file["seqLengths"][:, 0], dtype=numpy.int64)
        letters = file["inputs"][:].astype(numpy.int8)
        return Counter(letters[begin:end].tobytes() for begin, end in zip([0, *ends[:-1]], ends, strict=True))


def print_actions(names: list[str], folder: Path, timeout: float, keep: Path | None) -> None:
    """Everything but the speed."""
    from spelling import NextLetter

    begin = {name: tensor.detach().numpy().copy() for name, tensor in NextLetter().state_dict().items()}
    wanted, wanted_dev = words_of(folder / "train.hdf"), words_of(folder / "dev.hdf")
    reference = train("hvdtrain", 1, folder, timeout)
    print(f"\n{'':>18} lines  output  trained, 2 ranks        evaluated, 2 ranks      dev      2 to 1   to hvdtrain  resumed")
    for name in names:
        one = reference if name == "hvdtrain" else train(name, 1, folder, timeout)
        two = train(name, 2, folder, timeout)
        scores = re.findall(TRAINERS[name].printed, two.scores)
        dev = float(scores[-1]) - exact(two.weights, wanted_dev) if scores and two.weights else float("nan")
        if keep:
            keep.mkdir(parents=True, exist_ok=True)
            (keep / f"{name}.1.txt").write_text(one.output)
            (keep / f"{name}.2.txt").write_text(two.output)
        saved = train(name, 2, folder, timeout, save_steps=SAVE_STEPS)
        killed = train(name, 2, folder, timeout, save_steps=SAVE_STEPS, kill_at=KILL_AT)
        again = train(name, 2, folder, timeout, save_steps=SAVE_STEPS, fresh=False)
        if keep:
            (keep / f"{name}.resumed.txt").write_text(again.output)
        repeated = killed.steps() + again.steps() - saved.steps()
        print(
            f"{name:>18} {lines_of(HERE / TRAINERS[name].file):5}  {len(two.output.splitlines()):6}  "
            f"{difference(two.used(True), wanted):22}  {difference(two.used(False), wanted_dev):22}  {dev:+.0e}  "
            f"{apart(two.weights, one.weights, begin):.0e}    {apart(one.weights, reference.weights, begin):.0e}        "
            f"{apart(again.weights, saved.weights, begin):.0e}, {repeated} steps again",
            flush=True,
        )


def lines_of(path: Path) -> int:
    """Lines of code, without blank lines, comments and docstrings."""
    text = path.read_text(encoding="utf-8")
    strings = {
        number
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in strings
        for number, line in enumerate(text.splitlines(), 1)
    )


def difference(used: Counter[bytes], wanted: Counter[bytes]) -> str:
    """How many words of an epoch, in the mean, were used too often, and how many were not used."""
    wanted = Counter({word: EPOCHS * times for word, times in wanted.items()})
    more, less = (used - wanted).total() / EPOCHS, (wanted - used).total() / EPOCHS
    return "each once" if not more and not less else f"{more:g} again, {less:g} not"


def apart(weights: dict[str, numpy.ndarray], others: dict[str, numpy.ndarray], begin: dict[str, numpy.ndarray]) -> float:
    """The norm of the difference of two sets of weights, relative to that of the change since the beginning of training."""
    if not weights or not others:
        return float("nan")
    return norm(weights, others) / norm(others, begin)


def norm(weights: dict[str, numpy.ndarray], others: dict[str, numpy.ndarray]) -> float:
    """The Euclidean norm of the difference."""
    return math.sqrt(sum(float(((weights[name].astype(float) - others[name]) ** 2).sum()) for name in weights))


def exact(weights: dict[str, numpy.ndarray], words: Counter[bytes]) -> float:
    """The mean cross entropy of some weights over the letters of all words."""
    from spelling import NextLetter, padded

    model = NextLetter()
    model.load_state_dict({name: torch.from_numpy(values) for name, values in weights.items()})
    with torch.no_grad():
        letters, seq_lens = padded([torch.tensor(list(word)) for word in words])
        return float(model.double()(letters, seq_lens).mean())


def print_speed(names: list[str], folder: Path, timeout: float, rounds: int, ranks: list[int]) -> None:
    """Alternate the trainers, and print their times and the ratios within the rounds, as a table for docs/coming_from.md."""
    columns: list[dict[str, tuple[str, str]]] = []
    for size in ranks:
        found: dict[str, list[float]] = {name: [] for name in names}
        for turn in range(rounds):
            shift = turn % len(names)
            for name in names[shift:] + names[:shift]:
                found[name].append(1000 * train(name, size, folder, timeout).seconds_per_step())
                print(f"round {turn + 1}, {size} rank(s), {name}: {found[name][-1]:.2f} ms a step", file=sys.stderr, flush=True)
        columns.append({name: speed_cells(times, found.get("hvdtrain", times)) for name, times in found.items()})
    heads = " | ".join(f"ms, {size} rank{'s' if size > 1 else ''} | relative to hvdtrain" for size in ranks)
    print(f"\nms a step of {BATCH} words, 1 thread per rank: median of {rounds} rounds (the smallest and largest ratio)\n")
    print(f"| | {heads} |\n|---|{'---|---|' * len(ranks)}")
    for name in names:
        print(f"| {LABELS.get(name, name)} | {' | '.join(cell for column in columns for cell in column[name])} |")
    print(f"\n{machine()}")


def speed_cells(times: list[float], ours: list[float]) -> tuple[str, str]:
    """The median of a trainer's times, and that of their ratios to hvdtrain's within the rounds.

    >>> speed_cells([2.0, 3.0, 4.0], [1.0, 3.0, 2.0]), speed_cells([2.0], [2.0])
    (('3.0', '2.00 (1.00 to 2.00)'), ('2.0', '1'))
    """
    ratios = [own / other for own, other in zip(times, ours, strict=True)]
    if times == ours:
        return f"{statistics.median(times):.1f}", "1"
    return f"{statistics.median(times):.1f}", f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


if __name__ == "__main__":
    sys.exit(main())
