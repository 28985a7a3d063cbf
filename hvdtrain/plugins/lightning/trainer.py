"""What a module finds as `self.trainer`: what modules read most. Anything else is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

import hvdtrain
from hvdtrain.comm.this_process import place
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.plugins.lightning.arguments import PRECISIONS
from hvdtrain.plugins.lightning.loaders import accumulated
from hvdtrain.plugins.lightning.user_objects import stops_early


class Refused(ConfigError, AttributeError):
    """An attribute that `hasattr` finds missing, and whose use ends the training with its name."""


class Logger:
    """`self.logger`, where the config gives none: what is logged with it becomes scores, as by `self.log`."""

    name = version = "hvdtrain"

    def __init__(self, job: Any) -> None:
        self._job = job

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for name, value in metrics.items():
            self._job.logged.log(name, value)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        """The records of a training have its config."""

    def __getattr__(self, name: str) -> Any:
        raise refused("self.logger", name, "give a logger of Lightning's in lightning_trainer, or trackers: docs/reports.md")


def gather(job: Any, data: torch.Tensor, group: Any = None, sync_grads: bool = False) -> torch.Tensor:
    """The tensors of all ranks. Raises: ConfigError, if gradients are wanted of several, or if a rank has no batch in a step."""
    if hvdtrain.size() == 1:
        return data
    if sync_grads:
        raise ConfigError.of("unsupported", "all_gather: expected sync_grads = False on several ranks, got True")
    kind = {"train": "train", "validation": "val"}.get(job.stage, "test")
    index = job.logged.loader_index
    if index is not None and job.stage != "predict" and not job.loaders.are_even(kind, index):
        raise ConfigError.of(
            "unsupported",
            f"all_gather: expected a batch on each rank in all steps of {kind}_dataloader, got fewer in the last one (leave "
            f"them out by limit_{kind}_batches in lightning_trainer, or call it in on_{job.stage}_epoch_end)",
        )
    return torch.stack(hvdtrain.all_gather(data.detach().cpu(), name="lightning_all_gather")).to(data.device)


class TrainerPart:
    """A part of the Trainer's, with what modules and callbacks use of it. `name`: as error messages call it."""

    def __init__(self, name: str, **attributes: Any) -> None:
        vars(self).update(attributes, _name=name)

    def __getattr__(self, name: str) -> Any:
        raise refused(self._name, name, ADVICE)

    def __setattr__(self, name: str, value: Any) -> None:
        raise refused(self._name, f"{name} = {value!r:.60}", ADVICE)


def strategy(job: Any) -> TrainerPart:
    return TrainerPart(
        "self.trainer.strategy",
        root_device=job.module.device,
        **dict.fromkeys(("model", "lightning_module"), job.module),
        is_global_zero=hvdtrain.rank() == 0,
        _lightning_optimizers=job.manual.stepped if job.manual else job.schedules.members,
        **({"backward": job.manual.backward, "optimizer_step": job.manual.optimizer_step} if job.manual else {}),
        all_gather=partial(gather, job),
        barrier=lambda *_: hvdtrain.all_gather(None) and None,
        broadcast=lambda value, src=0: hvdtrain.all_gather(value)[src],
        reduce_boolean_decision=lambda value, all=True: (min if all else max)(hvdtrain.all_gather(bool(value))),
    )


def state(job: Any) -> TrainerPart:
    stage = "validate" if job.stage == "validation" else job.stage
    function = "fit" if job.training is not None else stage
    return TrainerPart("self.trainer.state", fn=function, stage=stage, status="running")


def loggers(job: Any) -> list[Any]:
    """Those of the config, for what the module itself logs with them."""
    logger = job.arguments.get("logger")
    if logger is None or isinstance(logger, bool):
        return [] if logger is False else [Logger(job)]
    return list(logger) if isinstance(logger, (list, tuple)) else [logger]


def max_epochs(job: Any) -> int:
    number = int(job.user.values.get("num_epochs") or 5)
    return -1 if job.extent.max_steps >= 0 and number >= job.extent.max_steps else number


def stepping_batches(job: Any) -> int:
    epochs = max_epochs(job)
    most = int(job.extent.max_steps)
    if epochs < 0:
        return most
    steps = -(-int(job.loaders.limited("train")) // accumulated(job.user.values)) * epochs
    return steps if most < 0 else min(steps, most)


def unwrapped(loaders: list[Any]) -> Any:
    return loaders[0] if len(loaders) == 1 else loaders


def stoppers(job: Any) -> list[Any]:
    return [callback for callback in job.user.callbacks if stops_early(callback)]


ADVICE = "docs/lightning.md lists what there is"

PRECISION = {key: precision for precision, key in PRECISIONS.items()}

READ: dict[str, Callable[[Any], Any]] = {
    "training": lambda job: job.stage == "train",
    "validating": lambda job: job.stage == "validation",
    "testing": lambda job: job.stage == "test",
    "predicting": lambda job: job.stage == "predict",
    "evaluating": lambda job: job.stage in ("validation", "test"),
    **dict.fromkeys(("world_size", "num_devices"), lambda job: hvdtrain.size()),
    "global_rank": lambda job: hvdtrain.rank(),
    "local_rank": lambda job: place().local_rank,
    "is_global_zero": lambda job: hvdtrain.rank() == 0,
    "max_epochs": max_epochs,
    "max_steps": lambda job: int(job.extent.max_steps),
    "min_epochs": lambda job: job.extent.min_epochs,
    "estimated_stepping_batches": stepping_batches,
    "accumulate_grad_batches": lambda job: accumulated(job.user.values),
    "precision": lambda job: PRECISION[job.user.values.get("mixed_precision")],
    "gradient_clip_val": lambda job: job.clip[0],
    "gradient_clip_algorithm": lambda job: job.clip[1],
    "precision_plugin": lambda job: job.user.of_lightning("plugins.precision").Precision(),
    "num_training_batches": lambda job: job.loaders.limited("train"),
    "num_val_batches": lambda job: [job.loaders.limited("val", index) for index in range(job.loaders.num_val)],
    "is_last_batch": lambda job: job.batch_idx + 1 >= job.loaders.of_epoch(epoch=job.trainer.current_epoch + 1),
    "train_dataloader": lambda job: job.loaders.seen("train")[0],
    "val_dataloaders": lambda job: unwrapped(job.loaders.seen("val")),
    "test_dataloaders": lambda job: unwrapped(job.loaders.seen("test")),
    "datamodule": lambda job: job.user.datamodule,
    **dict.fromkeys(("lightning_module", "model"), lambda job: job.module),
    "callbacks": lambda job: job.user.callbacks,
    "early_stopping_callback": lambda job: next(iter(stoppers(job)), None),
    "early_stopping_callbacks": stoppers,
    "optimizers": lambda job: job.schedules.members,
    "lr_scheduler_configs": lambda job: job.schedules.configs,
    "strategy": strategy,
    "state": state,
    "print": lambda job: job.module.print,
    "save_checkpoint": lambda job: job.save_ckpt,
    "enable_validation": lambda job: job.loaders.num_val > 0,
    "profiler": lambda job: job.user.of_lightning("profilers").PassThroughProfiler(),
    "loggers": loggers,
    "logger": lambda job: next(iter(loggers(job)), None),
    "logged_metrics": lambda job: job.trainer.callback_metrics,
    "should_stop": lambda job: job.stops,
    **dict.fromkeys(("default_root_dir", "log_dir"), lambda job: str(Path(job.user.values["model"]).parent)),
}
"""By attribute, its value of a job."""

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1.0),
    **{"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "log_every_n_steps": 50, "overfit_batches": 0.0, "num_nodes": 1},
    **{"min_steps": None, "reload_dataloaders_every_n_epochs": 0},
}
"""Arguments of the Trainer that modules read, with the values that it uses without them."""


class Trainer:
    sanity_checking = fast_dev_run = barebones = received_sigterm = interrupted = False
    progress_bar_callback = ckpt_path = None
    num_sanity_val_steps = 0

    def __init__(self, job: Any) -> None:
        self._job = job
        self.callback_metrics: dict[str, Any] = {}  # the last value of whatever was logged, by name
        self.current_epoch = 0
        self.global_step = 0

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "should_stop":
            self._job.stops = value
            self._job.stop_if_due()
        elif name in READ or name in DEFAULTS:
            raise refused("self.trainer", f"{name} = {value!r:.60}", ADVICE)
        else:
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in READ:
            return READ[name](self._job)
        if name in DEFAULTS:
            value = self._job.arguments.get(name)
            return DEFAULTS[name] if value is None else value
        raise refused("self.trainer", name, ADVICE)


def refused(owner: str, name: str, advice: str) -> Refused:
    """The error about an attribute that there is not, or that cannot be set."""
    return Refused(
        [Problem.of("unsupported", f"{owner}: expected what hvdtrain has of Lightning's Trainer, got {name!r} ({advice})")]
    )
