"""The config's model, and which models cannot be trained."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec

import torch

from hvdtrain.config.references import as_function
from hvdtrain.errors import ConfigError
from hvdtrain.learner.frameworks import BuildOptions
from hvdtrain.learner.keys import LearnerKeys
from hvdtrain.learner.torch.state import preload, saved_buffers

WRAPPERS = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
WRAPPED = (
    "get_model: expected the model itself, got it inside a {name}: hvdtrain reduces gradients itself. DataParallel "
    "copies the model to every GPU in every step, and its threads wait for Python's lock; PyTorch advises against it (a process "
    "for each GPU instead: python -m hvdtrain CONFIG ++ngpu 4)"
)

SHARDED = ("FSDPModule", "FullyShardedDataParallel")
"""The names of the module classes of PyTorch's fully_shard and its predecessor. Checked by name, to avoid importing them."""
OF_SHARDS = (
    "get_model: expected a model that is not sharded, got one in which {name} is a module of PyTorch's {kind}: hvdtrain reduces "
    "gradients itself, and in the last steps of an epoch some ranks have no batch (torch_distributed = {{'sharded': True}} "
    "distributes the optimizer's state; docs/parallel.md says what fully_shard would need)"
)


def check_import_order() -> None:
    """Refuse an import order that crashes when the first optimizer is made.

    PyTorch's optimizers import triton if it is installed, as with the CUDA build. triton and TensorFlow both include LLVM, and
    triton's aborts in a process that has TensorFlow's (triton 3.7 and 3.9, TensorFlow 2.21). The other order works.

    Raises:
        ConfigError: TensorFlow is loaded and triton is not yet.
    """
    if "tensorflow" in sys.modules and "triton" not in sys.modules and find_spec("triton"):
        raise ConfigError.of(
            "conflict",
            "backend: expected a process without TensorFlow for 'torch', got one that has imported it: triton, which PyTorch "
            "imports next, would crash (leave TensorFlow out, or begin the program or config with `import triton`)",
        )


def build_model(keys: LearnerKeys, options: BuildOptions, device: torch.device) -> tuple[torch.nn.Module, frozenset[str]]:
    """The config's model on the device, and the names of its constant parameters. Raises: ConfigError, CheckpointError."""
    epoch, step = options.position
    model = as_function(keys.get_model, "get_model")(epoch=epoch, step=step, device=str(device))
    if not isinstance(model, torch.nn.Module):
        raise ConfigError.of("wrong-result", f"get_model: expected it to return a torch.nn.Module, got {type(model).__name__}")
    if isinstance(model, WRAPPERS):
        raise ConfigError.of("wrong-result", WRAPPED.format(name=type(model).__name__))
    lazy = [name for name, tensor in [*model.named_parameters(), *model.named_buffers()] if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        names = ", ".join(lazy)
        raise ConfigError.of(
            "wrong-result",
            f"get_model: expected parameters that have a size, got uninitialized ones: {names} (call lazy modules there once)",
        )
    odd = [f"{name} ({tensor.layout})" for name, tensor in saved_buffers(model) if tensor.layout != torch.strided]
    odd += [f"{name} (meta)" for name, tensor in [*model.named_parameters(), *model.named_buffers()] if tensor.is_meta]
    if odd:
        raise ConfigError.of(
            "wrong-result",
            f"get_model: expected dense tensors with values, got others: {', '.join(odd)} (make a sparse buffer with "
            "persistent=False; to_empty gives memory to what is on meta)",
        )
    for name, module in model.named_modules():
        kinds = {base.__name__ for base in type(module).__mro__}.intersection(SHARDED)
        if kinds:
            raise ConfigError.of("wrong-result", OF_SHARDS.format(name=name or "the model itself", kind=kinds.pop()))
    model.to(device)
    model.train()  # from the first step on, not only after the first evaluation: from_pretrained leaves parts in evaluation mode
    load = partial(preload, model.state_dict(), device)
    constants = frozenset(options.constants(load) if options.constants is not None else [])
    for name, parameter in model.named_parameters():
        if name in constants:
            parameter.requires_grad_(False)
    return model, constants
