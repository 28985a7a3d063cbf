"""The arguments of Lightning's Trainer as keys, and the config of a LightningCLI."""

from __future__ import annotations

from collections.abc import Mapping
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
    "overfit_batches": "overfit_batches",
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

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "limit_train_batches": ((None, 1.0), "a torch.utils.data.Subset, or partition_epoch for shorter epochs"),
    "limit_val_batches": ((None, 1.0), "a torch.utils.data.Subset, or num_val_loaders = 0 for no evaluation"),
    "limit_test_batches": ((None, 1.0), "a torch.utils.data.Subset"),
    "limit_predict_batches": ((None, 1.0), "a torch.utils.data.Subset"),
    "val_check_interval": ((None, 1.0), "eval_interval_steps, which evaluates within epochs, and after them as well"),
    "check_val_every_n_epoch": ((1,), "evaluations after every epoch; repeat_epoch and partition_epoch change how long one is"),
    "max_steps": ((-1,), "num_epochs"),
    "min_epochs": ((None,), "num_epochs"),
    "min_steps": ((None,), "num_epochs"),
    "max_time": ((None,), "time_limit"),
    "strategy": (("auto", "ddp", "ddp_spawn", "ddp_find_unused_parameters_true"), "torch_distributed or use_horovod"),
    "sync_batchnorm": ((False,), "a module that torch.nn.SyncBatchNorm.convert_sync_batchnorm has not changed"),
    "reload_dataloaders_every_n_epochs": ((0,), "keys_of_epoch"),
    "detect_anomaly": ((False,), "torch.autograd.set_detect_anomaly in the module"),
    "fast_dev_run": ((False,), "++dry_run 1"),
    "barebones": ((False,), "a usual training"),
}
"""Arguments that would change the training: the values that they may have, and what there is instead."""


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
        elif name == "default_root_dir":
            found |= {} if value is None else {"model": f"{value}/model"}
        elif name in REFUSED:
            allowed, instead = REFUSED[name]
            if not any(type(value) in (type(one), int, float) and value == one for one in allowed):
                raise refuse(name, instead, value)
        elif name not in WITHOUT_EFFECT and name != "gradient_clip_algorithm":
            raise refuse(name, "arguments of Lightning's Trainer", name)
    if (callbacks := found.get("lightning_callbacks")) is not None:
        several = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        found["lightning_callbacks"] = [made_of(one, "callbacks") for one in several]
    return found


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
    found = keys_of_arguments(given.get("trainer") or {})
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
        self._entry, self._where = entry, where
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
