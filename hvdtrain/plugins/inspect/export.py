"""The command `hvdtrain export`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from hvdtrain.cli import exit_status
from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.data.types import Batch
from hvdtrain.disk.atomic import remove_path
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.learner.base import Exported, Learner
from hvdtrain.runtime import log
from hvdtrain.settings import Settings, read_settings, with_datasets
from hvdtrain.start_up.job import open_session
from hvdtrain.version import __version__

USAGE = "python -m hvdtrain export CONFIG [CONFIG ...] [--epoch N] [--out FOLDER] [++KEY VALUE ...]"

DESCRIPTION = """\
Write a trained model for use without hvdtrain, with a README.md about how to load it.
PyTorch: its state_dict, a program of torch.export, and ONNX if the packages onnx and onnxscript are installed.
TensorFlow: its weights as .npz and, for a Keras model, a SavedModel.
The inputs are determined by evaluating one batch, so the config's data has to be available."""


def main(arguments: list[str] | None = None) -> int:
    """The command `hvdtrain export`; returns its exit status."""
    words, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    parser = command_parser("export", DESCRIPTION, "", USAGE)
    parser.add_argument("configs", metavar="CONFIG", nargs="+", help="the config of the training")
    parser.add_argument("--epoch", help="the epoch, or 'best', according to best.json (default: the last one that has a model)")
    parser.add_argument("--out", type=Path, help="the folder to write (default: export-EPOCH next to the model)")
    options = parser.parse_args(words)
    more = ["++task", "eval", *([] if options.epoch is None else ["++load_epoch", options.epoch])]

    def work() -> None:
        settings = read_settings(*parse_command_line([*options.configs, *overrides, *more]))
        export(with_datasets(settings), options.out)

    return exit_status(work, "interrupted")


def export(settings: Settings, out: Path | None) -> None:
    """Write a trained model for use without hvdtrain. Raises: HvdtrainError."""
    settings = settings.with_keys(torch_compile=False)
    with open_session(settings, "export") as session:
        [feed] = session.feeds
        epoch = session.progress.epoch
        folder = Path(settings.run.model).parent / f"export-{epoch:03d}" if out is None else out
        rank_batches = feed.rank_batches(feed.plan(max(1, epoch)))
        middle = rank_batches[len(rank_batches) // 2 :]  # of medium length, since dev is sorted
        # torch.export takes an axis of size 1 for a constant, so the batch has to have several sequences.
        several = next((indices for indices in middle if len(indices) > 1), middle[0])
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with feed.read([several], max(1, epoch), session.learner.staging) as batches:
                for batch in batches:
                    written = export_model(session.learner, batch, folder)
            for exported in written:
                if exported.problem is not None:
                    remove_path(folder / exported.name)  # an earlier export may have written another model there
            (folder / "README.md").write_text(_how_to_load(settings, epoch, written), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(f"{folder}: expected a folder that can be written to, got: {error}") from None
        for exported in written:
            note = f" takes {exported.takes}" if exported.takes else ""
            log.result(f"{folder / exported.name}" + (note if exported.problem is None else f": not written: {exported.problem}"))
        log.result(f"{folder / 'README.md'} explains how to load it")


def _how_to_load(settings: Settings, epoch: int, written: Sequence[Exported]) -> str:
    lines = [f"# {Path(settings.run.model)} after epoch {epoch}", "", f"Exported by hvdtrain {__version__}."]
    for exported in written:
        lines += ["", f"## {exported.name}", ""]
        is_written = exported.problem is None
        lines += ["```python", exported.how_to_load, "```"] if is_written else [f"Not written: {exported.problem}."]
        lines += ["", f"It takes {exported.takes}."] if exported.takes else []
    return "\n".join(lines) + "\n"


@runtime_checkable
class WithExport(Protocol):
    """A learner that writes its model for use without hvdtrain, in every format of its framework."""

    def export(self, batch: Batch, folder: Path) -> list[Exported]: ...


def is_of_torch(model: Any) -> bool:
    """Whether a model is PyTorch's, which need not be imported."""
    return any(kind.__module__.startswith("torch.") for kind in type(model).__mro__)


def export_model(learner: Learner, batch: Batch, folder: Path) -> list[Exported]:
    """Write a learner's model, with the inputs of a batch. Raises: ConfigError, if its framework cannot."""
    if isinstance(learner, WithExport):
        return learner.export(batch, folder)
    if not is_of_torch(learner.model):
        raise ConfigError.of("needs-backend", f"backend: expected one that can export, got a {type(learner.model).__name__}")
    from hvdtrain.plugins.inspect.torch_models import export

    return export(learner, batch, folder)
