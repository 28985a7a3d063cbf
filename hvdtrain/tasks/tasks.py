"""The tasks that use a trained model: eval, forward, search, cleanup_old_models; and the command `hvdtrain export`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint.best import BestModel
from hvdtrain.checkpoint.folder import CheckpointFolder, CleanupRule, parse_rule
from hvdtrain.checkpoint.saver import clean_up
from hvdtrain.cli import exit_status
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.config.source import command_parser, parse_command_line, split_overrides
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.base import Exported
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.runtime.log import open_log, say
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text
from hvdtrain.schedule.history import EpochRecord, wanted_of
from hvdtrain.session import open_communicator, open_session
from hvdtrain.settings import Settings, read_settings
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.forward import forward
from hvdtrain.training.step_log import open_step_log
from hvdtrain.version import __version__


def evaluate_all(settings: Settings) -> None:
    """Evaluate a trained model on dev, eval and eval_datasets. Raises: HvdtrainError."""
    if not settings.evaluations:
        raise ConfigError(["task: expected dev, eval or eval_datasets for the task eval, got none of them"])
    with (
        open_session(settings, "evaluate") as session,
        open_step_log(settings.log, session.comm.rank) as step_log,
    ):
        epoch = session.progress.epoch
        lines = []
        for feed in session.feeds:
            means = evaluate(session.comm, session.learner, session.watchdog, feed, max(1, epoch), step_log=step_log)
            lines.append(f"{feed.name}: {text(means)}")
        say(1, f"epoch {epoch} evaluation: {'; '.join(lines)}")


def forward_all(settings: Settings) -> None:
    """Run the config's forward_step over forward_data or search_data. Raises: HvdtrainError."""
    if settings.forward is None:
        raise ConfigError(["forward_data: expected a dataset, got None"])
    with open_session(settings, "forward") as session:
        began = time.perf_counter()
        [feed] = session.feeds
        epoch, prefix = max(1, session.progress.epoch), Path(settings.run.model)
        steps = forward(session.comm, session.learner, session.watchdog, feed, epoch, settings.forwarding, prefix)
        say(3, f"Forward {steps} steps, {clock_text(time.perf_counter() - began)} elapsed")


def clean_up_all(settings: Settings) -> None:
    """Remove the models that `cleanup_old_models` does not keep, by the scores in scores.jsonl. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        prefix = Path(settings.run.model)
        higher = settings.scoring.higher_is_better
        rule = parse_rule(settings.saving.cleanup_old_models, higher) or CleanupRule(higher_is_better=higher)
        checkpoints = CheckpointFolder(prefix, FRAMEWORKS[settings.run.backend].suffix)

        def remove() -> None:
            history = _history(prefix.parent / "scores.jsonl")
            clean_up(checkpoints, rule, {record.epoch: record.scores for record in history})
            BestModel(checkpoints, wanted_of(settings.measure), higher).note(history)

        on_rank_zero(comm, remove, name="clean_up")


def _history(path: Path) -> list[EpochRecord]:
    """The epochs in a scores.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    epochs = [json.loads(line) for line in lines if line.endswith("}")]
    scores = [{name: float(score) for name, score in epoch["scores"].items()} for epoch in epochs]
    return [EpochRecord(epoch["epoch"], epoch.get("learning_rate", 0.0), own) for epoch, own in zip(epochs, scores, strict=True)]


USAGE = "python -m hvdtrain export CONFIG [CONFIG ...] [--epoch N] [--out FOLDER] [++KEY VALUE ...]"

DESCRIPTION = """\
Write a trained model for use without hvdtrain, with README.md, which says how to load it.
PyTorch: its state_dict, a program of torch.export, and ONNX where the packages onnx and onnxscript are installed.
TensorFlow: its weights as .npz and, of a Keras model, a SavedModel.
What the inputs are is seen in an evaluation of one batch, so the config's data has to be there."""


def main(arguments: list[str] | None = None) -> int:
    """The command `hvdtrain export`; returns its exit status."""
    given, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser("export", DESCRIPTION, "", USAGE)
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    parser.add_argument("--epoch", help="the epoch, or best, by best.json (default: the last one that has a model)")
    parser.add_argument("--out", type=Path, help="the folder to write (default: export-EPOCH beside the model)")
    options = parser.parse_args(given)
    more = ["++task", "eval", *([] if options.epoch is None else ["++load_epoch", options.epoch])]

    def work() -> None:
        export(read_settings(*parse_command_line([*options.configs, *overrides, *more])), options.out)

    return exit_status(work, "interrupted")


def export(settings: Settings, out: Path | None) -> None:
    """Write a trained model for use without hvdtrain. Raises: HvdtrainError."""
    settings = replace(settings, learner=replace(settings.learner, torch_compile=False))
    with open_session(settings, "export") as session:
        [feed] = session.feeds
        epoch = session.progress.epoch
        folder = Path(settings.run.model).parent / f"export-{epoch:03d}" if out is None else out
        share = feed.share(feed.plan(max(1, epoch)))
        share = share[len(share) // 2 :][:1]  # dev is sorted: neither the shortest sequences nor the longest
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with feed.read(share, max(1, epoch), session.learner.staging) as batches:
                for batch in batches:
                    written = session.learner.export(batch, folder)
            (folder / "README.md").write_text(_how_to_load(settings, epoch, written), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder}: expected a folder that can be written to, got: {error}") from None
        for one in written:
            say(1, f"{folder / one.name}" + ("" if one.problem is None else f": not written: {one.problem}"))
        say(1, f"{folder / 'README.md'} says how to load it")


def _how_to_load(settings: Settings, epoch: int, written: Sequence[Exported]) -> str:
    lines = [f"# {Path(settings.run.model)} after epoch {epoch}", "", f"Exported by hvdtrain {__version__}."]
    for one in written:
        lines += ["", f"## {one.name}", ""]
        lines += ["```python", one.how_to_load, "```"] if one.problem is None else [f"Not written: {one.problem}."]
    return "\n".join(lines) + "\n"
