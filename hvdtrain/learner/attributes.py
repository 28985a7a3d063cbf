"""What modules keep besides tensors and other modules: numbers, texts and orders, as text that ranks can compare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from types import BuiltinFunctionType, FunctionType
from typing import Any

OWN = re.compile(
    r"(^|_)(rank|main|master|leader|worker|shard|device|host(name)?|port|pid|uuid|path|dir|folder|file(name)?|tmp|temp|cache|seed|time"
    r"|start(ed)?|created|log(ger|ging)?|writer|verbose|quiet|debug|print)s?(_|$)|^_",
    re.IGNORECASE,
)
"""Attributes that a rank may have for itself, by their names."""

OF_FRAMEWORKS = frozenset(("training", "name", "built", "trainable", "dtype_policy"))
"""Attributes that frameworks set: the names of Keras' layers are numbered in each process."""

MOST_LETTERS = 80
"""Longer values are shown by a checksum."""


def kinds_of(modules: Iterable[tuple[str, Any]], described: Callable[[Any], str | None]) -> Iterator[tuple[str, str]]:
    """The class and the settings of each module, by name in the model's order.

    Args:
        described: the settings of a framework's own module; None: it is somebody else's.
    """
    modules = list(modules)
    names = {id(module): name or "the model" for name, module in modules}
    for name, module in modules:
        settings = described(module)
        yield name, f"{type(module).__qualname__}({_attributes(module, names) if settings is None else settings})"


def _attributes(module: Any, names: Mapping[int, str]) -> str:
    texts = {}
    for name, value in vars(module).items():
        if not OWN.search(name) and name not in OF_FRAMEWORKS:
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
