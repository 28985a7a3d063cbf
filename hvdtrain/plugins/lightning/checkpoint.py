"""The .ckpt of Lightning: what hooks add to it, and how it is read and written."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch

import hvdtrain
from hvdtrain.errors import CheckpointError
from hvdtrain.plugins.lightning.user_objects import UserObjects
from hvdtrain.runtime import log


def hook_state(user: UserObjects, trainer: Any, contents: dict[str, Any]) -> dict[str, Any]:
    """What the module, the datamodule and the callbacks add to a checkpoint."""
    contents = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "callbacks": {}, **contents}
    for callback in user.callbacks:
        if state := callback.state_dict():
            contents["callbacks"][callback.state_key] = state
        callback.on_save_checkpoint(trainer, user.module, contents)
    if user.datamodule is not None and (state := user.datamodule.state_dict()):
        contents[type(user.datamodule).__qualname__] = state
    user.module.on_save_checkpoint(contents)
    return contents


def load_hooks(user: UserObjects, trainer: Any, contents: dict[str, Any]) -> None:
    """Give the module, the datamodule and the callbacks what `hook_state` returned."""
    user.module.on_load_checkpoint(contents)
    if user.datamodule is not None and type(user.datamodule).__qualname__ in contents:
        user.datamodule.load_state_dict(contents[type(user.datamodule).__qualname__])
    for callback in user.callbacks:
        callback.on_load_checkpoint(trainer, user.module, contents)
        if callback.state_key in contents.get("callbacks", {}):
            callback.load_state_dict(contents["callbacks"][callback.state_key])


def read_ckpt(path: Path, user: UserObjects, trainer: Any) -> dict[str, Any]:
    """What the key checkpoint_reader returns of a .ckpt, whose optimizer, schedulers and states of hooks are taken over here."""
    try:
        contents: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        load_hooks(user, trainer, contents)
        if trainer.optimizers and contents.get("optimizer_states"):
            for optimizer, state in zip(trainer.optimizers, contents["optimizer_states"], strict=True):
                optimizer.load_state_dict(state)
            for config, state in zip(trainer.lr_scheduler_configs, contents["lr_schedulers"], strict=True):
                config.scheduler.load_state_dict(state)
        model = contents["state_dict"]
    except (KeyError, ValueError, RuntimeError, UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: expected a .ckpt of Lightning's with tensors and plain values, of this module and its optimizer, got "
            f"{type(error).__name__}: {error}"
        ) from error
    trainer.global_step = contents.get("global_step", 0)
    if not user.module.strict_loading:
        present = user.module.state_dict()
        model = {**present, **{name: value for name, value in model.items() if name in present}}
    return {"model": model, **position(path, contents, trainer.accumulate_grad_batches)}


def position(path: Path, contents: Mapping[str, Any], accumulated: int) -> dict[str, int]:
    """The finished epochs and the steps of a training whose .ckpt this is, and the batches that it has done of the next one, if
    each step had as many items as now. Raises: CheckpointError, if it was written between two updates."""
    if not (loop := contents.get("loops", {}).get("fit_loop")):
        epoch = contents.get("finished_epoch", contents.get("epoch", 0))
        return {"epoch": int(epoch), "step": int(contents.get("global_step", 0)) * accumulated}
    batches = loop["epoch_loop.batch_progress"]
    begun, finished = (int(loop["epoch_progress"]["current"][name]) for name in ("ready", "completed"))
    steps = int(batches["total"]["processed"])
    done = int(batches["current"]["processed"])
    if begun == finished:
        return {"epoch": finished, "step": steps}
    if done % accumulated and not batches["is_last_batch"]:
        raise CheckpointError(f"{path}: expected one with whole updates of {accumulated} batches, got one after batch {done}")
    log.info(f"{path} is from within epoch {begun}, which goes on after {done} of its batches on each rank.")
    return {"epoch": finished, "step": steps, "batches": done * hvdtrain.size()}


def write_ckpt(file: Path, user: UserObjects, trainer: Any, finished_epoch: int) -> None:
    """Write what `load_from_checkpoint` reads."""
    contents = {
        "pytorch-lightning_version": import_module(user.lightning.partition(".")[0]).__version__,
        "state_dict": user.module.state_dict(),
        "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
        "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "loops": {},
        "finished_epoch": finished_epoch,
    }
    if user.module.hparams:
        contents |= {"hparams_name": user.module._hparams_name, "hyper_parameters": dict(user.module.hparams)}
    if user.datamodule is not None and user.datamodule.hparams:
        contents["datamodule_hyper_parameters"] = dict(user.datamodule.hparams)
    torch.save(hook_state(user, trainer, contents), file)
