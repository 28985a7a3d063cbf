"""A config-driven trainer for sequence models that scales with Horovod.

What a config imports: `get_run_ctx()` inside its functions, `rank()` and `size()` anywhere.
"""

from hvdtrain.comm.launch import launch as _launch
from hvdtrain.context import get_run_ctx
from hvdtrain.version import __version__

__all__ = ["__version__", "get_run_ctx", "rank", "size"]


def rank() -> int:
    """This process's number among those that the launcher started, from 0; known while the config runs already."""
    return _launch().rank


def size() -> int:
    """How many processes the launcher started."""
    return _launch().size
