"""A config-driven trainer for sequence models that scales with Horovod.

What a config imports: `rank()` and `size()` anywhere; `run_on_main()` and `all_reduce()` in functions that every rank calls;
`get_run_ctx()` in train_step.
"""

from hvdtrain.comm.current import reduce_values as all_reduce
from hvdtrain.comm.current import run_on_main
from hvdtrain.comm.launch import launch as _launch
from hvdtrain.context import get_run_ctx
from hvdtrain.version import __version__

__all__ = ["__version__", "all_reduce", "get_run_ctx", "rank", "run_on_main", "size"]


def rank() -> int:
    """This process's number among those that the launcher started, from 0; known while the config runs already."""
    return _launch().rank


def size() -> int:
    """How many processes the launcher started."""
    return _launch().size
