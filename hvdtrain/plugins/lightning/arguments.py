"""The arguments of Lightning's Trainer as keys, and the config of a LightningCLI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError

KEY = "lightning_trainer"

PRECISIONS = {"32": None, "32-true": None, "bf16": "bfloat16", "bf16-mixed": "bfloat16", "16": "float16", "16-mixed": "float16"}

RENAMED = {
    "max_epochs": "num_epochs",
    "accumulate_grad_batches": "accum_grad_multiple_step",
    "callbacks": "lightning_callbacks",
    "deterministic": "deterministic",
}
"""Arguments that are keys of ours, with their values."""

WITHOUT_EFFECT = frozenset(
    {
        "accelerator", "devices", "num_nodes", "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary",
        "enable_autolog_hparams", "enable_model_registry", "log_every_n_steps", "num_sanity_val_steps", "benchmark",
        "inference_mode", "use_distributed_sampler", "plugins", "profiler",
    }
)  # fmt: skip
"""Arguments about how a training is launched, shown or logged, which hvdtrain has other keys for."""

EXTENT = frozenset(
    {
        "limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches",
        "val_check_interval", "max_steps", "min_epochs", "max_time",
    }
)  # fmt: skip
"""Arguments about how much is trained and evaluated."""

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "check_val_every_n_epoch": (
        (1, None),
        "evaluations after every epoch; repeat_epoch and partition_epoch change how long one is",
    ),
    "min_steps": ((None,), "min_epochs"),
    "strategy": (("auto", "ddp", "ddp_spawn", "ddp_find_unused_parameters_true"), "torch_distributed or use_horovod"),
    "sync_batchnorm": ((False,), "a module that torch.nn.SyncBatchNorm.convert_sync_batchnorm has not changed"),
    "reload_dataloaders_every_n_epochs": ((0,), "keys_of_epoch"),
    "detect_anomaly": ((False,), "torch.autograd.set_detect_anomaly in the module"),
    "fast_dev_run": ((False,), "the option --dry-run, which runs a few batches and writes nothing"),
    "barebones": ((False,), "a usual training"),
}
"""Arguments that would change the training: the values that they may have, and what there is instead."""

MANY = 1_000_000
"""Epochs, of a training that ends otherwise."""

CLI_ENTRIES = ("model", "data", "trainer", "seed_everything", "ckpt_path", "verbose", "weights_only")


def keys_of_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from the arguments of a Trainer. Raises: ConfigError, with one that hvdtrain does not serve."""
    keys: dict[str, Any] = {}
    norms: dict[Any, str] = {None: "gradient_clip_global_norm", "norm": "gradient_clip_global_norm", "value": "gradient_clip"}
    for name, value in arguments.items():
        if name in RENAMED:
            keys |= {} if value is None else {RENAMED[name]: value}
        elif name == "gradient_clip_val":
            algorithm = arguments.get("gradient_clip_algorithm")
            if algorithm not in norms:
                raise refuse("gradient_clip_algorithm", "norm or value", algorithm)
            keys |= {norms[algorithm]: float(value)} if value else {}
        elif name == "precision":
            if value is not None and str(value) not in PRECISIONS:
                raise refuse(name, f"one of {', '.join(PRECISIONS)}", value)
            keys |= {"mixed_precision": mixed} if (mixed := PRECISIONS.get(str(value))) else {}
        elif name in EXTENT:
            keys |= _extent(name, value)
        elif name == "default_root_dir":
            keys |= {} if value is None else {"model": f"{value}/model"}
        elif name in REFUSED:
            served_values, instead = REFUSED[name]
            if not any(type(value) in (type(served), int, float) and value == served for served in served_values):
                raise refuse(name, instead, value)
        elif name not in WITHOUT_EFFECT and name != "gradient_clip_algorithm":
            raise refuse(name, "arguments of Lightning's Trainer", name)
    steps: Any = arguments.get("max_steps")
    epochs = arguments.get("max_epochs")
    is_endless = steps in (None, -1)
    if epochs == -1 or (epochs is None and ("time_limit" in keys or not is_endless)):
        keys["num_epochs"] = MANY if is_endless else max(1, steps)  # at least one update in each; the last ends with it
    if (callbacks := keys.get("lightning_callbacks")) is not None:
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        keys["lightning_callbacks"] = [instantiate(callback, "callbacks") for callback in several]
    return keys


def _extent(name: str, value: Any) -> dict[str, Any]:
    """The keys that follow from an argument about how much is trained and evaluated, which `Extent` uses. Raises: ConfigError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        return {}
    if name == "max_time":
        return {"time_limit": _seconds(name, value), "time_limit_margin": 0}
    if name == "val_check_interval" and not is_number:
        return {"eval_interval_minutes": _seconds(name, value) / 60}
    if not is_number or (isinstance(value, float) and not 0 <= value <= 1) or (isinstance(value, int) and value < -1):
        raise refuse(name, "a number of batches, or a share of them from 0.0 to 1.0", value)
    if name == "limit_train_batches" and not value:
        raise refuse(name, "some batches (++task eval evaluates only)", value)
    return {"num_val_loaders": 0} if name == "limit_val_batches" and not value else {}


def _seconds(name: str, value: Any) -> float:
    """A time of Lightning's: a timedelta, its arguments, or DD:HH:MM:SS. Raises: ConfigError."""
    try:
        if isinstance(value, str):
            value = dict(zip(("days", "hours", "minutes", "seconds"), map(int, value.split(":")), strict=True))
        return (timedelta(**value) if isinstance(value, Mapping) else value).total_seconds()
    except (AttributeError, TypeError, ValueError):
        raise refuse(name, "a time as DD:HH:MM:SS, a timedelta or a dict of its arguments", value) from None


class Extent:
    """How many batches are trained and evaluated, and when, by the arguments of a Trainer."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self.overfits = bool(arguments.get("overfit_batches"))
        if self.overfits:
            self._arguments |= dict.fromkeys(("limit_train_batches", "limit_val_batches"), arguments["overfit_batches"])
        self.min_epochs = int(arguments.get("min_epochs") or 0)
        self.max_steps = -1 if arguments.get("max_steps") is None else int(arguments["max_steps"])

    def batches(self, kind: str, number: int) -> int:
        """How many of a loader's batches are used. Raises: ConfigError, if a share of them is none."""
        name = f"limit_{kind}_batches"
        limit = self._arguments.get(name)
        if limit is None:
            return number
        limited = min(number, limit) if isinstance(limit, int) else int(number * limit)
        if limited < 1:
            raise refuse(name, f"a share of at least one of {number} batches", limit)
        return limited

    def batches_in(self, epoch: int, number: int, accumulated: int) -> int:
        """Those of a training epoch, of which max_steps cuts the last one."""
        of_epoch = self.batches("train", number)
        before = (epoch - 1) * -(-of_epoch // accumulated)
        return of_epoch if self.max_steps < 0 else max(1, min(of_epoch, (self.max_steps - before) * accumulated))

    def ends_after(self, updates: int) -> bool:
        return 0 <= self.max_steps <= updates

    def is_evaluated_after(self, number: int, of_epoch: Callable[[], int], step: int) -> bool:
        """Whether an evaluation comes after a batch: its number, from 1, in an epoch of as many; `step`: in the training."""
        interval = self._arguments.get("val_check_interval")
        if not isinstance(interval, (int, float)) or (isinstance(interval, float) and interval == 1):
            return False
        every = interval if isinstance(interval, int) else max(1, int(of_epoch() * interval))
        is_of_all = self._arguments.get("check_val_every_n_epoch", 1) is None
        return (step if is_of_all else number) % every == 0


def refuse(name: str, expected: str, got: Any) -> ConfigError:
    return ConfigError.of("unsupported", f"{KEY}.{name}: expected {expected}, got {got!r}")


def keys_of_cli(file: Path) -> dict[str, Any]:
    """The keys that follow from the config of a LightningCLI. Raises: ConfigError, if it has what only its program knows."""
    yaml = import_module("yaml")  # Lightning needs it

    try:
        config = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError.of("unreadable", f"lightning_module: expected a config of LightningCLI, got {file}: {error}") from error
    config = dict(config.get("fit") or config) if isinstance(config, Mapping) else {}
    if unknown := sorted(name for name, value in config.items() if name not in CLI_ENTRIES and value is not None):
        raise ConfigError.of(
            "unsupported",
            f"{file}: expected model, data, trainer, seed_everything and ckpt_path, got {unknown[0]!r} (build it in the module: "
            "configure_optimizers has the optimizer and its schedulers)",
        )
    arguments = config.get("trainer") or {}
    keys = keys_of_arguments(arguments) | {KEY: arguments}
    for name, key in (("model", "lightning_module"), ("data", "datamodule")):
        if (entry := config.get(name)) is None and name == "data":
            continue
        if not isinstance(entry, Mapping) or "class_path" not in entry:
            raise ConfigError.of(
                "missing",
                f"{file}: expected {name}.class_path, got arguments only, of a class that the CLI's program knows (write {key} = "
                "lambda: YourClass(...) in the config)",
            )
        keys[key] = EntryMaker(entry, name, class_of(entry, name))
    if isinstance(seed := config.get("seed_everything"), int) and not isinstance(seed, bool):
        keys["random_seed"] = seed
    if config.get("ckpt_path") is not None:
        keys["load"] = str(config["ckpt_path"])
    return keys


@dataclass(frozen=True, eq=False)
class EntryMaker:
    """Makes the object of an entry with `class_path`, which is of the class `kind`. Raises: ConfigError."""

    entry: Mapping[str, Any]
    where: str
    kind: Any

    def __call__(self) -> Any:
        return instantiate(self.entry, self.where)


def class_of(entry: Mapping[str, Any], where: str) -> Any:
    module, _, name = str(entry["class_path"]).rpartition(".")
    return as_function(f"{module}:{name}", f"{where}.class_path")


def instantiate(value: Any, where: str) -> Any:
    """The object of an entry with `class_path` and `init_args`, and of those inside it. Raises: ConfigError."""
    if isinstance(value, list):
        return [instantiate(item, where) for item in value]
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {name: instantiate(argument, where) for name, argument in value.items()}
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    return class_of(value, where)(**{name: instantiate(argument, where) for name, argument in arguments.items()})
