"""What `task` may ask for besides training."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hvdtrain.checkpoint.folder import CheckpointFolder, CleanupRule, parse_rule
from hvdtrain.checkpoint.preload import parse_preloads
from hvdtrain.checkpoint.progress import Progress
from hvdtrain.checkpoint.saver import Saver, clean_up
from hvdtrain.checkpoint.start import model_file
from hvdtrain.comm.base import Communicator, on_rank_zero, together
from hvdtrain.data.feed import Feed
from hvdtrain.data.sources import DatasetSpec
from hvdtrain.errors import ConfigError
from hvdtrain.learner.base import Learner
from hvdtrain.learner.frameworks import FRAMEWORKS
from hvdtrain.run import build_learner, train
from hvdtrain.runtime.log import open_log, say
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import Timer, clock_text
from hvdtrain.runtime.watchdog import Watchdog
from hvdtrain.session import open_communicator, open_some
from hvdtrain.settings import Settings
from hvdtrain.tasks.dry_run import dry_run
from hvdtrain.training.evaluation import evaluate
from hvdtrain.training.forward import forward
from hvdtrain.training.step_log import open_step_log


def run_task(settings: Settings) -> None:
    """Do what the config's `task` says. Raises: HvdtrainError."""
    if settings.function is not None:
        settings.function()
        return
    tasks: dict[str, Callable[[Settings], None]] = {
        "train": train,
        "dry_run": dry_run,
        "eval": evaluate_all,
        "forward": forward_all,
        "search": forward_all,
        "cleanup_old_models": clean_up_all,
    }
    tasks[settings.run.task](settings)


def evaluate_all(settings: Settings) -> None:
    """Evaluate a trained model on dev, eval and eval_datasets. Raises: HvdtrainError."""
    if not settings.evaluations:
        raise ConfigError(["task: expected dev, eval or eval_datasets for the task eval, got none of them"])
    with (
        _opened(settings, list(settings.evaluations)) as (comm, learner, progress, feeds, watchdog),
        open_step_log(settings.log, comm.rank) as step_log,
    ):
        told = []
        for feed in feeds:
            means = evaluate(comm, learner, watchdog, feed, max(1, progress.epoch), lambda: None, step_log)
            told.append(f"{feed.name}: {text(means)}")
        say(1, f"epoch {progress.epoch} evaluation: {'; '.join(told)}")


def forward_all(settings: Settings) -> None:
    """Run the config's forward_step over forward_data or search_data. Raises: HvdtrainError."""
    if settings.forward is None:
        raise ConfigError(["forward_data: expected a dataset, got None"])
    with _opened(settings, [settings.forward]) as (comm, learner, progress, feeds, watchdog):
        began = time.perf_counter()
        epoch = max(1, progress.epoch)
        steps = forward(comm, learner, watchdog, feeds[0], epoch, settings.forwarding, Path(settings.run.model))
        say(3, f"Forward {steps} steps, {clock_text(time.perf_counter() - began)} elapsed")


def clean_up_all(settings: Settings) -> None:
    """Remove the models that `cleanup_old_models` does not keep, by the scores in scores.jsonl. Raises: HvdtrainError."""
    with open_communicator(settings) as comm:
        open_log(settings.log, comm.rank, comm.size)
        prefix = Path(settings.run.model)
        rule = parse_rule(settings.saving.cleanup_old_models) or CleanupRule()
        suffix = FRAMEWORKS[settings.run.backend].suffix

        def remove() -> None:
            clean_up(CheckpointFolder(prefix, suffix), rule, _scores(prefix.parent / "scores.jsonl"))

        on_rank_zero(comm, remove, name="clean_up")


Opened = tuple[Communicator, Learner, Progress, list[Feed], Watchdog]


@contextmanager
def _opened(settings: Settings, specs: list[DatasetSpec]) -> Iterator[Opened]:
    """A trained model and some datasets, on all ranks."""
    with open_communicator(settings) as comm:
        together(comm, lambda: open_log(settings.log, comm.rank, comm.size), name="open_log")
        with Watchdog(settings.run.watchdog_timeout, comm.rank) as watchdog:
            watchdog.beat("opening the datasets")
            feeds = together(comm, lambda: open_some(settings, comm, specs), name="open_feeds")
            watchdog.beat("building the model")
            reducer = settings.reduce.reducer(comm, Timer())
            plain = replace(settings, learner=replace(settings.learner, ema_decay=None))  # the model's file has the average
            learner = together(comm, lambda: build_learner(plain, reducer, comm), name="build_learner")
            folder = CheckpointFolder(Path(settings.run.model), FRAMEWORKS[settings.run.backend].suffix)
            saver = Saver(comm, learner.state, reducer, folder, "shard")
            preloads = [
                one for one in parse_preloads(settings.start.preload_from_files) if one.is_due(training=False, fresh=True)
            ]
            progress = Progress()
            if not preloads or settings.start.load or folder.finished():
                file = on_rank_zero(comm, lambda: model_file(settings.start, folder), name="model_file")
                progress = saver.load_model(file, None)
                say(3, f"Loaded {file}.")
            saver.preload(preloads)
            learner.begin_epoch(max(1, progress.epoch), progress.step)
            yield comm, learner, progress, feeds, watchdog
            for feed in feeds:
                feed.dataset.close()


def _scores(path: Path) -> dict[int, dict[str, float]]:
    """By epoch, the scores in a scores.jsonl."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    epochs = [json.loads(line) for line in lines if line.endswith("}")]
    return {epoch["epoch"]: {name: float(score) for name, score in epoch["scores"].items()} for epoch in epochs}
