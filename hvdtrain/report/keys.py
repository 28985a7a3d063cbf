"""The keys of experiment trackers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from hvdtrain.config.check import Factory, build_objects
from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import Problem, problem
from hvdtrain.report.services import METHODS, SERVICES, require
from hvdtrain.runtime import log

FIGURES = "plotly"
"""The package that the report page takes."""


@dataclass(frozen=True, kw_only=True)
class TrackerKeys(Section):
    """Experiment trackers, beside the log and scores.jsonl."""

    use_tensorboard: bool = key(False, "write scores, learning rate and times for TensorBoard into tensorboard/ beside the model")
    tensorboard_histograms: bool = key(False, "also write a histogram of every parameter for TensorBoard (with use_tensorboard)")
    trackers: Any = key(
        None,
        "experiment trackers that rank 0 reports to: 'wandb', 'mlflow', a class or an object with methods begin, log_epoch, "
        "log_steps, artifact, end, 'module:Class', a dict of `class` and its arguments, or a list of these (docs/reports.md)",
    )
    track_epoch: Callable[..., None] | str | None = key(
        None,
        "function {signature} that rank 0 calls after every epoch with metrics {name: number}, to log them to a service that "
        "`trackers` has no class for",
        signature="*, epoch, step, metrics, **_",
    )

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        found = build_objects("trackers", self.trackers, METHODS, "log_", SERVICES)[1]
        if self.tensorboard_histograms and not self.use_tensorboard:
            found += problem("missing", "tensorboard_histograms: expected use_tensorboard = True beside it, got False")
        return found

    def require_packages(self) -> None:
        """Check that the packages are installed that rank 0 needs. Raises: ConfigError."""
        if self.use_tensorboard:
            require("tensorboard", "use_tensorboard")
        for made in self.made:
            if made.label in SERVICES:
                require(made.label, "trackers")
        if self.made and find_spec(FIGURES) is None:
            log.warning(f"trackers: there will be no report page at the end without {FIGURES} (pip install plotly)")

    @property
    def made(self) -> list[Factory]:
        """The entries of `trackers`."""
        return build_objects("trackers", self.trackers, METHODS, "log_", SERVICES)[0]
