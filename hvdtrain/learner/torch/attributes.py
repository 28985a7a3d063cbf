"""What modules keep besides tensors and other modules: numbers, texts and orders, as text that ranks can compare."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn

OWN = re.compile(
    r"(^|_)(rank|main|master|leader|worker|shard|device|host(name)?|port|pid|uuid|path|dir|folder|file(name)?|tmp|temp|cache|seed|time"
    r"|start(ed)?|created|log(ger|ging)?|writer|verbose|quiet|debug|print)s?(_|$)|^_",
    re.IGNORECASE,
)
"""Attributes that a rank may have for itself, by their names."""

MOST_LETTERS = 80
"""Longer values are shown by a checksum."""


def kinds_of_modules(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The class and the settings of each module, by name in the model's order."""
    names = {id(module): name or "the model" for name, module in model.named_modules()}
    for name, module in model.named_modules():
        kind = type(module)
        is_known = kind.__module__.startswith("torch.nn.")
        settings = module.extra_repr() if is_known else _attributes(module, names)  # another's extra_repr may name the rank
        yield name, f"{kind.__qualname__}({settings})"


def _attributes(module: nn.Module, names: Mapping[int, str]) -> str:
    texts = {}
    for name, value in vars(module).items():
        if not OWN.search(name) and name != "training":
            with suppress(RecursionError):  # it contains itself
                texts[name] = _text(value, names)
    return ", ".join(f"{name}={_short(text)}" for name, text in sorted(texts.items()))


def _text(value: Any, names: Mapping[int, str]) -> str:
    """Only plain values are compared, with modules, functions and classes in them. A rank may have another object, or None."""
    if isinstance(value, bool | int | float | str):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(each, names) for each in value)}]"
    if isinstance(value, dict):  # not a file of HDF5, which is a mapping, too
        return f"{{{', '.join(f'{_text(key, names)}: {_text(each, names)}' for key, each in value.items())}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(_text(each, names) for each in value))}}}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return value.__qualname__
    return names.get(id(value), "object")


def _short(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else f"{text[:40]}... (checksum {sha256(text.encode()).hexdigest()[:8]})"
