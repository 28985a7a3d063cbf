"""The keys of experiment trackers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.config.check import Factory, build_objects
from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key
from hvdtrain.config.references import as_function
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.trackers.services import ARTIFACTS, INSTALLED_BY, METHODS, SERVICES, require

TENSORBOARD = "tensorboard"
"""No service, and no class for `trackers`: it reads the files that are written for it."""


@dataclass(frozen=True, kw_only=True)
class TrackerKeys(Section):
    """Experiment trackers, in addition to the log and scores.jsonl."""

    use_tensorboard: bool = key(False, "write scores, learning rate and times for TensorBoard to tensorboard/ next to the model")
    tensorboard_histograms: bool = key(False, "also write a histogram of every parameter for TensorBoard (with use_tensorboard)")
    trackers: Any = key(
        None,
        "experiment trackers that rank 0 reports to: 'wandb', 'mlflow', 'tensorboard' (use_tensorboard), a class or an object "
        "with methods begin, log_epoch, log_steps, artifact, end, 'module:Class', a dict of `class` and its arguments, or a list "
        "of these (docs/reports.md)",
    )
    track_best_model: bool = key(
        False,
        "at the end, also keep the file of the best epoch's model with the run: W&B and MLflow store it, your class gets "
        "artifact(path, 'model')",
    )
    metrics_file: str | None = key(
        None,
        "a file NAME.prom with the training's numbers in Prometheus's text format, which rank 0 replaces after every epoch and "
        "when the log has a line about a step (log_interval): for the textfile collector of node_exporter",
        Rule("a path that ends with .prom: node_exporter reads no other files", lambda value: Path(value).suffix == ".prom"),
    )
    track_epoch: Callable[..., None] | str | None = key(
        None,
        "function {signature} that rank 0 calls after every epoch with metrics {name: number}, to log them to a service for "
        "which `trackers` has no class",
        signature="*, epoch, step, metrics, **_",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        problems = build_objects("trackers", self.trackers, METHODS, "log_", SERVICES.entries, passed_over=(TENSORBOARD,))[1]
        if self.tensorboard_histograms and not self.writes_tensorboard:
            problems += problem("missing", "tensorboard_histograms: expected use_tensorboard = True as well, got False")
        return problems

    def require_packages(self) -> None:
        if self.writes_tensorboard:
            require("tensorboard", "use_tensorboard")
        for factory in self.factories:
            if factory.label in INSTALLED_BY:
                require(factory.label, "trackers")
        if self.factories:
            _ = ARTIFACTS.entries  # a mistake in these is an error now, not after the training
        as_function(self.track_epoch, "track_epoch")

    @property
    def writes_tensorboard(self) -> bool:
        """Whether event files are written for TensorBoard, which is not a service: it reads them."""
        entries = self.trackers if isinstance(self.trackers, (list, tuple)) else [self.trackers]
        return self.use_tensorboard or any(isinstance(entry, str) and entry == TENSORBOARD for entry in entries)

    @property
    def factories(self) -> list[Factory]:
        """The entries of `trackers`, without TensorBoard."""
        return build_objects("trackers", self.trackers, METHODS, "log_", SERVICES.entries, passed_over=(TENSORBOARD,))[0]
