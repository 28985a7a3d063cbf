"""The parameters of a pretrained model that are not trained, which checkpoints can leave out."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hvdtrain.comm.base import Communicator
from hvdtrain.errors import CheckpointError, ConfigError, first_few
from hvdtrain.learner.contents import BASE
from hvdtrain.learner.frameworks import Extend
from hvdtrain.learner.torch.assembly import Assembly
from hvdtrain.plugins.frozen_base import FrozenBaseKeys
from hvdtrain.runtime import log
from hvdtrain.settings import Settings


def with_base(settings: Settings, comm: Communicator) -> Extend:
    """Of the table `learner_extensions`: what checkpoints leave out, as the key `save_parameters` says."""
    leaves_out = settings.of(FrozenBaseKeys).save_parameters == "trained"

    def extend(assembly: Assembly) -> None:
        assembly.make_base = partial(FrozenBase, assembly.model, assembly.constants, leaves_out)

    return extend


class FrozenBase:
    """The frozen parameters, as get_model returned them. Whoever loads a file without them must have the same ones.

    Args:
        model: in which the parameters that are to be saved have `requires_grad`.
        constants: the names of frozen parameters that are not saved in any case.
        leaves_out: whether the model's file is without them.
    """

    def __init__(self, model: torch.nn.Module, constants: Collection[str], leaves_out: bool) -> None:
        self._model = model
        self._constants = constants
        self.names: frozenset[str] = frozenset()
        self.entry: dict[str, Any] | None = None
        self._named: dict[str, torch.nn.Parameter] = {}
        self._sums: list[int] = []
        if not leaves_out:
            return
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and name not in constants
        }
        same = {id(parameter) for parameter in self._named.values()}
        aliases = model.named_parameters(remove_duplicate=False)
        self.names = frozenset(name for name, parameter in aliases if id(parameter) in same)
        self._sums = checksums(self._named.values())
        self.entry = entry_of(model, self._named)
        total = sum(parameter.numel() for parameter in model.parameters())
        count = total - self.entry["parameters"]
        log.info(
            f"save_parameters: the model's file has {count:,} of {total:,} parameters; the others are of "
            f"{describe_base(self.entry)}"
        )

    def check(self) -> None:
        if self._sums != (now := checksums(self._named.values())):
            pairs = zip(self._named, self._sums, now, strict=True)
            changed = [name for name, before, after in pairs if before != after]
            raise ConfigError.of(
                "wrong-result",
                "save_parameters: expected frozen parameters with the values from get_model, which 'trained' does not save, got "
                f"others in {first_few(changed, 3)} (load them in "
                "get_model, or by preload_from_files with init_for_train = 'always'; or save_parameters = 'all')",
            )

    def left_out(self, stored: dict[str, Any], tensors: Mapping[str, Any], file: Path) -> dict[str, torch.Tensor]:
        entry = stored.pop(BASE, None)
        missing = (
            {name for name, _ in self._model.named_parameters(remove_duplicate=False)} - tensors.keys() - set(self._constants)
        )
        if entry is None:
            if missing and self.entry is not None:
                raise CheckpointError(
                    f"{file}: expected all parameters, or the hash of a base model, got neither "
                    f"{', '.join(sorted(missing)[:5])} nor that"
                )
            return {}
        named = {name: parameter for name, parameter in self._model.named_parameters() if name in missing}
        is_all_of_it = self.entry is not None and named.keys() == self._named.keys()  # then no bytes are read again
        here = self.entry if is_all_of_it and self.entry is not None else entry_of(self._model, named)
        if not isinstance(entry, dict) or here["sha256"] != entry.get("sha256"):
            raise CheckpointError(
                f"{file}: expected the base model that its parameters were trained with ({describe_base(entry)}), got "
                f"{describe_base(here)} from get_model (the file has trained parameters only, by "
                "save_parameters = 'trained': get_model has to return the same pretrained model in every start)"
            )
        present = self._model.state_dict()
        return {name: present[name] for name in missing}


def entry_of(model: torch.nn.Module, named: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The entry for a file of a model, without some of its parameters."""
    count = sum(parameter.numel() for parameter in named.values())
    return {"sha256": fingerprint(named), "parameters": count, "class": type(model).__name__}


def describe_base(entry: Any) -> str:
    """A base in words.

    >>> describe_base({"sha256": "0123456789abcdef", "parameters": 37954, "class": "Bert"})
    'Bert with 37,954 frozen parameters, SHA-256 0123456789...'
    """
    try:
        return f"{entry['class']} with {entry['parameters']:,} frozen parameters, SHA-256 {entry['sha256'][:10]}..."
    except (TypeError, KeyError, ValueError):
        return f"{entry!r}"


def checksums(tensors: Iterable[torch.Tensor]) -> list[int]:
    """A sum over the bits of each tensor, which is fast on any device. The same bits have the same sum."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for tensor in tensors:
        real = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
        sums.append(real.contiguous().view(kinds[real.element_size()]).sum(dtype=torch.int64))
    return torch.stack(sums).tolist() if sums else []


def fingerprint(named: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 of tensors: of their names, types, shapes and values."""
    digest = hashlib.sha256()
    for name, tensor in named.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.detach().contiguous().flatten()
        if flat.numel():
            digest.update(flat.view(torch.uint8).cpu().numpy())  # type: ignore[arg-type]  # an array is a buffer
    return digest.hexdigest()
