"""What a module finds as `self.trainer`: what modules read most. Anything else is refused by name."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hvdtrain
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.plugins.lightning.loaders import accumulated


class Refused(ConfigError, AttributeError):
    """An attribute that `hasattr` finds missing, and whose use ends the training with its name."""


class Logger:
    """`self.logger`: what is logged with it becomes scores, as by `self.log`."""

    name = version = "hvdtrain"

    def __init__(self, job: Any) -> None:
        self._job = job

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._job.logged.log(name, value)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The records of a training have its config."""

    def __getattr__(self, name: str) -> Any:
        raise refused("self.logger", name, "give trackers to hvdtrain: docs/reports.md")


class Trainer:
    """Attributes:
    callback_metrics: the last value of whatever was logged, by name.
    training, validating, testing, predicting: the stage.
    """

    sanity_checking = fast_dev_run = barebones = False
    progress_bar_callback = profiler = None
    num_nodes = check_val_every_n_epoch = log_every_n_steps = 1
    val_check_interval = 1.0

    def __init__(self, job: Any) -> None:
        self._job = job
        self.logger = Logger(job)
        self.callback_metrics: dict[str, Any] = {}
        self.stage = "train"
        self.current_epoch = self.global_step = 0
        self._stops = False
        self.state = SimpleNamespace(fn="fit")
        self._collectives: dict[str, Any] = {
            "reduce_boolean_decision": lambda value, all=True: (min if all else max)(hvdtrain.all_gather(bool(value))),
            "barrier": lambda *_: hvdtrain.all_gather(None),
            "broadcast": lambda value, src=0: hvdtrain.all_gather(value)[src],
        }

    @property
    def strategy(self) -> Any:
        return SimpleNamespace(**self._collectives, root_device=self._job.module.device)

    @property
    def training(self) -> bool:
        return self.stage == "train"

    @property
    def validating(self) -> bool:
        return self.stage == "validation"

    @property
    def testing(self) -> bool:
        return self.stage == "test"

    @property
    def predicting(self) -> bool:
        return self.stage == "predict"

    @property
    def evaluating(self) -> bool:
        return self.validating or self.testing

    @property
    def world_size(self) -> int:
        return hvdtrain.size()

    num_devices = world_size

    @property
    def global_rank(self) -> int:
        return hvdtrain.rank()

    @property
    def is_global_zero(self) -> bool:
        return hvdtrain.rank() == 0

    @property
    def max_epochs(self) -> int:
        number = int(self._job.given.values.get("num_epochs") or 5)
        return -1 if self.max_steps >= 0 and number >= self.max_steps else number

    @property
    def accumulate_grad_batches(self) -> int:
        return accumulated(self._job.given.values)

    @property
    def num_training_batches(self) -> int:
        return int(self._job.loaders.num_batches)

    @property
    def estimated_stepping_batches(self) -> int:
        if self.max_epochs < 0:
            return self.max_steps
        steps = -(-self.num_training_batches // self.accumulate_grad_batches) * self.max_epochs
        return steps if self.max_steps < 0 else min(steps, self.max_steps)

    @property
    def max_steps(self) -> int:
        return int(self._job.extent.max_steps)

    @property
    def datamodule(self) -> Any:
        return self._job.given.datamodule

    @property
    def lightning_module(self) -> Any:
        return self._job.module

    model = lightning_module

    @property
    def callbacks(self) -> Any:
        return self._job.given.callbacks

    @property
    def optimizers(self) -> list[Any]:
        return [] if self._job.optimizer is None else [self._job.optimizer]

    @property
    def lr_scheduler_configs(self) -> Any:
        return self._job.schedules.configs

    @property
    def loggers(self) -> list[Any]:
        return [self.logger]

    @property
    def logged_metrics(self) -> dict[str, Any]:
        return self.callback_metrics

    @property
    def train_dataloader(self) -> Any:
        return self._job.loaders.of("train")[0]

    @property
    def val_dataloaders(self) -> Any:
        loaders = self._job.loaders.of("val")
        return loaders[0] if len(loaders) == 1 else loaders

    @property
    def default_root_dir(self) -> str:
        return str(Path(self._job.given.values["model"]).parent)

    @property
    def should_stop(self) -> bool:
        return self._stops

    @should_stop.setter
    def should_stop(self, value: bool) -> None:
        self._stops = value
        self.stop_if_due()

    def stop_if_due(self) -> None:
        """End the training after this epoch, if it was asked for and as many epochs are done as there are at least."""
        if self._stops and self._job.training is not None and self.current_epoch + 1 >= self._job.extent.min_epochs:
            self._job.training.finish("trainer.should_stop was set")

    def __getattr__(self, name: str) -> Any:
        raise refused("self.trainer", name, "docs/lightning.md lists what there is")


def refused(what: str, name: str, advice: str) -> Refused:
    """The error about an attribute that there is not."""
    return Refused(
        [Problem.of("unsupported", f"{what}: expected what hvdtrain has of Lightning's Trainer, got {name!r} ({advice})")]
    )
