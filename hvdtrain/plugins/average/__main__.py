"""The command `hvdtrain average`: one model from several checkpoints of a training."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.progress import BEST
from hvdtrain.checkpoint.stored import read_progress
from hvdtrain.cli import exit_status
from hvdtrain.comm.base import on_rank_zero
from hvdtrain.config.command_line import command_parser, parse_command_line, split_overrides
from hvdtrain.disk.atomic import remove_path
from hvdtrain.errors import CheckpointError, LaunchError
from hvdtrain.learner.frameworks import FRAMEWORKS, Framework
from hvdtrain.learner.model_format import SAFETENSORS
from hvdtrain.learner.state_base import StateBase
from hvdtrain.plugins.average.averages import average_contents, check_target, make_average, with_statistics, write_model_file
from hvdtrain.plugins.average.means import framework_of, mean_of_files
from hvdtrain.plugins.average.rules import AverageRule, make_rule, select, shortfall
from hvdtrain.plugins.average.statistics import recompute_statistics
from hvdtrain.runtime import log
from hvdtrain.runtime.records import records_of
from hvdtrain.schedule.directions import base_of, implies_higher_is_better
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure
from hvdtrain.settings import read_settings, with_datasets
from hvdtrain.start_up.job import open_session
from hvdtrain.start_up.ranks import open_communicator

DESCRIPTION = """\
Write the mean of several models of a training, which is often better than each of them. It is a model like any other:
++load FILE evaluates it. Sums are formed in float64. Integers, such as the number of batches that BatchNorm has seen, are those
of the newest model. BatchNorm's statistics are averaged like weights, unless --recompute-statistics is given.

MODEL is the key `model` of the training, such as exp/g2p/model. The config is not needed."""


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its exit status."""
    words, overrides = split_overrides(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(words)
    return exit_status(lambda: run(options, overrides), "interrupted")


def parser() -> argparse.ArgumentParser:
    result = command_parser("average", DESCRIPTION, "")
    add = result.add_argument
    add("models", metavar="MODEL", nargs="+", type=Path, help="the key `model` of the training, or two or more model files")
    choice = result.add_mutually_exclusive_group()
    choice.add_argument("--best", metavar="N", help="the N best epochs that have a model, and best evaluations within epochs")
    choice.add_argument("--last", metavar="N", help="the last N epochs that have a model")
    choice.add_argument("--epochs", metavar="NUMBERS", help="these epochs: 10-20, or 3,5,10-20")
    choice.add_argument("--steps", metavar="NUMBERS", help="models within epochs, by the number of steps of the whole training")
    choice.add_argument(
        "--running",
        metavar="NUMBERS",
        help="the running average (key running_average) over the updates of epochs 10-20, or of the last N epochs",
    )
    add("--measure", metavar="SCORE", help="with --best: the score, such as dev_loss_wer (default: that of best.json)")
    add("--higher-is-better", action="store_true", help="with --measure: higher values of the score are better")
    add("--out", type=Path, metavar="FILE", help="the file to write (default: MODEL.best-5.pt and the like)")
    add(
        "--recompute-statistics",
        type=Path,
        metavar="CONFIG",
        help="compute BatchNorm's statistics anew, on an epoch of this config's training data; under mpirun on several ranks",
    )
    return result


def run(options: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Write the average. Raises: HvdtrainError."""
    kinds = [kind for kind in ("best", "last", "epochs", "steps", "running") if getattr(options, kind) is not None]
    if overrides and options.recompute_statistics is None:
        raise LaunchError(
            f"{overrides[0]}: expected --recompute-statistics CONFIG, whose keys it changes, got none"
        ).on_all_ranks()
    if options.recompute_statistics is None:
        averaged = make(options, kinds)
        write_model_file(averaged.target, averaged.contents, averaged.framework)
        print("\n".join([*averaged.lines, str(averaged.target)]))
        return
    _recompute(options, kinds, overrides)


@dataclass(frozen=True)
class Averaged:
    """An average. Attributes: target: the file that the user wants; lines: about what was averaged, for the user."""

    target: Path
    contents: dict[str, Any]
    framework: Framework
    lines: list[str]


def make(options: argparse.Namespace, kinds: Sequence[str]) -> Averaged:
    """The average of models as they are. Raises: CheckpointError, if models are missing, damaged or different."""
    if not kinds:
        return _make_of_files(options)
    if len(options.models) != 1:
        raise CheckpointError(f"--{kinds[0]}: expected one MODEL, got {len(options.models)}")
    [prefix] = options.models
    checkpoints, framework = _folder(prefix)
    [kind] = kinds
    try:
        rule = make_rule(kind, getattr(options, kind))
    except ValueError:
        raise CheckpointError(f"--{kind}: expected numbers such as 5 or 10-20, got {getattr(options, kind)!r}") from None
    rule = replace(rule, measure=options.measure if kind == "best" else None)
    if options.measure is not None and kind != "best":
        raise CheckpointError(f"--measure: expected --best, got --{kind}")
    history = _history(checkpoints, framework)
    measure = _measure(options, checkpoints)
    chosen = select(rule, checkpoints, history, measure)
    if (missing := shortfall(rule, chosen)) is not None:
        raise CheckpointError(f"--{kind}: {missing} of {prefix}")
    target = options.out or prefix.with_name(f"{prefix.name}.{rule.name}{chosen[-1].model_file.suffix}")
    check_target(target, checkpoints, [checkpoint.model_file for checkpoint in chosen], _suffixes(framework))
    contents = make_average(rule, chosen, framework)
    return Averaged(target, contents, framework, _lines(rule, contents, history, measure))


def _make_of_files(options: argparse.Namespace) -> Averaged:
    files: list[Path] = options.models
    if len(files) < 2 or options.out is None:
        raise CheckpointError(
            "average: expected MODEL with --best, --last, --epochs, --steps or --running, or at least two files and --out, got "
            f"{', '.join(map(str, files))}"
        )
    if options.measure is not None:
        raise CheckpointError("--measure: expected --best, got files")
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"{file}: expected a model's file, got no such file")
    framework = framework_of(files[0])
    check_target(options.out, None, files, _suffixes(framework))
    contents = average_contents(mean_of_files(files, framework), "files", [file.name for file in files])
    return Averaged(options.out, contents, framework, [f"the average of {len(files)} models"])


def _suffixes(framework: Framework) -> tuple[str, str]:
    return framework.suffix, SAFETENSORS


def _folder(prefix: Path) -> tuple[CheckpointFolder, Framework]:
    """The checkpoints of a training, and its framework. Raises: CheckpointError."""
    for framework in FRAMEWORKS.values():
        checkpoints = CheckpointFolder(prefix, framework.suffix)
        models = [checkpoints.checkpoint_at(epoch).model_file for epoch in checkpoints.finished_epochs()]
        models += [checkpoint.model_file for checkpoint in checkpoints.within_epochs()]
        if models:
            saved_by = framework_of(models[-1])
            return (checkpoints if saved_by is framework else CheckpointFolder(prefix, saved_by.suffix)), saved_by
    hint = " (give the key `model`, which the names of the files begin with)" if prefix.exists() else ""
    raise CheckpointError(f"{prefix}: expected models such as {prefix}.001.pt, got none{hint}")


def _history(checkpoints: CheckpointFolder, framework: Framework) -> list[EpochRecord]:
    """The epochs with their scores, as the newest model has them. Raises: CheckpointError."""
    epochs = checkpoints.finished_epochs()
    within = checkpoints.within_epochs()
    candidates = [*([checkpoints.checkpoint_at(epochs[-1])] if epochs else []), *within[-1:]]
    newest = max(candidates, key=lambda checkpoint: checkpoint.age).model_file
    return read_progress(framework.model_files.read_model(newest), newest).records


def _measure(options: argparse.Namespace, checkpoints: CheckpointFolder) -> Measure:
    """The measure of --best: given, or that of best.json. Raises: CheckpointError."""
    best: dict[str, Any] = {}
    path = records_of(checkpoints.prefix) / BEST
    if path.exists():
        try:
            best = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            best = {}
    name = options.measure or best.get("measure")
    if name is None:
        return Measure()
    higher = options.higher_is_better or (name == best.get("measure") and bool(best.get("higher_is_better")))
    if implies_higher_is_better(base_of(name)) and not higher:
        raise CheckpointError(
            f"--measure: expected --higher-is-better, or a score whose lower values are better, got {name!r}, whose name says "
            "that higher values are better"
        )
    return Measure([name], [name] if higher else [])


def _lines(rule: AverageRule, contents: Mapping[str, Any], history: Sequence[EpochRecord], measure: Measure) -> list[str]:
    names = ", ".join(contents["average"]["of"])
    by = f", by {measure.describe(history)}" if rule.kind == "best" else ""
    subject = "the running average between" if rule.kind == "running" else "the average of"
    return [f"{subject} {names}{by}"]


def _recompute(options: argparse.Namespace, kinds: Sequence[str], overrides: Sequence[str]) -> None:
    """Collective. Write the average with BatchNorm's statistics computed anew on training data. Raises: HvdtrainError."""
    settings = with_datasets(read_settings(*parse_command_line([str(options.recompute_statistics), *overrides])))
    with open_communicator(settings) as comm:

        def average() -> tuple[Path, Path, list[str]]:
            averaged = make(options, kinds)
            plain = averaged.target.with_name(f"{averaged.target.stem}.plain{averaged.target.suffix}")
            write_model_file(plain, averaged.contents, averaged.framework)
            return plain, averaged.target, averaged.lines

        plain, target, lines = on_rank_zero(comm, average, name="average")
        try:
            settings = replace(settings, start=replace(settings.start, load=str(plain), load_epoch=None))
            with open_session(settings, "statistics", comm) as session:
                epoch = max(1, session.progress.epoch)
                [train, *_] = session.epochs.feeds(session.feeds, epoch)
                layers = recompute_statistics(comm, session.learner, session.watchdog, train, epoch)
                if not layers:
                    raise CheckpointError(
                        "--recompute-statistics: expected a model with BatchNorm layers, got none (leave the option out)"
                    ).on_all_ranks()
                on_rank_zero(comm, lambda: _rewrite(plain, target, session.learner.state), name="rewrite")
                log.result("\n".join([*lines, str(target)]))
        finally:
            if comm.rank == 0:
                remove_path(plain)


def _rewrite(plain: Path, target: Path, state: StateBase) -> None:
    """Write a file's contents with the model's present tensors."""
    framework = framework_of(plain)
    contents = framework.model_files.read_model(plain)
    write_model_file(target, with_statistics(contents, state.model_tensors()), framework)
