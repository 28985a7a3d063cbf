"""What the keys change of the learner for PyTorch."""

from __future__ import annotations

from functools import partial

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.torch.assembly import Assembly
from hvdtrain.learner.torch.device import free_memory, is_out_of_memory
from hvdtrain.plugins.compute.compiled import compile_model
from hvdtrain.plugins.compute.freezing import FrozenUntil
from hvdtrain.plugins.compute.keys import ComputeKeys
from hvdtrain.plugins.compute.recomputed import checkpoint_activations
from hvdtrain.plugins.compute.splitting import BatchSplitter
from hvdtrain.plugins.compute.sync_batch_norm import synchronize
from hvdtrain.runtime import log
from hvdtrain.settings import Settings


def computed_as(settings: Settings, comm: Communicator) -> Extend:
    """Collective, with `sync_batch_norm`."""
    keys = settings.of(ComputeKeys)
    return partial(extend, keys, comm.channel("sync_batch_norm") if keys.sync_batch_norm and comm.size > 1 else None)


def extend(keys: ComputeKeys, channel: Communicator | None, assembly: Assembly) -> None:
    """Raises: ConfigError, if the model cannot be computed so.

    Args:
        channel: the ranks that compute the statistics of BatchNorms together; None: each rank does so alone.
    """
    model = assembly.model
    if channel is not None:
        assembly.batch_norm = synchronize(model, channel)
    if keys.freeze_until_step:
        assembly.freeze = partial(FrozenUntil, keys.freeze_until_step)
    checkpoint_activations(model, keys.checkpoint_modules)
    if keys.torch_compile is not False:
        assembly.watch = compile_model(model, keys.torch_compile)
    if keys.split_on_oom:
        _warn_of_norms(model)
        assembly.splitter = BatchSplitter(is_out_of_memory, partial(free_memory, assembly.device))


def _warn_of_norms(model: torch.nn.Module) -> None:
    norms = [name for name, module in model.named_modules() if isinstance(module, torch.nn.modules.batchnorm._BatchNorm)]
    if norms:
        log.warning(
            f"split_on_oom: in a batch that is split, the statistics of BatchNorm ({', '.join(norms[:3])}) are those of a piece"
        )
