"""Makes averages of checkpoints, and writes their files."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.data.types import Array
from hvdtrain.disk.atomic import atomically
from hvdtrain.errors import CheckpointError
from hvdtrain.learner.contents import BASE
from hvdtrain.learner.frameworks import Framework
from hvdtrain.learner.integrity import SAVE_ID
from hvdtrain.plugins.average.means import mean_of_files, with_parameters
from hvdtrain.plugins.average.rules import AverageRule
from hvdtrain.plugins.average.running import RunningSums

STORED = ("epoch", "step", "history", "within", BASE)
"""The entries of the newest model's file that the average's has, too."""


def make_average(rule: AverageRule, chosen: Sequence[Checkpoint], framework: Framework) -> dict[str, Any]:
    """The contents of an average's file.

    Args:
        chosen: what `select` returned.

    Raises:
        CheckpointError: a file is missing or damaged, or the files do not belong together.
    """
    if rule.kind == "running":
        contents = _running_mean(chosen[0] if len(chosen) > 1 else None, chosen[-1], framework)
    else:
        contents = mean_of_files([checkpoint.model_file for checkpoint in chosen], framework)
    return average_contents(contents, rule.name, source_names(rule, chosen))


def source_names(rule: AverageRule, chosen: Sequence[Checkpoint]) -> list[str]:
    """The names of the files that an average is made from."""
    return [(checkpoint.running_file if rule.kind == "running" else checkpoint.model_file).name for checkpoint in chosen]


def average_contents(contents: Mapping[str, Any], name: str, sources: Sequence[str]) -> dict[str, Any]:
    """Of the contents of a model's file, those of an average's; its entry `average` says how it was made."""
    stored = {entry: contents[entry] for entry in ("model", *STORED) if entry in contents}
    return {**stored, "average": {"name": name, "of": list(sources)}}


def with_statistics(contents: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """The contents of an average's file, with a model whose BatchNorm statistics were computed anew."""
    return {**contents, "model": model, "average": {**contents["average"], "recomputed_statistics": True}}


def _running_mean(before: Checkpoint | None, end: Checkpoint, framework: Framework) -> dict[str, Any]:
    """The model at the end, with the mean of its parameters since an earlier checkpoint, or since the training began."""
    sums, marks = _read_sums(end)
    contents = framework.model_files.read_model(end.model_file)
    if contents.get(SAVE_ID) != marks.get(SAVE_ID):
        raise CheckpointError(f"{end.running_file}: expected the sums saved with {end.model_file.name}, got others")
    earlier: RunningSums | None = None
    where = "since the training began" if before is None else f"since epoch {before.epoch}"
    if before is None:
        begin = 0
    elif before.running_file.exists():
        earlier, _ = _read_sums(before)
        begin = sums.begin_step if earlier.series == sums.series else -1
    elif before.model_file.exists():
        begin = int(framework.model_files.read_model(before.model_file).get("step") or 0)
    else:
        raise CheckpointError(f"{before.running_file}: expected the sums after epoch {before.epoch}, got no such file")
    if begin != sums.begin_step:
        raise CheckpointError(
            f"{end.running_file}: expected the sums {where}, got those since step {sums.begin_step} (running_average was set, or "
            "the training began anew, after that)"
        )
    try:
        return with_parameters(end.model_file, mean_since(earlier, sums), framework)
    except ValueError as error:
        raise CheckpointError(f"{end.running_file}: expected updates {where}, got {error} (a smaller running_average)") from None


def mean_since(before: RunningSums | None, end: RunningSums) -> dict[str, Array]:
    """The mean over the updates after an earlier checkpoint; None: over all. Raises: ValueError, if there are none."""
    earlier = before.sums if before is not None else {}
    count = end.samples - (before.samples if before is not None else 0)
    if count <= 0:
        raise ValueError(f"{count} samples")
    return {name: (total - earlier[name] if name in earlier else total) / count for name, total in end.sums.items()}


def _read_sums(checkpoint: Checkpoint) -> tuple[RunningSums, dict[str, Any]]:
    if not checkpoint.running_file.exists():
        raise CheckpointError(
            f"{checkpoint.running_file}: expected the sums of a running average, got no such file (they are written if "
            "running_average is set)"
        )
    return RunningSums.read(checkpoint.running_file)


def write_model_file(file: Path, contents: Mapping[str, Any], framework: Framework) -> None:
    """Write a model's file atomically, in the format of its suffix. Raises: CheckpointError."""
    progress = {name: value for name, value in contents.items() if name != "model"}
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomically(file) as unfinished:
            framework.model_files.write_model(unfinished, contents["model"], progress, file.suffix.removeprefix("."))
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{file}: expected to write an average, got: {error}") from None


def check_target(file: Path, checkpoints: CheckpointFolder | None, sources: Collection[Path], suffixes: Collection[str]) -> None:
    """Whether an average may be written to a file. Raises: CheckpointError."""
    if file.suffix.removeprefix(".") not in suffixes:
        wanted = " or ".join(f".{suffix}" for suffix in suffixes)
        raise CheckpointError(f"{file}: expected a name that ends in {wanted}, got another")
    is_checkpoint = checkpoints is not None and checkpoints.has_name(file)
    if is_checkpoint or file.absolute() in {source.absolute() for source in sources}:
        raise CheckpointError(f"{file}: expected a name that no checkpoint of the training has, got one")
