"""The task summary, which shows the model layer by layer, and the command `hvdtrain export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint.folder import remove_path
from hvdtrain.cli import exit_status
from hvdtrain.config.source import command_parser, parse_command_line, split_overrides
from hvdtrain.data.feed import naming
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.base import Exported
from hvdtrain.report.json_lines import OutputShapes, as_json, table
from hvdtrain.runtime import log
from hvdtrain.settings import Settings, read_settings, with_datasets
from hvdtrain.start_up.job import open_session, writing_nothing
from hvdtrain.training.agreement import plan_together
from hvdtrain.version import __version__


def summarize(settings: Settings) -> None:
    """Log the model layer by layer, with what each returns for a batch; train and write nothing. Raises: HvdtrainError."""
    settings = writing_nothing(replace(settings, learner=replace(settings.learner, torch_compile=False)))
    with open_session(settings, "dry_run") as session:
        feed = session.feeds[:2][-1]  # an evaluated dataset where there is one: train may lack data keys that evaluations need
        epoch = session.progress.epoch + 1
        share = feed.share(plan_together(session.comm, feed, epoch))[:1]
        shapes: OutputShapes = {}
        with feed.read(share, epoch, session.learner.staging) as batches:
            for batch in batches:
                with naming(batch, feed.source):
                    shapes = session.learner.output_shapes(batch)
        for line in table(as_json(session.learner.layers(), shapes)):
            log.result(line)


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
        settings = read_settings(*parse_command_line([*options.configs, *overrides, *more]))
        export(with_datasets(settings), options.out)

    return exit_status(work, "interrupted")


def export(settings: Settings, out: Path | None) -> None:
    """Write a trained model for use without hvdtrain. Raises: HvdtrainError."""
    settings = replace(settings, learner=replace(settings.learner, torch_compile=False))
    with open_session(settings, "export") as session:
        [feed] = session.feeds
        epoch = session.progress.epoch
        folder = Path(settings.run.model).parent / f"export-{epoch:03d}" if out is None else out
        share = feed.share(feed.plan(max(1, epoch)))
        middle = share[len(share) // 2 :]  # dev is sorted: neither the shortest sequences nor the longest
        several = next((indices for indices in middle if len(indices) > 1), middle[0])  # an axis of size 1 cannot be of any size
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with feed.read([several], max(1, epoch), session.learner.staging) as batches:
                for batch in batches:
                    written = session.learner.export(batch, folder)
            for one in written:
                if one.problem is not None:
                    remove_path(folder / one.name)  # what an earlier export wrote there is not this model
            (folder / "README.md").write_text(_how_to_load(settings, epoch, written), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder}: expected a folder that can be written to, got: {error}") from None
        for one in written:
            note = f" takes {one.takes}" if one.takes else ""
            log.result(f"{folder / one.name}" + (note if one.problem is None else f": not written: {one.problem}"))
        log.result(f"{folder / 'README.md'} says how to load it")


def _how_to_load(settings: Settings, epoch: int, written: Sequence[Exported]) -> str:
    lines = [f"# {Path(settings.run.model)} after epoch {epoch}", "", f"Exported by hvdtrain {__version__}."]
    for one in written:
        lines += ["", f"## {one.name}", ""]
        lines += ["```python", one.how_to_load, "```"] if one.problem is None else [f"Not written: {one.problem}."]
        lines += ["", f"It takes {one.takes}."] if one.takes else []
    return "\n".join(lines) + "\n"
