"""A config-driven trainer for sequence models that scales with Horovod.

A config can call `rank()` and `size()` anywhere, `run_on_main()` and `all_reduce()` in functions that every rank calls, and
`get_run_ctx()` in train_step and forward_step.
"""

from hvdtrain.comm.base import reduce_values as all_reduce
from hvdtrain.comm.base import run_on_main
from hvdtrain.comm.launch import launch as _launch
from hvdtrain.context import get_run_ctx
from hvdtrain.version import __version__

__all__ = ["__version__", "all_reduce", "get_run_ctx", "rank", "run_on_main", "size"]


def rank() -> int:
    """The rank of this process, from 0 to size - 1. Available while the config file runs."""
    return _launch().rank


def size() -> int:
    """The number of processes that the launcher started."""
    return _launch().size
