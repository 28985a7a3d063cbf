"""What SpeechBrain's Checkpointer saves: read from its folders, and as texts in hvdtrain's checkpoints."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, Literal

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

USUAL_HOOK = DEFAULT_SAVE_HOOKS[torch.nn.Module]


def hparams_of(brain: Any) -> dict[str, Any]:
    return dict(vars(getattr(brain, "hparams", None) or SimpleNamespace()))


def states_of(brain: Any) -> dict[str, str]:
    """The state of what the Brain's hooks change beside its modules and its optimizer: schedulers, counters, ..."""
    states = {}
    with TemporaryDirectory() as folder, alone():
        path = Path(folder) / "state"
        for name, recoverable in recoverables(brain).items():
            _hook(brain, "save", name, recoverable)(recoverable, path)
            states[name] = b64encode(path.read_bytes()).decode()
            path.unlink()
    return states


def restore(brain: Any, states: Mapping[str, str]) -> None:
    """Give them the state that `states_of` returned."""
    with TemporaryDirectory() as folder, alone():
        path = Path(folder) / "state"
        for name, recoverable in recoverables(brain).items():
            if name in states:
                path.write_bytes(b64decode(states[name]))
                _hook(brain, "load", name, recoverable)(recoverable, path, True)


def attributes_of(brain: Any) -> dict[str, dict[str, Any]]:
    """By name of an object with a state, its numbers and texts: hooks may add some that its file does not have, such as
    the rate of a CyclicLRScheduler."""
    return {
        name: {key: value for key, value in vars(recoverable).items() if isinstance(value, (bool, int, float, str))}
        for name, recoverable in recoverables(brain).items()
        if hasattr(recoverable, "__dict__") and not isinstance(recoverable, torch.nn.Module)
    }


def add_attributes(brain: Any, by_name: Mapping[str, Mapping[str, Any]]) -> None:
    """Give objects the attributes of `attributes_of` that they do not have yet."""
    for name, recoverable in recoverables(brain).items():
        for key, value in by_name.get(name, {}).items():
            if not hasattr(recoverable, key):
                setattr(recoverable, key, value)


def recoverables(brain: Any) -> dict[str, Any]:
    """By name, the objects of the Checkpointer and of the hyperparameters that have a state of their own, and such modules."""
    modules = {id(module) for module in brain.modules.modules()}
    candidates = hparams_of(brain) | getattr(brain.checkpointer, "recoverables", {})
    with_state: dict[str, Any] = modules_with_state(brain)
    for name, value in sorted(candidates.items()):
        is_ours = value is brain or id(value) in modules or isinstance(value, (torch.optim.Optimizer, torch.nn.ModuleList))
        is_usual = get_default_hook(value, DEFAULT_SAVE_HOOKS) is USUAL_HOOK
        is_empty = is_usual and isinstance(value, torch.nn.Module) and not value.state_dict()
        is_left_out = is_ours or is_empty or isinstance(value, type) or any(value is present for present in with_state.values())
        if not is_left_out and _hook(brain, "save", name, value) is not None:
            with_state[name] = value
    return with_state


def modules_with_state(brain: Any) -> dict[str, Any]:
    """By name, the modules whose state is not among their tensors, such as InputNormalization's."""
    return {
        name: module
        for name, module in sorted(brain.modules.named_modules())
        if name and get_default_hook(module, DEFAULT_SAVE_HOOKS) is not USUAL_HOOK
    }


def _hook(brain: Any, action: Literal["save", "load"], name: str, recoverable: Any) -> Any:
    """The function that saves or loads an object; None: it has no state."""
    custom = getattr(brain.checkpointer, f"custom_{action}_hooks", {}).get(name)
    return custom or get_default_hook(recoverable, DEFAULT_SAVE_HOOKS if action == "save" else DEFAULT_LOAD_HOOKS)


def load_from(folder: Path, brain: Any) -> dict[str, Any]:
    """Load a Brain from a folder of the Checkpointer's, or from the newest of several in it: its modules, and its optimizer,
    schedulers and counters where they have a file. Returns the tensors by name, the epoch if there is a counter, the
    steps, and the batches of the next epoch that are done: 0 at the end of an epoch, None if they are not known. Raises:
    CheckpointError, if a module has no file, or a file is of another one."""
    inside = [path for path in folder.glob("CKPT+*") if path.is_dir()]
    folder = max(inside, key=lambda path: path.stat().st_mtime) if inside else folder
    modules = dict(brain.modules)
    candidates = {"optimizer": getattr(brain, "optimizer", None), **getattr(brain.checkpointer, "recoverables", {})}
    optimizers = {name: value for name, value in candidates.items() if isinstance(value, torch.optim.Optimizer)}
    whole = folder / f"model{PARAMFILE_EXT}"  # the usual name of a ModuleList of all modules
    with_tensors = [name for name, module in modules.items() if module.state_dict()]
    missing = [name for name in with_tensors if not (folder / f"{name}{PARAMFILE_EXT}").exists()]
    if missing and not whole.exists():
        raise CheckpointError(f"{folder}: expected a file {missing[0]}{PARAMFILE_EXT}, got none")
    described = folder / METAFNAME
    is_whole_epoch = "end-of-epoch: false" not in (described.read_text(encoding="utf-8") if described.exists() else "")
    if missing:
        _load_whole(whole, modules)
        modules = {}
    for name, recoverable in {**modules, **recoverables(brain), **optimizers}.items():
        if (path := folder / f"{name}{PARAMFILE_EXT}").exists():
            try:
                _hook(brain, "load", name, recoverable)(recoverable, path, is_whole_epoch)
            except (KeyError, RuntimeError, ValueError) as error:
                raise CheckpointError(f"{path}: expected the {name} of this Brain, got another: {error}") from error
    epoch = getattr(hparams_of(brain).get("epoch_counter"), "current", None)
    contents = {"model": brain.modules.state_dict(), "epoch": epoch, "batches": 0}
    if not is_whole_epoch:
        position = folder / f"dataloader-TRAIN{PARAMFILE_EXT}"
        text = position.read_text(encoding="utf-8") if position.exists() else "None"
        contents |= {"batches": int(text), "step": int(text)} if text.isdigit() else {"batches": None}
    if (file := folder / f"brain{PARAMFILE_EXT}").exists():
        updates = re.search(r"optimizer_step: (\d+)", file.read_text(encoding="utf-8"))
        contents |= {} if updates is None else {"step": int(updates[1]) * brain.grad_accumulation_factor}
    return contents


def _load_whole(path: Path, modules: Mapping[str, Any]) -> None:
    """Load the file of a ModuleList with modules, in their order."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    several = torch.nn.ModuleList([module for module in modules.values() if module.state_dict()])
    if several.state_dict().keys() != state.keys():
        raise CheckpointError(f"{path}: expected the tensors of {', '.join(modules)}, in this order, got others")
    several.load_state_dict(state)
