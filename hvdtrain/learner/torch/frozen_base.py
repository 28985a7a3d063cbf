"""The parameters of a pretrained model that are not trained, which checkpoints can leave out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from hvdtrain.errors import ConfigError, first_few


class FrozenBase:
    """The frozen parameters, as get_model returned them. Whoever loads a file without them must have the same ones.

    Args:
        model: in which the parameters that are to be saved have `requires_grad`.
        constants: the names of frozen parameters that are not saved in any case.
    """

    def __init__(self, model: torch.nn.Module, constants: Iterable[str]) -> None:
        left_out = set(constants)
        self._named = {
            name: parameter
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad and name not in left_out
        }
        same = {id(parameter) for parameter in self._named.values()}
        aliases = model.named_parameters(remove_duplicate=False)
        self.names = frozenset(name for name, parameter in aliases if id(parameter) in same)
        self._sums = checksums(self._named.values())
        self.entry = entry_of(model, self._named)
        total = sum(parameter.numel() for parameter in model.parameters())
        self.description = f"{total - self.entry['parameters']:,} of {total:,} parameters"

    def check(self) -> None:
        """Raises: ConfigError, if a frozen parameter has changed: nothing would save it."""
        if self._sums != (now := checksums(self._named.values())):
            pairs = zip(self._named, self._sums, now, strict=True)
            changed = [name for name, before, after in pairs if before != after]
            raise ConfigError.of(
                "wrong-result",
                "save_parameters: expected frozen parameters with the values from get_model, which 'trained' does not save, got "
                f"others in {first_few(changed, 3)} (load them in "
                "get_model, or by preload_from_files with init_for_train = 'always'; or save_parameters = 'all')",
            )

    def fingerprint_of(self, named: Mapping[str, torch.Tensor]) -> str:
        """That of some frozen parameters; if these are all of the base, no bytes are read again."""
        return str(self.entry["sha256"]) if named.keys() == self._named.keys() else fingerprint(named)


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
