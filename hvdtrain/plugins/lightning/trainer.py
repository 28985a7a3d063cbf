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
from hvdtrain.plugins.lightning.given import stops_early
from hvdtrain.plugins.lightning.loaders import accumulated


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
    """The tensors of all ranks, without gradients on several ranks.

    Raises:
        ConfigError: gradients are wanted there, or a rank has no batch in a step, and so would not take part in one.
    """
    if hvdtrain.size() == 1:
        return data
    if sync_grads:
        raise ConfigError.of("unsupported", "all_gather: expected sync_grads = False on several ranks, got True")
    kind = {"train": "train", "validation": "val"}.get(job.stage, "test")
    if job.logged.place is not None and job.stage != "predict" and not job.loaders.are_even(kind, job.logged.place):
        raise ConfigError.of(
            "unsupported",
            f"all_gather: expected a batch on each rank in all steps of {kind}_dataloader, got fewer in the last one (leave "
            f"them out by limit_{kind}_batches in lightning_trainer, or call it in on_{job.stage}_epoch_end)",
        )
    return torch.stack(hvdtrain.all_gather(data.detach().cpu(), name="lightning_all_gather")).to(data.device)


class Part:
    """A part of the Trainer's, with what modules and callbacks use of it.

    Args:
        name: what error messages call it.
    """

    def __init__(self, name: str, **attributes: Any) -> None:
        vars(self).update(attributes, _name=name)

    def __getattr__(self, name: str) -> Any:
        raise refused(self._name, name, ADVICE)

    def __setattr__(self, name: str, value: Any) -> None:
        raise refused(self._name, f"{name} = {value!r:.60}", ADVICE)


def strategy(job: Any) -> Part:
    return Part(
        "self.trainer.strategy",
        root_device=job.module.device,
        **dict.fromkeys(("model", "lightning_module"), job.module),
        is_global_zero=hvdtrain.rank() == 0,
        _lightning_optimizers=job.manual.stepped if job.manual else job.optimizers,
        **({"backward": job.manual.backward, "optimizer_step": job.manual.optimizer_step} if job.manual else {}),
        all_gather=partial(gather, job),
        barrier=lambda *_: hvdtrain.all_gather(None) and None,
        broadcast=lambda value, src=0: hvdtrain.all_gather(value)[src],
        reduce_boolean_decision=lambda value, all=True: (min if all else max)(hvdtrain.all_gather(bool(value))),
    )


def state(job: Any) -> Part:
    stage = "validate" if job.stage == "validation" else job.stage
    function = "fit" if job.training is not None else stage
    return Part("self.trainer.state", fn=function, stage=stage, status="running")


def loggers(job: Any) -> list[Any]:
    """Those of the config, for what the module itself logs with them."""
    given = job.arguments.get("logger")
    if given is None or isinstance(given, bool):
        return [] if given is False else [Logger(job)]
    return list(given) if isinstance(given, (list, tuple)) else [given]


def max_epochs(job: Any) -> int:
    number = int(job.given.values.get("num_epochs") or 5)
    return -1 if job.extent.max_steps >= 0 and number >= job.extent.max_steps else number


def stepping_batches(job: Any) -> int:
    epochs, most = max_epochs(job), int(job.extent.max_steps)
    if epochs < 0:
        return most
    steps = -(-int(job.loaders.num_batches) // accumulated(job.given.values)) * epochs
    return steps if most < 0 else min(steps, most)


def only(loaders: list[Any]) -> Any:
    return loaders[0] if len(loaders) == 1 else loaders


def stoppers(job: Any) -> list[Any]:
    return [one for one in job.given.callbacks if stops_early(one)]


ADVICE = "docs/lightning.md lists what there is"

PRECISION = {None: "32-true", "bfloat16": "bf16-mixed", "float16": "16-mixed"}

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
    "accumulate_grad_batches": lambda job: accumulated(job.given.values),
    "precision": lambda job: PRECISION[job.given.values.get("mixed_precision")],
    "gradient_clip_val": lambda job: job.clip[0],
    "gradient_clip_algorithm": lambda job: job.clip[1],
    "precision_plugin": lambda job: job.given.of_lightning("plugins.precision").Precision(),
    "num_training_batches": lambda job: job.loaders.num_batches,
    "num_val_batches": lambda job: [job.loaders.limited("val", place) for place in range(job.loaders.num_val)],
    "is_last_batch": lambda job: job.batch_idx + 1 >= job.loaders.of_epoch(epoch=job.trainer.current_epoch + 1),
    "train_dataloader": lambda job: job.loaders.seen("train")[0],
    "val_dataloaders": lambda job: only(job.loaders.seen("val")),
    "test_dataloaders": lambda job: only(job.loaders.seen("test")),
    "datamodule": lambda job: job.given.datamodule,
    **dict.fromkeys(("lightning_module", "model"), lambda job: job.module),
    "callbacks": lambda job: job.given.callbacks,
    "early_stopping_callback": lambda job: next(iter(stoppers(job)), None),
    "early_stopping_callbacks": stoppers,
    "optimizers": lambda job: job.optimizers,
    "lr_scheduler_configs": lambda job: job.schedules.configs,
    "strategy": strategy,
    "state": state,
    "print": lambda job: job.module.print,
    "save_checkpoint": lambda job: job.save_ckpt,
    "enable_validation": lambda job: job.loaders.num_val > 0,
    "profiler": lambda job: job.given.of_lightning("profilers").PassThroughProfiler(),
    "loggers": loggers,
    "logger": lambda job: next(iter(loggers(job)), None),
    "logged_metrics": lambda job: job.trainer.callback_metrics,
    "should_stop": lambda job: job.stops,
    **dict.fromkeys(("default_root_dir", "log_dir"), lambda job: str(Path(job.given.values["model"]).parent)),
}
"""By attribute, its value of a job."""

DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches"), 1.0),
    **{"val_check_interval": 1.0, "check_val_every_n_epoch": 1, "log_every_n_steps": 50, "overfit_batches": 0.0, "num_nodes": 1},
    **{"min_steps": None, "reload_dataloaders_every_n_epochs": 0},
}
"""Arguments of the Trainer that modules read, with the values that it uses without them."""


class Trainer:
    """Attributes:
    callback_metrics: the last value of whatever was logged, by name.
    """

    sanity_checking = fast_dev_run = barebones = received_sigterm = interrupted = False
    progress_bar_callback = ckpt_path = None
    num_sanity_val_steps = 0

    def __init__(self, job: Any) -> None:
        self._job = job
        self.callback_metrics: dict[str, Any] = {}
        self.current_epoch = self.global_step = 0

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


def refused(what: str, name: str, advice: str) -> Refused:
    """The error about an attribute that there is not, or that cannot be set."""
    return Refused(
        [Problem.of("unsupported", f"{what}: expected what hvdtrain has of Lightning's Trainer, got {name!r} ({advice})")]
    )
