"""How many of RETURNN's published TensorFlow configs hvdtrain trains as RETURNN does, with replaced data.

    python benchmarks/returnn_networks.py FOLDER --sample 50 --seed 1 --small
    python benchmarks/returnn_networks.py CONFIG --final --verbose

A file below FOLDER (or FOLDER itself, if it is a file) with `network = ...` or `get_network`, and without `backend = "torch"`, is
a config of RETURNN's TensorFlow engine. For each,

1. RETURNN trains three steps. If it fails after it has built the network, other lengths of the labels are tried: a few, one for
   every frame, one for every sixth frame;
2. hvdtrain trains three steps on one rank and, with Horovod under mpirun, on two. Losses and errors of training and evaluation on
   one rank are compared with RETURNN's.

The programs read the text of the config, followed by lines that replace the data, `model`, `device` and what names files of the
cluster; all other keys stay. (`nadam`, whose class RETURNN does not find in TensorFlow 2.21, is repaired for it.) A dataset of
any class becomes an HDF file made up from `extern_data` or `num_inputs` and `num_outputs`, a vocabulary leaves its size, and
lines that assert that a file exists are left out. There is no stand-in for what else a config reads (lexica, other checkpoints,
Sprint for sequence training): its own code or RETURNN fails, and it counts as not built. With `--final`, `pretrain` is left
out, so that its last network is trained instead of the first.

`--sample` draws configs from the folders in turn, so that each experiment is there; a larger sample with the same seed begins
with the same configs. With `--outcomes`, a run that was interrupted goes on with the configs that it has not tried. `--small`
divides the sizes in the network by 4, for both programs, except those of the data: large models take minutes. If RETURNN does
not build that network, the sizes stay. Nothing that is read here belongs to hvdtrain: fetch the configs from public
repositories, such as rwth-i6/returnn-experiments.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from returnn_configs import KINDS, Lengths, Placeholders, configs_in, examined, loaded, made_up

from hvdtrain.config.source import Source
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.returnn.networks import our_name
from hvdtrain.plugins.returnn.older import older_extern_data, with_entries
from hvdtrain.settings import BOOLEAN_KEYS, all_keys, check

STEPS, SEQUENCES_PER_STEP = 3, 2
FRAMES, SAMPLES = 48, 8_000
LABELS = {
    "a few": lambda frames: 3 + frames % 3,
    "per frame": lambda frames: frames,
    "per 6 frames": lambda frames: math.ceil(frames / 6),
}
"""The numbers of labels that are tried, given the number of frames."""

SAME = 1e-4
"""The relative difference up to which scores are equal: RETURNN sums in single precision, and three updates magnify it."""

IS_NETWORK = re.compile(r"^(network\s*=|def get_network\b)", re.MULTILINE)
FILE_EXISTS = re.compile(r"^(\s*)assert os\.path\.\w+\(.*$", re.MULTILINE)

RETURNN = """
import importlib
import sys
from returnn.tf.native_op import OpMaker
OpMaker.with_cuda = False  # RETURNN compiles for CUDA wherever it finds a folder of it
operations = importlib.import_module("tensorflow.python.ops.gen_training_ops")  # for nadam
sys.modules["tensorflow.python.training.training_ops"] = operations
vars(importlib.import_module("tensorflow.python.training"))["training_ops"] = operations
from returnn.__main__ import main
main(["rnn.py", "returnn.config"])
"""

REPAIRED = """
if globals().get("nadam") and not globals().get("optimizer"):
    nadam, optimizer = False, {"class": "nadam"}
"""
"""For RETURNN: the key makes a class that needs an old Keras."""

SMALL = """
def _smaller(value, kept):
    if type(value) is dict:
        return {name: one if name in ("beam_size", "max_seq_len") else _smaller(one, kept) for name, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_smaller(one, kept) for one in value)
    return value // 4 if type(value) is int and value >= 64 and value % 4 == 0 and value not in kept else value
import re as _re
_sizes = str([globals().get(name) for name in ("extern_data", "num_inputs", "num_outputs")])
if "network" in globals():
    network = _smaller(network, set(map(int, _re.findall("[0-9]+", _sizes))))
"""
"""Divides the sizes of a network by 4."""

REPLACED = """
model = {folder!r} + "/model"
device = "cpu"
task = "train"
num_epochs = 1
max_seqs = {max_seqs}
log = None
log_verbosity = 3
dry_run = use_dummy_datasets = False
torch_distributed, use_horovod = None, False
preload_from_files, import_model_train_epoch1, load = {{}}, None, None
min_seq_length, max_seq_length = None, None
learning_rate_file = {folder!r} + "/rates"
tf_log_dir = {folder!r} + "/events"
"""


@dataclass
class Outcome:
    """What became of a config.

    Attributes:
        problems: with which hvdtrain refuses it as it is.
        error: why it cannot be read: its own code fails.
        labels: how many labels the data had.
        returnn, one_rank, two_ranks: 'trains', or the end of the program's output; None: not tried.
        builds: whether RETURNN builds the network.
        difference: the largest relative difference of a score from RETURNN's; None: nothing to compare.
    """

    problems: list[str] = field(default_factory=list)
    error: str | None = None
    labels: str | None = None
    builds: bool = False
    returnn: str | None = None
    one_rank: str | None = None
    two_ranks: str | None = None
    difference: float | None = None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.error is not None:
            return "its own code fails"
        if self.returnn is None:  # only read
            return "refused" if self.problems else "read"
        if not self.builds:
            return "RETURNN does not build it"
        if self.one_rank == self.two_ranks == "trains":
            is_equal = self.difference is None or self.difference <= SAME
            return "trains" if is_equal else "trains with other scores"
        return "fails here only" if self.returnn == "trains" else "RETURNN builds it and does not train it"


VERDICTS = (
    "its own code fails", "refused", "read", "RETURNN does not build it", "RETURNN builds it and does not train it",
    "trains", "trains with other scores", "fails here only",
)  # fmt: skip


def examine(file: Path, folder: Path, only_read: bool, more: list[str]) -> Outcome:
    """Try one config, in a separate process.

    Args:
        more: further lines after the config's text.
    """
    outcome = Outcome()
    text = FILE_EXISTS.sub(r"\1pass", file.read_text(encoding="utf-8"))
    text = text if text.startswith("#!") else f"#!rnn.py\n{text}"
    (folder / file.name).write_text(text)
    sys.path.append(str(file.parent))
    try:
        source, imports = loaded(folder / file.name, Placeholders())
    except ConfigError as error:
        outcome.error = str(error)
        return outcome
    try:
        names = [key.name for key in all_keys()]
        check(imports.translate(source, names, BOOLEAN_KEYS), names)
    except ConfigError as error:
        outcome.problems = list(map(str, error.problems))
    if only_read:
        return outcome
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "dumb", "NO_COLOR": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(file.parent)]))
    for number, labels in enumerate(_likely_labels(text)):
        inside = folder / f"labels-{number}"
        inside.mkdir()
        lines = replaced_lines(source, inside, labels) + more
        result = _run_in(inside / "returnn", text, [*lines, REPAIRED], [sys.executable, "rnn.py"], environment)
        outcome.builds = outcome.builds or "start training at epoch" in result[0]
        if outcome.returnn is None or result[1]:
            outcome.labels, outcome.returnn = labels, "trains" if result[1] else result[0][-3000:]
        if result[1]:
            break
        if "start training at epoch" not in result[0]:
            break  # other data would not help
    if not outcome.builds or outcome.returnn != "trains":
        return outcome
    ours = [sys.executable, "-m", "hvdtrain", "returnn.config"]
    ranks = ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", *ours, "++use_horovod", "1", "++max_seqs", "1"]
    for name, command in (("one_rank", ours), ("two_ranks", ranks)):
        printed, succeeded = _run_in(inside / name, text, lines, command, environment)
        setattr(outcome, name, "trains" if succeeded else printed[-3000:])
    theirs, found = (scores(inside / name / "rates") for name in ("returnn", "one_rank"))
    if source.values.get("accum_grad_multiple_step") not in (None, 0, 1):
        # RETURNN leaves the last of three batches to the next epoch.
        theirs = {name: score for name, score in theirs.items() if name.startswith("train_")}
    outcome.difference = largest_difference(theirs, found)
    return outcome


def _likely_labels(text: str) -> list[str]:
    """The ways to make up labels, the likeliest first."""
    is_search = re.search(r"""["'](edit_distance|ctc|rnnt\w*|choice)["']""", text)
    return list(LABELS) if is_search else ["per frame", "a few", "per 6 frames"]


def replaced_lines(source: Source, folder: Path, labels: str) -> list[str]:
    """The lines after the config's text; writes the data."""
    values = source.values
    extern_data = with_entries(values.get("extern_data") or older_extern_data(values) or {})
    lines = [
        "for _options in (globals().get('extern_data') or {}).values():",
        "    if isinstance(_options, dict) and _options.pop('vocab', None) and not _options.get('dim'):",
        "        _options['dim'] = 1000",
    ]
    dataset = {"class": "HDFDataset", "files": [made_up_for(extern_data, folder, labels)]}
    lines += [f"{name} = {dataset!r}" for name in ("train", "dev", "eval") if values.get(name) is not None or name == "train"]
    lines += [f"{name} = None" for name in ("forward_data", "search_data", "eval_datasets") if values.get(name) is not None]
    return lines


def made_up_for(extern_data: Mapping[str, Any], folder: Path, labels: str) -> str:
    """`made_up` without vocabularies, of which only the size is left."""
    given = {name: dict(options) if isinstance(options, dict) else options for name, options in extern_data.items()}
    for options in given.values():
        if isinstance(options, dict) and options.pop("vocab", None) and not options.get("dim"):
            options["dim"] = 1000

    def lengths(number: int) -> Lengths:
        return {"labels": LABELS[labels](FRAMES + number), "frames": FRAMES + number, "samples": SAMPLES}

    return made_up(given, folder, STEPS * SEQUENCES_PER_STEP, lengths, with_last_class=True)


def _run_in(
    folder: Path, text: str, lines: Sequence[str], command: Sequence[str], environment: Mapping[str, str]
) -> tuple[str, bool]:
    """Run a program on the config in a folder of its own. Returns: what it printed, and whether it succeeded."""
    folder.mkdir()
    replaced = REPLACED.format(folder=str(folder), max_seqs=SEQUENCES_PER_STEP)
    (folder / "returnn.config").write_text("\n".join([text, replaced, *lines, ""]))
    (folder / "rnn.py").write_text(RETURNN)
    with (folder / "printed").open("w+", errors="replace") as printed:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=printed, stderr=subprocess.STDOUT)
        try:
            status: int | None = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGTERM)  # mpirun passes it on
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            status = None
        printed.seek(0)
        found = printed.read()
    return (found if status is not None else f"{found}\nno end after {SECONDS} s"), status == 0


SECONDS = 3600


def scores(file: Path) -> dict[str, float]:
    """The scores of the first epoch in a file of learning rates, by hvdtrain's names."""
    text = file.read_text() if file.is_file() else ""
    found = re.findall(r"'((?:train|dev|eval)_[^']*)':\s*([-+.\w]+)", text)
    return {our_name(name): float(value) for name, value in found}


def largest_difference(expected: Mapping[str, float], found: Mapping[str, float]) -> float | None:
    """The largest relative difference of scores that both have; None: there are none."""
    differences = [
        abs(value - found[name]) / max(abs(value), 1e-6) for name, value in expected.items() if name in found and value == value
    ]
    return max(differences, default=None)


def is_network(text: str) -> bool:
    """Whether the text of a config is for RETURNN's TensorFlow engine."""
    return IS_NETWORK.search(text) is not None and KINDS["torch"].search(text) is None


def sampled(files: Sequence[Path], number: int, seed: int) -> list[Path]:
    """A sample of the files: from the folders in turn, which come in random order, as the files of each do."""
    numbers = random.Random(seed)
    folders: dict[Path, list[Path]] = {}
    for file in files:
        folders.setdefault(file.parent, []).append(file)
    order = list(folders.values())
    numbers.shuffle(order)
    for inside in order:
        numbers.shuffle(inside)
    turns = [inside[turn] for turn in range(max(map(len, order), default=0)) for inside in order if turn < len(inside)]
    return turns[:number]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with configs, or a config")
    parser.add_argument("--sample", type=int, help="the number of configs to draw; without it, all are tried")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--small", action="store_true", help="networks with smaller layers")
    parser.add_argument("--final", action="store_true", help="without pretrain: its final network")
    parser.add_argument("--only_read", action="store_true", help="read the configs, and train nothing")
    parser.add_argument(
        "--outcomes",
        type=Path,
        help="a file for all outcomes, as JSON lines: configs in it are not tried again with these options",
    )
    parser.add_argument("--verbose", action="store_true", help="print the problems")
    parser.add_argument("--examine", type=Path, help=argparse.SUPPRESS)  # what the script calls itself with
    options = parser.parse_args()
    if options.examine is not None:
        more = [*([SMALL] if options.small else []), *(["pretrain = None"] if options.final else [])]
        outcome = examine(options.examine.resolve(), options.folders[0], options.only_read, more)
        print(f"\n{json.dumps(asdict(outcome))}")
        return
    files = [file for folder in options.folders for file in configs_in(folder, is_network)]
    wanted = [f"--{name}" for name in ("only_read", "small", "final") if getattr(options, name)]
    known = earlier(options.outcomes, wanted) if options.outcomes is not None else {}
    outcomes = []
    for file in files if options.sample is None else sampled(files, options.sample, options.seed):
        if str(file) in known:
            outcomes.append(known[str(file)])
            continue
        outcome = Outcome(**examined(__file__, file, wanted))
        if options.small and not outcome.builds and outcome.returnn is not None and NO_BACKEND not in outcome.returnn:
            outcome = Outcome(**examined(__file__, file, [name for name in wanted if name != "--small"]))
        outcomes.append(outcome)
        print(f"{outcome.verdict}: {file}", flush=True)
        if options.outcomes is not None:
            with options.outcomes.open("a") as lines:
                print(
                    json.dumps({"file": str(file), "options": wanted, "verdict": outcome.verdict, **asdict(outcome)}), file=lines
                )
        if options.verbose:
            for title, value in vars(outcome).items():
                for line in value if isinstance(value, list) else [value] if value is not None else []:
                    print(f"    {title}: {line}")
    print(table(outcomes))


def earlier(file: Path, options: list[str]) -> dict[str, Outcome]:
    """The outcomes of earlier runs with these options, by the name of the config."""
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    names = {one.name for one in fields(Outcome)}
    return {
        row["file"]: Outcome(**{name: value for name, value in row.items() if name in names})
        for row in rows
        if row.get("options") == options
    }


NO_BACKEND = "No backend defined"
"""In RETURNN's message about a config for its engine with Theano, which it no longer has."""


def table(outcomes: Sequence[Outcome]) -> str:
    """The shares, as in docs/returnn.md."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    trained = sum(outcome.returnn == "trains" for outcome in outcomes)
    rows = {"configs": str(len(outcomes)), **{verdict: str(counts[verdict]) for verdict in VERDICTS[:5] if counts[verdict]}}
    if not trained:
        return as_table(rows)
    rows["RETURNN trains it"] = str(trained)
    for verdict in VERDICTS[5:]:
        rows[verdict] = f"{counts[verdict]} ({counts[verdict] / trained:.0%} of those)"
    return as_table(rows)


def as_table(rows: Mapping[str, str]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


if __name__ == "__main__":
    main()
