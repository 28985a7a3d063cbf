"""The arguments of Lightning's Trainer as keys, and the config of a LightningCLI."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

from hvdtrain.config.references import resolve
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


def keys_of_arguments(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that follow from the arguments of a Trainer. Raises: ConfigError, with one that hvdtrain does not serve."""
    found: dict[str, Any] = {}
    norms: dict[Any, str] = {None: "gradient_clip_global_norm", "norm": "gradient_clip_global_norm", "value": "gradient_clip"}
    for name, value in given.items():
        if name in RENAMED:
            found |= {} if value is None else {RENAMED[name]: value}
        elif name == "gradient_clip_val":
            algorithm = given.get("gradient_clip_algorithm")
            if algorithm not in norms:
                raise refuse("gradient_clip_algorithm", "norm or value", algorithm)
            found |= {norms[algorithm]: float(value)} if value else {}
        elif name == "precision":
            if value is not None and str(value) not in PRECISIONS:
                raise refuse(name, f"one of {', '.join(PRECISIONS)}", value)
            found |= {"mixed_precision": mixed} if (mixed := PRECISIONS.get(str(value))) else {}
        elif name in EXTENT:
            found |= _extent(name, value)
        elif name == "default_root_dir":
            found |= {} if value is None else {"model": f"{value}/model"}
        elif name in REFUSED:
            allowed, instead = REFUSED[name]
            if not any(type(value) in (type(one), int, float) and value == one for one in allowed):
                raise refuse(name, instead, value)
        elif name not in WITHOUT_EFFECT and name != "gradient_clip_algorithm":
            raise refuse(name, "arguments of Lightning's Trainer", name)
    steps, epochs = given.get("max_steps"), given.get("max_epochs")
    if epochs == -1 or (epochs is None and found.keys() & {"time_limit"}) or (epochs is None and steps not in (None, -1)):
        found["num_epochs"] = MANY if steps in (None, -1) else max(1, steps)  # at least one update in each; the last ends with it
    if (callbacks := found.get("lightning_callbacks")) is not None:
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        found["lightning_callbacks"] = [made_of(one, "callbacks") for one in several]
    return found


def _extent(name: str, value: Any) -> dict[str, Any]:
    """The keys that follow from an argument about how much is trained and evaluated, which `Extent` uses. Raises: ConfigError."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if value is None:
        return {}
    if name == "max_time" or (name == "val_check_interval" and not is_number):
        seconds = _seconds(name, value)
        return {"eval_interval_minutes": seconds / 60} if name != "max_time" else {"time_limit": seconds, "time_limit_margin": 0}
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
    """How many batches are trained and evaluated, and when.

    Args:
        given: the arguments of a Trainer.
    """

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        overfit = given.get("overfit_batches")
        self.overfits = bool(overfit)
        self._limits = {"train": overfit, "val": overfit} if overfit else {}
        self.min_epochs = int(given.get("min_epochs") or 0)
        self.max_steps = -1 if given.get("max_steps") is None else int(given["max_steps"])

    def batches(self, kind: str, number: int) -> int:
        """How many of a loader's batches are used. Raises: ConfigError, if a share of them is none."""
        name = f"limit_{kind}_batches"
        limit = self._limits.get(kind, self._given.get(name))
        if limit is None:
            return number
        found = min(number, limit) if isinstance(limit, int) else int(number * limit)
        if found < 1:
            raise refuse(name, f"a share of at least one of {number} batches", limit)
        return found

    def batches_in(self, epoch: int, number: int, accumulated: int) -> int:
        """Those of a training epoch, of which max_steps cuts the last one."""
        of_epoch = self.batches("train", number)
        before = (epoch - 1) * -(-of_epoch // accumulated)
        return of_epoch if self.max_steps < 0 else max(1, min(of_epoch, (self.max_steps - before) * accumulated))

    def ends_after(self, updates: int) -> bool:
        """Whether a training has as many updates as it may have."""
        return 0 <= self.max_steps <= updates

    def is_evaluated_after(self, number: int, of_epoch: Callable[[], int], step: int) -> bool:
        """Whether an evaluation comes after a batch, counted from 1.

        Args:
            of_epoch: returns how many there are in the epoch.
            step: the number of the batch in the whole training.
        """
        interval = self._given.get("val_check_interval")
        if not isinstance(interval, (int, float)) or (isinstance(interval, float) and interval == 1):
            return False
        every = interval if isinstance(interval, int) else max(1, int(of_epoch() * interval))
        is_of_all = self._given.get("check_val_every_n_epoch", 1) is None
        return (step if is_of_all else number) % every == 0


def refuse(name: str, expected: str, got: Any) -> ConfigError:
    return ConfigError.of("unsupported", f"{KEY}.{name}: expected {expected}, got {got!r}")


def keys_of_cli(file: Path) -> dict[str, Any]:
    """The keys that follow from the config of a LightningCLI: `model`, `data`, `trainer`, `seed_everything`, `ckpt_path`.

    Raises:
        ConfigError: it cannot be read, or has what only the CLI's program knows.
    """
    yaml = import_module("yaml")  # Lightning needs it

    try:
        given = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError.of("unreadable", f"lightning_module: expected a config of LightningCLI, got {file}: {error}") from error
    given = dict(given.get("fit") or given) if isinstance(given, Mapping) else {}
    if unknown := sorted(name for name, value in given.items() if name not in CLI_ENTRIES and value is not None):
        raise ConfigError.of(
            "unsupported",
            f"{file}: expected model, data, trainer, seed_everything and ckpt_path, got {unknown[0]!r} (build it in the module: "
            "configure_optimizers has the optimizer and its schedulers)",
        )
    found = keys_of_arguments(given.get("trainer") or {}) | {KEY: given.get("trainer") or {}}
    for name, key in (("model", "lightning_module"), ("data", "datamodule")):
        if (one := given.get(name)) is None and name == "data":
            continue
        if not isinstance(one, Mapping) or "class_path" not in one:
            raise ConfigError.of(
                "missing",
                f"{file}: expected {name}.class_path, got arguments only, of a class that the CLI's program knows (write {key} = "
                "lambda: YourClass(...) in the config)",
            )
        found[key] = Maker(one, name)
    if isinstance(seed := given.get("seed_everything"), int) and not isinstance(seed, bool):
        found["random_seed"] = seed
    if given.get("ckpt_path") is not None:
        found["load"] = str(given["ckpt_path"])
    return found


class Maker:
    """Makes the object of an entry with `class_path`. Raises: ConfigError.

    Attributes:
        kind: its class.
    """

    def __init__(self, entry: Mapping[str, Any], where: str) -> None:
        self._entry = entry
        self._where = where
        self.kind = class_of(entry, where)

    def __call__(self) -> Any:
        return made_of(self._entry, self._where)


def class_of(entry: Mapping[str, Any], where: str) -> Any:
    """The class of `class_path`. Raises: ConfigError."""
    module, _, name = str(entry["class_path"]).rpartition(".")
    try:
        return resolve(f"{module}:{name}")
    except (ImportError, ValueError) as error:
        raise ConfigError.of(
            "cannot-import", f"{where}: expected the class of class_path, got {entry['class_path']!r}: {error}"
        ) from error


def made_of(value: Any, where: str) -> Any:
    """The object of an entry with `class_path` and `init_args`, and of those inside it. Raises: ConfigError."""
    if isinstance(value, list):
        return [made_of(one, where) for one in value]
    if not isinstance(value, Mapping):
        return value
    if "class_path" not in value:
        return {name: made_of(one, where) for name, one in value.items()}
    arguments = {**(value.get("init_args") or {}), **(value.get("dict_kwargs") or {})}
    return class_of(value, where)(**{name: made_of(one, where) for name, one in arguments.items()})
