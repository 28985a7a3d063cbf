"""Experiment trackers: the interface, and the classes for Weights & Biases and for MLflow."""

from __future__ import annotations

import ast
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.config.plugins import Registry
from hvdtrain.errors import ConfigError
from hvdtrain.report.ends import Status

if TYPE_CHECKING:
    from hvdtrain.report.starts import Start

METHODS = ("begin", "log_epoch", "log_steps", "artifact", "end")
"""The methods that a tracker may have."""


@dataclass(frozen=True)
class RunDescription:
    """A training, as described to a tracker.

    Attributes:
        name: the name of the folder with the model.
        folder: the folder with the model.
        id: of the run to continue: what `begin` returned when the training started. None: a new run.
        step: steps done so far.
        config: every key in effect; values that are not Python literals are given as text.
        git: `commit`, `branch` and `dirty` (whether there are uncommitted changes) of the config's repository; empty if there is
            none.
        start: hosts and devices by rank, versions, command, the origin of every key, the first epoch, the number of parameters.
    """

    name: str
    folder: Path
    id: str | None
    step: int
    config: Mapping[str, Any]
    git: Mapping[str, Any]
    start: Start

    @property
    def facts(self) -> dict[str, Any]:
        """Facts about the run that are not in its config."""
        start = self.start
        return {
            "git": dict(self.git),
            "hosts": _host_lines(start),
            "num_ranks": len(start.hosts),
            "num_parameters": start.num_parameters,
            "command": start.command,
            "versions": dict(start.versions),
        }


def _host_lines(start: Start) -> list[str]:
    """Where each rank runs; if there are many, the number of ranks on each host."""
    from hvdtrain.report.epoch import FEW_RANKS  # here, as every command imports this file
    from hvdtrain.report.starts import hosts_text

    if len(start.hosts) > FEW_RANKS:
        return [hosts_text(start.hosts)]
    return [f"rank {rank}: {host} ({device})" for rank, (host, device) in enumerate(start.hosts)]


class Tracker:
    """A base class for trackers, whose methods do nothing. A config's class need not be derived from it: any of these methods
    that it has are called on rank 0, in a separate thread, one after the other.
    """

    def begin(self, run: RunDescription) -> str | None:
        """Begin a run, or continue the one that `run.id` names. Returns its id, if there is one."""
        return None

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        """Log the numbers of a finished epoch, after `step` steps of the whole training."""

    def log_steps(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        """Log numbers within an epoch, whenever the log has a line about a step."""

    def artifact(self, path: Path, name: str) -> None:
        """Keep a file with the run. At the end of a training, this is the report page."""

    def end(self, status: Status) -> None:
        """End the run."""


class Wandb:
    """Weights & Biases. Takes the arguments of `wandb.init`; `settings` is a dict of the arguments of `wandb.Settings`."""

    def __init__(
        self,
        *,
        project: str = "hvdtrain",
        entity: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: Sequence[str] | None = None,
        mode: str | None = None,
        dir: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self._options: dict[str, Any] = {"project": project, "entity": entity, "group": group, "job_type": job_type}
        self._options |= {"notes": notes, "tags": tags, "mode": mode}
        self._name = name
        self._folder = dir
        self._settings = settings or {}
        self._run: Any = None

    def begin(self, run: RunDescription) -> str | None:
        import wandb

        # wandb must not ask for a key on the terminal, print there, or capture stdout and the progress bar.
        quiet = {"console": "off", "silent": True}
        wandb.setup(wandb.Settings(silent=True))
        self._run = wandb.init(
            **self._options,
            name=self._name or run.name,
            dir=self._folder or str(run.folder),
            config={**run.config, **run.facts},
            id=run.id,
            resume=None if run.id is None else "allow",
            settings=wandb.Settings(**{**quiet, **self._settings}),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        return str(self._run.id)

    @property
    def place(self) -> str:
        """Where to look at the run."""
        return str(self._run.url or self._run.settings.sync_dir)

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log({"epoch": epoch, "step": step, **numbers})

    log_steps = log_epoch

    def artifact(self, path: Path, name: str) -> None:
        import wandb

        artifact = wandb.Artifact(f"{name}-{self._run.id}", type=name)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def end(self, status: Status) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=1 if status == "failed" else 0)


MLFLOW_BATCH = 100
"""The most entries that MLflow accepts in one call."""


class MLflow:
    """MLflow, or Databricks.

    Args:
        tracking_uri: a server, a folder, or anything else that MLflow accepts; None: MLflow's default, MLFLOW_TRACKING_URI.
        experiment_name: created if it does not exist; None: MLFLOW_EXPERIMENT_NAME, or "hvdtrain".
        run_name: None: the name of the folder with the model.
    """

    STATUS: Mapping[Status, str] = {"finished": "FINISHED", "stopped": "KILLED", "failed": "FAILED"}

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment_name: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
    ) -> None:
        self._tracking_uri = tracking_uri
        self._experiment_name = experiment_name
        self._run_name = run_name
        self._tags = tags or {}
        self._client: Any = None
        self._id = ""

    def begin(self, run: RunDescription) -> str | None:
        import mlflow
        from mlflow import environment_variables as environment

        uri = str(self._tracking_uri or mlflow.get_tracking_uri())
        if "://" not in uri or uri.startswith("file:"):  # MLflow 3 accepts a folder only if this variable allows it
            allow = getattr(environment, "MLFLOW_ALLOW_FILE_STORE", None)
            if allow is not None and self._tracking_uri is not None:
                allow.set(True)
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        self._id = (None if run.id is None else self._existing(run.id)) or self._new(run)
        logged = self._client.get_run(self._id).data.params
        wanted = {_mlflow_name(name): str(value)[:6000] for name, value in _flat({**run.config, **run.facts})}
        params = [mlflow.entities.Param(name, value) for name, value in wanted.items() if name not in logged]
        changed = {name: value for name, value in wanted.items() if logged.get(name, value) != value}  # params cannot be changed
        tags = [mlflow.entities.RunTag(f"resumed.{name}", value) for name, value in changed.items()]
        self._log(params=params, tags=tags)
        return self._id

    def _log(self, **entries: Sequence[Any]) -> None:
        for kind, listed in entries.items():
            for first in range(0, len(listed), MLFLOW_BATCH):
                self._client.log_batch(self._id, **{kind: listed[first : first + MLFLOW_BATCH]})

    @property
    def place(self) -> str:
        """Where to look at the run."""
        return f"{self._client.tracking_uri}, run {self._id}"

    def _existing(self, run_id: str) -> str | None:
        """The id of the earlier run, set to running; None if it was deleted."""
        from mlflow.exceptions import MlflowException

        try:
            if self._client.get_run(run_id).info.lifecycle_stage != "active":
                return None
        except MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            return None
        self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _new(self, run: RunDescription) -> str:
        from mlflow.environment_variables import MLFLOW_EXPERIMENT_NAME

        variable: Any = MLFLOW_EXPERIMENT_NAME
        name = self._experiment_name or variable.get() or "hvdtrain"
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        tags = {"mlflow.source.name": run.start.command, **self._tags}
        if run.git:
            tags |= {"mlflow.source.git.commit": run.git["commit"], "mlflow.source.git.branch": run.git["branch"]}
        return str(self._client.create_run(number, run_name=self._run_name or run.name, tags=tags).info.run_id)

    def log_epoch(self, epoch: int, step: int, numbers: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(_mlflow_name(name), float(value), now, step) for name, value in {"epoch": epoch, **numbers}.items()]
        self._log(metrics=metrics)

    log_steps = log_epoch

    def artifact(self, path: Path, name: str) -> None:
        self._client.log_artifact(self._id, str(path), name)

    def end(self, status: Status) -> None:
        self._client.set_terminated(self._id, self.STATUS[status])


def _mlflow_name(name: str) -> str:
    """A name with the characters that MLflow allows.

    >>> _mlflow_name("train/loss (mean)")
    'train/loss -mean-'
    """
    return "".join(letter if letter.isalnum() or letter in "_-. :/" else "-" for letter in name)


def _flat(values: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    """The entries of nested dicts with names such as `train.files`.

    >>> list(_flat({"train": {"files": ["a"]}, "max_seqs": 3}))
    [('train.files', ['a']), ('max_seqs', 3)]
    """
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{start}{name}.")
        else:
            yield f"{start}{name}", value


SERVICES: Registry[type] = Registry("trackers")
"""By the name in a config, the class."""

ARTIFACTS: Registry[Callable[[Path, Status], Path | None]] = Registry("artifacts")
"""Those of plug-ins."""

INSTALLED_BY = {"wandb": "wandb", "mlflow": "mlflow-skinny", "tensorboard": "tensorboard"}
"""The name of each package for pip."""


def require(package: str, key: str) -> None:
    """Check that a package is installed. Raises: ConfigError.

    A service's package is imported here, so that the tracker's thread does not import it while a framework imports modules.
    """
    hint = f"(pip install {INSTALLED_BY[package]})"
    if find_spec(package) is None:
        raise ConfigError.of("missing-package", f"{key}: expected the package {package}, got none {hint}")
    if package in SERVICES:
        try:
            import_module(package)
        except Exception as error:  # incompatible dependencies raise errors of any kind
            raise ConfigError.of(
                "missing-package", f"{key}: expected the package {package}, got {type(error).__name__}: {error} {hint}"
            ) from error


def config_values(settings: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """The values of keys, parsed where their text is a Python literal.

    >>> config_values({"max_seqs": ("12", "default"), "get_model": ("<function get_model in g2p.py>", "g2p.py")})
    {'max_seqs': 12, 'get_model': '<function get_model in g2p.py>'}
    """
    values: dict[str, Any] = {}
    for name, (text, _) in settings.items():
        values[name] = text
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            values[name] = ast.literal_eval(text)
    return values


def git_state(folder: Path) -> dict[str, Any]:
    """The commit and branch of the repository around a folder, and whether it has uncommitted changes; empty if there is none."""

    def git(*arguments: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        commit, branch = git("rev-parse", "HEAD"), git("rev-parse", "--abbrev-ref", "HEAD")
        return {"commit": commit, "branch": branch, "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
    except (OSError, subprocess.SubprocessError):
        return {}
