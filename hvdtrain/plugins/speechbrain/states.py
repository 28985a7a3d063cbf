"""What SpeechBrain's Checkpointer saves: read from its folders, and as texts in hvdtrain's checkpoints."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_SAVE_HOOKS,
    METAFNAME,
    PARAMFILE_EXT,
    get_default_hook,
)

from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.speechbrain.ranks import alone


def states_of(brain: Any) -> dict[str, str]:
    """The state of what the Brain's hooks change beside its modules and its optimizer: schedulers, counters, ..."""
    found = {}
    with TemporaryDirectory() as folder, alone():
        for name, one in recoverables(brain).items():
            path = Path(folder) / "state"
            (_custom(brain, "custom_save_hooks", name) or get_default_hook(one, DEFAULT_SAVE_HOOKS))(one, path)
            found[name] = b64encode(path.read_bytes()).decode()
            path.unlink()
    return found


def restore(brain: Any, states: Mapping[str, str]) -> None:
    """Give them the state that `states_of` returned."""
    with TemporaryDirectory() as folder, alone():
        for name, one in recoverables(brain).items():
            if name in states:
                path = Path(folder) / "state"
                path.write_bytes(b64decode(states[name]))
                (_custom(brain, "custom_load_hooks", name) or get_default_hook(one, DEFAULT_LOAD_HOOKS))(one, path, True)


def attributes_of(brain: Any) -> dict[str, dict[str, Any]]:
    """By name of an object with a state, its numbers and texts: hooks may add some that its file does not have, such as
    the rate of a CyclicLRScheduler."""
    return {
        name: {key: value for key, value in vars(one).items() if isinstance(value, (bool, int, float, str))}
        for name, one in recoverables(brain).items()
        if hasattr(one, "__dict__") and not isinstance(one, torch.nn.Module)
    }


def add_attributes(brain: Any, found: Mapping[str, Mapping[str, Any]]) -> None:
    """Give objects the attributes of `attributes_of` that they do not have yet."""
    for name, one in recoverables(brain).items():
        for key, value in found.get(name, {}).items():
            if not hasattr(one, key):
                setattr(one, key, value)


def recoverables(brain: Any) -> dict[str, Any]:
    """By name, the objects of the Checkpointer and of the hyperparameters that have a state of their own, and such modules."""
    modules = {id(one) for one in brain.modules.modules()}
    named = dict(vars(getattr(brain, "hparams", None) or object) if hasattr(brain, "hparams") else {})
    named |= getattr(brain.checkpointer, "recoverables", {})
    found: dict[str, Any] = own_states(brain)
    for name, one in sorted(named.items()):
        hook = get_default_hook(one, DEFAULT_SAVE_HOOKS)
        is_ours = one is brain or id(one) in modules or isinstance(one, (torch.optim.Optimizer, torch.nn.ModuleList))
        is_empty = hook is DEFAULT_SAVE_HOOKS[torch.nn.Module] and isinstance(one, torch.nn.Module) and not one.state_dict()
        is_known = hook is not None or _custom(brain, "custom_save_hooks", name) is not None
        is_left_out = is_ours or is_empty or isinstance(one, type) or any(one is other for other in found.values())
        if is_known and not is_left_out:
            found[name] = one
    return found


def own_states(brain: Any) -> dict[str, Any]:
    """By name, the modules whose state is not among their tensors, such as InputNormalization's."""
    usual = DEFAULT_SAVE_HOOKS[torch.nn.Module]
    return {
        name: one
        for name, one in sorted(brain.modules.named_modules())
        if name and get_default_hook(one, DEFAULT_SAVE_HOOKS) is not usual
    }


def _custom(brain: Any, kind: str, name: str) -> Any:
    return getattr(brain.checkpointer, kind, {}).get(name)


def load_from(folder: Path, brain: Any) -> dict[str, Any]:
    """Load a Brain from a folder of the Checkpointer's, or from the newest of several in it: its modules, and its optimizer,
    schedulers and counters where they have a file. Returns the tensors by name, the epoch if there is a counter, the
    steps, and the batches of the next epoch that are done: 0 at the end of an epoch, None if they are not known.

    Raises:
        CheckpointError: there is none, a module has no file, or a file is of another one.
    """
    inside = [path for path in folder.glob("CKPT+*") if path.is_dir()]
    folder = max(inside, key=lambda path: path.stat().st_mtime) if inside else folder
    modules, others = dict(brain.modules), recoverables(brain)
    named = {"optimizer": getattr(brain, "optimizer", None), **getattr(brain.checkpointer, "recoverables", {})}
    others |= {name: one for name, one in named.items() if isinstance(one, torch.optim.Optimizer)}
    whole = folder / f"model{PARAMFILE_EXT}"  # the usual name of a ModuleList of all modules
    missing = [name for name, one in modules.items() if one.state_dict() and not (folder / f"{name}{PARAMFILE_EXT}").exists()]
    if missing and not whole.exists():
        raise CheckpointError(f"{folder}: expected a file {missing[0]}{PARAMFILE_EXT}, got none")
    described = folder / METAFNAME
    is_whole_epoch = "end-of-epoch: false" not in (described.read_text(encoding="utf-8") if described.exists() else "")
    if missing:
        _load_whole(whole, modules)
        modules = {}
    for name, one in {**modules, **others}.items():
        if (path := folder / f"{name}{PARAMFILE_EXT}").exists():
            load = _custom(brain, "custom_load_hooks", name) or get_default_hook(one, DEFAULT_LOAD_HOOKS)
            try:
                load(one, path, is_whole_epoch)
            except (KeyError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"{path}: expected the {name} of this Brain, got another: {error}") from error
    counter = getattr(getattr(brain, "hparams", None), "epoch_counter", None)
    found = {"model": brain.modules.state_dict(), "epoch": getattr(counter, "current", None), "batches": 0}
    if not is_whole_epoch:
        position = folder / f"dataloader-TRAIN{PARAMFILE_EXT}"
        text = position.read_text(encoding="utf-8") if position.exists() else "None"
        found |= {"batches": int(text), "step": int(text)} if text.isdigit() else {"batches": None}
    if (file := folder / f"brain{PARAMFILE_EXT}").exists():
        updates = re.search(r"optimizer_step: (\d+)", file.read_text(encoding="utf-8"))
        found |= {} if updates is None else {"step": int(updates[1]) * brain.grad_accumulation_factor}
    return found


def _load_whole(path: Path, modules: Mapping[str, Any]) -> None:
    """Load the file of a ModuleList with modules, in their order. Raises: CheckpointError."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    several = torch.nn.ModuleList([one for one in modules.values() if list(one.state_dict())])
    if several.state_dict().keys() != state.keys():
        raise CheckpointError(f"{path}: expected the tensors of {', '.join(modules)}, in this order, got others")
    several.load_state_dict(state)
