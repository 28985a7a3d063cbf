"""A config-driven trainer for sequence models that scales with Horovod.

A config can call `rank()` and `size()` anywhere, `run_on_main()`, `all_reduce()` and `all_gather()` in functions that every rank
calls, and `get_run_ctx()` in train_step and forward_step. Other programs call `train`, `evaluate`, `forward` and `load_model`.
"""

import sys

try:
    from typing import TYPE_CHECKING, Any

    from hvdtrain.comm.for_configs import gather_values as all_gather
    from hvdtrain.comm.for_configs import run_on_main
    from hvdtrain.comm.this_process import place as _place
    from hvdtrain.context import get_run_ctx
    from hvdtrain.errors import BrokenSequence, ConfigError, HvdtrainError
    from hvdtrain.version import __version__
except KeyboardInterrupt:
    if sys.argv[:1] != ["-m"]:
        raise
    sys.exit(130)  # `python -m hvdtrain` imports this before __main__.py, and ends as that does

if TYPE_CHECKING:
    from hvdtrain.config.plugins import Plugin
    from hvdtrain.plugins.other_trainer.trainer import OtherTrainer
    from hvdtrain.plugins.programs.api import Average, Best, Result, evaluate, forward, load_model, train
    from hvdtrain.plugins.reductions.values import reduce_values as all_reduce
    from hvdtrain.plugins.transformers.pretrained import SavePretrained

__all__ = [
    "Average", "Best", "BrokenSequence", "ConfigError", "HvdtrainError", "OtherTrainer", "Plugin", "Result", "SavePretrained",
    "__version__", "all_gather", "all_reduce", "evaluate", "forward", "get_run_ctx", "load_model", "rank",
    "run_on_main", "size", "train",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Plug-ins' names are looked up on first access: most configs do not need them, and some import nearly all of hvdtrain."""
    from hvdtrain.config.absent import absent
    from hvdtrain.config.plugins import NAMES, Plugin

    if name == "Plugin":
        return Plugin
    if name.startswith("_") or name not in NAMES:
        raise AttributeError(f"module 'hvdtrain' has no attribute {name!r}{absent(name)}")
    return NAMES[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def rank() -> int:
    """The rank of this process, from 0 to size - 1. Available while the config file runs."""
    return _place().rank


def size() -> int:
    """The number of processes that the launcher started."""
    return _place().size
