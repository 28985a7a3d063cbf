"""How many of RETURNN's published configs hvdtrain reads and trains, with replaced data; RETURNN itself on the same files.

    python benchmarks/returnn_configs.py FOLDER --path FOLDER_WITH_THE_RECIPES [--path ...]
    python benchmarks/returnn_configs.py FOLDER --only_read --verbose

Every file below FOLDER (or FOLDER itself, if it is a file) that sets `backend = "torch"` is a config of PyTorch. Each is

1. read by hvdtrain as it is, with all checks of its keys. Modules that cannot be imported are replaced by placeholders that take
   any call, since the cluster's folders in `sys.path` do not exist elsewhere;
2. trained for three steps by hvdtrain, and by the installed RETURNN, with data made up from `extern_data`: the text of the
   config, followed by lines that replace the data, `model`, `device` and what names files of the cluster. If its code cannot be
   imported (also not with --path), a model with one parameter takes the place of the config's, so that the keys are tried anyway.
   Sequences have a few labels, and if both programs fail with that, a label for every frame. A config with the task forward
   is run on a checkpoint of a model that the script has initialized.

A config that hvdtrain refuses, or whose training fails here only, is refused *wrongly* if RETURNN trains with it, and *rightly*
if RETURNN fails, too. Nothing that is read here belongs to hvdtrain: fetch the configs from public repositories, such as
rwth-i6/returnn-experiments.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.machinery
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy

from hvdtrain.config.source import Source, load
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.hdf_tools.writer import HDFWriter
from hvdtrain.plugins.returnn.translate import Watched
from hvdtrain.settings import BOOLEAN_KEYS, all_keys, check

STEPS, SEQUENCES_PER_STEP = 3, 2
SECONDS_PER_CONFIG = 600

KINDS: dict[str, re.Pattern[str]] = {"torch": re.compile(r"""^backend\s*=\s*["']torch["']""", re.MULTILINE)}
"""The kinds of configs that are tried, by what their text contains."""

SMALL_MODEL = """
import torch as _torch
import returnn.frontend as _rf  # also marks the config as one for RETURNN
class _SmallModel(_torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = _torch.nn.Parameter(_torch.ones(1))
def get_model(**_):
    return _SmallModel()
def train_step(*, model, extern_data, **_):
    data = next(tensor for name, tensor in extern_data.data.items() if name != "seq_tag")
    loss = (model.weight * data.raw_tensor.float()).square().flatten(1).mean(1)
    _rf.get_run_ctx().mark_as_loss(loss, "score", dims=[data.dims[0]])
def forward_step(*, model, extern_data, **_):
    data = next(tensor for name, tensor in extern_data.data.items() if name != "seq_tag")
    _rf.get_run_ctx().mark_as_output(model.weight * data.raw_tensor.float(), "output", dims=data.dims)
model_outputs = None
from returnn.forward_iface import ForwardCallbackIface as _ForwardCallbackIface
class forward_callback(_ForwardCallbackIface):
    def init(self, *, model):
        pass
    def process_seq(self, *, seq_tag, outputs):
        assert outputs["output"].raw_tensor is not None
    def finish(self):
        pass
"""
"""Instead of code that cannot be imported."""

REPLACED = """
model = {folder!r} + "/model"
device = "cpu"
num_epochs = 1
max_seqs = {max_seqs}
log = None
dry_run = use_dummy_datasets = False
torch_dataloader_opts = {{"num_workers": 0}}
torch_distributed, use_horovod = None, False
preload_from_files, import_model_train_epoch1, load = {{}}, None, None
min_seq_length, max_seq_length = None, None
learning_rate_file = None
"""


class PlaceholderClass(type):
    """Takes the place of what a missing module defines: a class or function, and whatever the config does with it."""

    def __setitem__(cls, key: Any, value: Any) -> None:
        """Does nothing."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)


class PlaceholderBase:
    """Its objects take any call, and have any attribute."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return PlaceholderBase()


def placeholder(name: str) -> type:
    return PlaceholderClass(name.rpartition(".")[2], (PlaceholderBase,), {})


class PlaceholderModule(ModuleType):
    """Takes the place of a module that cannot be imported."""

    __path__: MutableSequence[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return placeholder(name)


class Placeholders(importlib.abc.Loader):
    """The last finder of Python's import system: placeholders for the modules that were missing before."""

    def __init__(self) -> None:
        self.missing: list[str] = []

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        known = any(name == one or name.startswith(f"{one}.") for one in self.missing)
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing."""

    def add(self, error: ImportError) -> bool:
        """Have a placeholder for what the error is about. Returns: whether that is possible."""
        name = error.name or ""
        absent = re.match(r"cannot import name '(\w+)' from", str(error))
        if absent and name in sys.modules:
            setattr(sys.modules[name], absent[1], placeholder(absent[1]))
            self.missing.append(f"{name}.{absent[1]}")
            return True
        if not name or name in self.missing or name.partition(".")[0] == "returnn":
            return False
        self.missing.append(name)
        return True


def import_error(error: BaseException) -> ImportError | None:
    """The failed import among the causes of an error."""
    while not isinstance(error, ImportError):
        if error.__cause__ is None:
            return None
        error = error.__cause__
    return error


def loaded(file: Path, placeholders: Placeholders) -> tuple[Source, Watched]:
    """The config's values, with placeholders for what cannot be imported. Raises: ConfigError."""
    sys.meta_path.append(placeholders)
    types = {key.name: key.type for key in all_keys()}
    while True:
        imports = Watched()
        try:
            return load([file], {}, types, imports.builtins), imports
        except ConfigError as error:
            failed = import_error(error)
            if failed is None or not placeholders.add(failed):
                raise


Lengths = Mapping[str, int]
"""The lengths of a sequence's streams by what they are: 'labels', 'frames' and 'samples' (of sound)."""


def made_up(
    extern_data: Mapping[str, Any],
    folder: Path,
    num_sequences: int,
    lengths: Callable[[int], Lengths],
    *,
    with_last_class: bool = False,
) -> str:
    """Write sequences that fit `extern_data`. Returns: the name of the file.

    Args:
        lengths: of the sequence with a number.
        with_last_class: whether every sequence begins with the last class, so that the file tells how many there are.
    """
    from returnn.torch.data.extern_data import extern_data_template_from_config_opts

    templates = extern_data_template_from_config_opts(extern_data)
    numbers = numpy.random.default_rng(1)
    file = folder / "data.hdf"
    with HDFWriter(file) as writer:
        for number in range(num_sequences):
            sequence = {}
            for name, template in templates.data.items():
                sizes = [dim.dimension for dim in template.dims if not dim.is_batch_dim()]
                is_label = template.sparse_dim is not None or template.dtype.startswith(("int", "uint"))
                length = lengths(number)["labels" if is_label else "samples" if sizes[1:] in ([], [1]) else "frames"]
                shape = [length if size is None else size for size in sizes] or [1]
                classes = template.sparse_dim.dimension if template.sparse_dim is not None else None
                values = numbers.integers(1, classes or 20, shape) if is_label else numbers.normal(size=shape) * 0.1
                if classes and with_last_class:
                    values.flat[0] = classes - 1
                sequence[name] = values.astype("int32" if is_label else "float32")
            writer.add(f"seq-{number}", sequence)
    return str(file)


def replaced_text(file: Path, source: Source, folder: Path, *, small_model: bool, a_label_per_frame: bool) -> str:
    """The text of the config with other data, and with a small model if its own cannot be imported."""
    values = source.values
    extern_data = values.get("extern_data") or {
        "data": {"dim": values.get("num_inputs")},
        **{name: {"dim": dim, "sparse": True} for name, dim in (values.get("num_outputs") or {}).items()},
    }

    def lengths(number: int) -> Lengths:
        labels = 120 if a_label_per_frame else 6
        return {"labels": labels + number, "frames": 120 + number, "samples": 16_000 + number}

    dataset = {"class": "HDFDataset", "files": [made_up(extern_data, folder, STEPS * SEQUENCES_PER_STEP, lengths)]}
    lines = [REPLACED.format(folder=str(folder), max_seqs=SEQUENCES_PER_STEP), f"extern_data = extern_data or {extern_data!r}"]
    if "extern_data" in values:
        lines.pop()
    for name in ("train", "dev", "eval", "forward_data", "search_data"):
        if values.get(name) is not None:
            lines.append(f"{name} = {dataset!r}")
    if values.get("eval_datasets"):
        lines.append(f"eval_datasets = {dict.fromkeys(values['eval_datasets'], dataset)!r}")
    text = file.read_text(encoding="utf-8")
    if small_model:
        text = _without_missing(text)
        lines.append(SMALL_MODEL)
    return "\n".join([text, *lines, ""])


def _without_missing(text: str) -> str:
    """Imports go through the placeholders of this script."""
    line, _, rest = text.partition("\n")
    here = str(Path(__file__).parent)
    return f"{line}\nimport sys as _sys; _sys.path.insert(0, {here!r}); import returnn_configs as _p; _p.install()\n{rest}"


MISSING = "RETURNN_CONFIGS_MISSING"


def install() -> None:
    """Called by a config whose code cannot be imported: placeholders for what was missing when it was first read."""
    placeholders = Placeholders()
    modules = []
    for name in json.loads(os.environ[MISSING]):
        parent, _, attribute = name.rpartition(".")
        placeholders.missing.append(name)
        modules.append((parent, attribute))
    sys.meta_path.append(placeholders)
    for parent, attribute in modules:
        try:
            module = importlib.import_module(parent) if parent else None
        except ImportError:
            continue
        if module is not None and not isinstance(module, PlaceholderModule) and not hasattr(module, attribute):
            setattr(module, attribute, placeholder(attribute))


@dataclass
class Outcome:
    """What became of a config.

    Attributes:
        problems: with which hvdtrain refuses it as it is; empty: it reads it.
        missing: the modules and names that cannot be imported.
        error: why it cannot be read at all: its own code fails.
        hvdtrain, returnn: 'trains', or the end of the program's output; None: not tried.
    """

    problems: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    error: str | None = None
    task: str = "train"
    hvdtrain: str | None = None
    returnn: str | None = None

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        if self.error is not None:
            return "its own code fails"
        if not self.problems and self.hvdtrain in (None, "trains"):
            return "reads" if self.hvdtrain is None else "trains"
        if self.returnn in (None, "trains"):
            return "refused wrongly"
        return "refused rightly" if self.problems else "fails with both"


VERDICTS = ("trains", "reads", "refused rightly", "refused wrongly", "fails with both", "its own code fails")


def examine(file: Path, folder: Path, only_read: bool) -> Outcome:
    """Try one config, in a separate process."""
    placeholders = Placeholders()
    outcome = Outcome()
    try:
        source, imports = loaded(file, placeholders)
    except ConfigError as error:
        outcome.error = str(error)
        return outcome
    outcome.missing = placeholders.missing
    outcome.task = str(source.values.get("task", "train"))
    try:
        names = [key.name for key in all_keys()]
        check(imports.translate(source, names, BOOLEAN_KEYS), names)
    except ConfigError as error:
        outcome.problems = list(map(str, error.problems))
    if only_read:
        return outcome
    environment = {**os.environ, MISSING: json.dumps(placeholders.missing), "OMP_NUM_THREADS": "1"}
    for a_label_per_frame in (False, True):
        inside = folder / f"labels-{a_label_per_frame}"
        inside.mkdir()
        small = bool(placeholders.missing)
        text = replaced_text(file, source, inside, small_model=small, a_label_per_frame=a_label_per_frame)
        for program in PROGRAMS:
            own = inside / program
            own.mkdir()
            (own / "returnn.config").write_text(text.replace(f'{str(inside)!r} + "/model"', f'{str(own)!r} + "/model"'))
            setattr(outcome, program, _run(PROGRAMS[program](outcome.task), own, environment))
        if "trains" in (outcome.hvdtrain, outcome.returnn):
            break
    return outcome


CHECKPOINT = """
import sys
import torch
sys.argv = ["hvdtrain"]
from pathlib import Path
from hvdtrain.settings import read_settings
model = read_settings([Path("returnn.config")], {}).learner.get_model(epoch=1, step=0)
torch.save({"model": model.state_dict(), "epoch": 1, "step": 0}, "initial.pt")
"""
"""Makes a checkpoint for the task forward."""

RETURNN = "import sys; from returnn.__main__ import main; main(['rnn.py', *sys.argv[1:]])"

PROGRAMS: dict[str, Callable[[str], list[list[str]]]] = {
    "hvdtrain": lambda task: _commands(task, ["-m", "hvdtrain", "returnn.config"]),
    "returnn": lambda task: _commands(task, ["-c", RETURNN, "returnn.config"], load="'initial.pt'"),  # RETURNN evaluates it
}
"""By program, its commands for a task."""


def _commands(task: str, command: list[str], load: str = "initial.pt") -> list[list[str]]:
    if task == "train":
        return [command]
    return [["-c", CHECKPOINT], [*command, "++load", load]]


def _run(commands: list[list[str]], folder: Path, environment: Mapping[str, str]) -> str:
    """Run a program in the folder. Returns: 'trains', or the end of what it printed."""
    for command in commands:
        try:
            finished = subprocess.run(
                [sys.executable, *command],
                cwd=folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=SECONDS_PER_CONFIG,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"no end after {SECONDS_PER_CONFIG} s"
        if finished.returncode != 0:
            return finished.stdout[-3000:] or f"status {finished.returncode}"
    return "trains"


def configs_in(folder: Path, is_wanted: Callable[[str], object]) -> Iterator[Path]:
    """The configs below a folder whose text is of a kind, sorted."""
    for file in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        if file.is_file() and file.suffix in (".config", ".py", "") and is_wanted(_text(file)):
            yield file


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
        return ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER", help="with configs, or a config")
    parser.add_argument("--path", action="append", default=[], help="for imports of the configs: a folder with recipes")
    parser.add_argument("--kind", choices=KINDS, default="torch")
    parser.add_argument("--only_read", action="store_true", help="read the configs as they are, and train nothing")
    parser.add_argument("--verbose", action="store_true", help="print the problems")
    parser.add_argument("--jobs", type=int, default=1, help="how many configs are tried at the same time")
    parser.add_argument("--examine", type=Path, help=argparse.SUPPRESS)  # what the script calls itself with
    options = parser.parse_args()
    if options.examine is not None:
        outcome = examine(options.examine.resolve(), options.folders[0], options.only_read)
        print(f"\n{json.dumps(asdict(outcome))}")
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*options.path, os.environ.get("PYTHONPATH", "")]).strip(":")}
    outcomes: list[Outcome] = []
    files = [file for folder in options.folders for file in configs_in(folder, KINDS[options.kind].search)]
    with ThreadPoolExecutor(options.jobs) as pool:
        wanted = ["--only_read"] if options.only_read else []
        for file, fields in zip(files, pool.map(lambda file: examined(__file__, file, wanted, environment), files), strict=True):
            outcome = Outcome(**fields)
            outcomes.append(outcome)
            with_own = "" if outcome.hvdtrain is None or outcome.missing else " (its own model)"
            print(f"{outcome.verdict}{with_own}: {file}", flush=True)
            if options.verbose:
                for title, text in vars(outcome).items():
                    for line in text if isinstance(text, list) else [text] if text and title != "task" else []:
                        print(f"    {title}: {line}")
    print(table(outcomes))


def examined(script: str, file: Path, options: Sequence[str], environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a script prints about a config, called with `--examine` in a separate process: the fields of its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, script, folder, "--examine", str(file), *options]
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(finished.stdout.rstrip().rpartition("\n")[2]))
    except ValueError:
        return {"error": finished.stderr[-3000:] or f"status {finished.returncode}"}


def table(outcomes: Sequence[Outcome]) -> str:
    """The shares, as in docs/returnn.md."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    rows = {
        "read as they are": sum(not outcome.problems and outcome.error is None for outcome in outcomes),
        "some of their code cannot be imported": sum(bool(outcome.missing) for outcome in outcomes),
        "train three steps with their own model": sum(one.verdict == "trains" and not one.missing for one in outcomes),
        "train three steps with a small model in place of missing code": sum(
            one.verdict == "trains" and bool(one.missing) for one in outcomes
        ),
        **{verdict: counts[verdict] for verdict in VERDICTS[2:]},
    }
    shares = {name: f"{count} ({count / max(1, len(outcomes)):.0%})" for name, count in rows.items()}
    return "\n".join(
        ["| | |", "|---|---|", f"| configs | {len(outcomes)} |", *(f"| {name} | {share} |" for name, share in shares.items())]
    )


if __name__ == "__main__":
    main()
