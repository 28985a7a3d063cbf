"""The Trainer's order of the items, and its folders `checkpoint-N`: a training goes on from them as there."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers.trainer_pt_utils import get_length_grouped_indices

from hvdtrain.data.types import Array
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.plugins.other_trainer.trainer import fixed_number
from hvdtrain.plugins.transformers.arguments import KEY, Arguments

STATE = "trainer_state.json"
OPTIMIZER = "optimizer.pt"
SCHEDULER = "scheduler.pt"
SCALER = "scaler.pt"
WHOLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
PICKLED = "pytorch_model.bin"

ROUNDED = 1e-6
"""The share of an epoch by which a file's number may differ."""


class Order:
    """The key seq_ordering: the Trainer's order of each epoch.

    Args:
        strategy: random, or group_by_length.
        items: the training data.
        column: the entry of an item whose length counts, unless there is a column of lengths.
        in_update: the number of items in an update, which are about equally long.
    """

    def __init__(self, strategy: str, items: Any, args: Arguments, seed: int, column: str, in_update: int) -> None:
        self._items = items
        self._seed = seed
        self._column = column
        self._in_update = in_update
        self._lengths = self._find_lengths(args.length_column_name) if strategy == "group_by_length" else None
        self._last: tuple[int, Array] | None = None

    def _find_lengths(self, name: str) -> list[int]:
        if name in getattr(self._items, "column_names", ()):
            return list(self._items[name])
        if not isinstance(self._items[0], Mapping) or self._column not in self._items[0]:
            raise ConfigError.of(
                "wrong-result", f"{KEY}.train_dataset: expected items with {self._column!r} for group_by_length, got others"
            )
        return [len(item[self._column]) for item in self._items]

    def __call__(self, *, epoch: int, **_: Any) -> Array:
        if self._last is None or self._last[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch - 1)
            if self._lengths is None:
                order: Any = torch.randperm(len(self._items), generator=generator)
            else:
                order = torch.tensor(get_length_grouped_indices(self._lengths, self._in_update, generator=generator))
            self._last = epoch, order.numpy()
        return self._last[1]


class CheckpointReader:
    """The key checkpoint_reader. Raises: CheckpointError.

    Args:
        model: returns the model that is trained.
        keys: the config's, with those that follow from the arguments.
        num_items: of the training data; None: there is none.
    """

    def __init__(
        self, model: Callable[[], Any], args: Arguments, keys: Mapping[str, Any], num_items: int | None, size: int
    ) -> None:
        self._model = model
        self._args = args
        self._keys = keys
        self._num_items = num_items
        self._size = size

    def __call__(self, path: Path) -> dict[str, Any] | None:
        if not path.is_dir():
            return None
        inside = [folder for folder in path.glob("checkpoint-*") if (folder / STATE).exists()]
        path = max(inside, key=lambda folder: int(folder.name.rpartition("-")[2])) if inside else path
        model = self._model()
        _load_weights(model, path)
        contents: dict[str, Any] = {"model": model.state_dict()}
        if (path / STATE).exists():
            progress, problem = self._progress(path, json.loads((path / STATE).read_text(encoding="utf-8")))
            contents |= {"optimizer": lambda: self._optimizer(path, problem), **progress}
        return contents

    def _optimizer(self, path: Path, problem: str | None) -> dict[str, Any]:
        """What a training goes on with. Raises: CheckpointError, if it would not go on as the Trainer does."""
        if missing := [name for name in (OPTIMIZER, SCHEDULER) if not (path / name).exists()]:
            problem = f"{OPTIMIZER} and {SCHEDULER}, got no {missing[0]} (saved with save_only_model, or by DeepSpeed or FSDP)"
        elif problem is None:
            rates = torch.load(path / SCHEDULER, map_location="cpu", weights_only=True).get("base_lrs", [])
            rate = float(self._keys["learning_rate"])
            if self._keys.get("learning_rate_schedule") is None and any(not math.isclose(base, rate) for base in rates):
                problem = f"the learning_rate of {SCHEDULER}, {rates[0]}, with which the Trainer goes on, got {rate}"
        if problem is not None:
            raise CheckpointError(f"{path}: expected {problem}; ++fresh_optimizer 1 goes on after the last finished epoch")
        contents = {"optimizer": torch.load(path / OPTIMIZER, map_location="cpu", weights_only=True)}
        if (path / SCALER).exists() and (scale := torch.load(path / SCALER, map_location="cpu", weights_only=True)):
            contents["loss_scale"] = {"scale": scale["scale"], "good": scale["_growth_tracker"]}
        return contents

    def _progress(self, path: Path, state: Mapping[str, Any]) -> tuple[dict[str, int], str | None]:
        """The finished epochs, and the batches that are done of the next one; and why these are not known."""
        step = int(state["global_step"])
        epoch = float(state["epoch"])
        accumulated = fixed_number(KEY, self._keys, "accum_grad_multiple_step")
        finished = round(epoch) if abs(epoch - round(epoch)) < ROUNDED else int(epoch)
        whole_epochs = {"epoch": finished, "step": step * accumulated}
        if epoch - finished < ROUNDED or self._num_items is None:
            return whole_epochs, None
        processes = len(list(path.glob("rng_state*.pth"))) or 1
        in_batch = int(state["train_batch_size"])
        steps = math.ceil(math.ceil(self._num_items / in_batch) / processes)  # of each process, in an epoch
        done = round((epoch - finished) * steps)
        items = done * processes * in_batch
        is_same = (
            abs(epoch - finished - done / steps) < ROUNDED and step == finished * -(-steps // accumulated) + done / accumulated
        )
        if self._args.train_sampling_strategy == "group_by_length":
            return whole_epochs, "the end of an epoch, got one within an epoch (the order of group_by_length is not known)"
        if not is_same or items % self._per_rank or self._keys.get("batch_size") is not None:
            got = f"epoch {epoch:.4g} after {step} updates of {in_batch} items a batch"
            return whole_epochs, f"the batches and updates of this config, got {got}"
        return {"epoch": finished, "step": finished * steps + done, "batches": items // self._per_rank}, None

    @property
    def _per_rank(self) -> int:
        total = self._keys.get("max_seqs_total")
        return int(self._keys["max_seqs"]) if total is None else max(1, int(total) // self._size)


def _load_weights(model: Any, path: Path) -> None:
    if (path / ADAPTER).exists() and hasattr(model, "load_adapter"):
        model.load_adapter(str(path), model.active_adapter, is_trainable=True)
        return
    index = path / f"{WHOLE}.index.json"
    files: Sequence[Path] = [path / WHOLE]
    if index.exists():
        files = [path / name for name in sorted({*json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})]
    if not files[0].exists() and (path / PICKLED).exists():
        tensors = torch.load(path / PICKLED, map_location="cpu", weights_only=True)
    else:
        if missing := [file.name for file in files if not file.exists()]:
            raise CheckpointError(
                f"{path}: expected a checkpoint of transformers' Trainer, or what save_pretrained writes, got no {missing[0]}"
            )
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    present = model.state_dict()
    tied = {present[name].data_ptr() for name in tensors if name in present}
    wrong = [name for name in tensors if name not in present or tensors[name].shape != present[name].shape]
    wrong += [name for name in present if name not in tensors and present[name].data_ptr() not in tied]
    if wrong:
        raise CheckpointError(f"{path}: expected the parameters of this config's model, got others: {', '.join(wrong[:5])}")
    model.load_state_dict(tensors, strict=False)
