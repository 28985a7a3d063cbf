"""Values of keys as text."""

from __future__ import annotations

import os
from collections.abc import Iterable
from numbers import Number
from pathlib import PurePath
from types import NoneType
from typing import Any

LONG = 2000
"""Characters of a list, a dict or a text that are shown: all learning rates of 200 epochs, but not the data of a corpus."""

FEW = LONG // 5
"""What an array or object in a list counts for: the first five are enough to recognize the list."""


def value_text(value: Any) -> str:
    """A value as text: of arrays the type and shape, of objects the class, of long lists the beginning.

    >>> import numpy
    >>> value_text({"class": "adam", "check": print}), value_text([1, "2G"]), value_text(numpy.zeros((17, 6), "float32"))
    ("{'class': 'adam', 'check': <function print>}", "[1, '2G']", '<float32 (17, 6)>')
    """
    if isinstance(value, dict):
        return "{" + _abbreviate((f"{name!r}: {value_text(member)}" for name, member in value.items()), len(value)) + "}"
    if isinstance(value, (list, tuple)):
        brackets = "[]" if isinstance(value, list) else "()"
        return brackets[0] + _abbreviate(map(value_text, value), len(value)) + brackets[1]
    if isinstance(value, (set, frozenset)):  # sorted, as their order differs from run to run
        return "{" + _abbreviate(sorted(map(value_text, value)), len(value)) + "}" if value else "set()"
    if isinstance(value, (str, bytes)):
        return repr(value) if len(value) <= LONG else f"{value[:LONG]!r}..."
    if callable(value) and hasattr(value, "__name__"):
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        where = f" in {os.path.basename(code.co_filename)}" if code is not None else ""
        return f"<{'class' if isinstance(value, type) else 'function'} {value.__name__}{where}>"
    # By name, as `--help` does not import numpy.
    is_numpy = type(value).__module__ == "numpy"
    if isinstance(value, SHORT) or (is_numpy and not hasattr(value, "__setitem__")):  # a scalar, not an array
        return repr(value)
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"<{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}>"
    return f"<{type(value).__name__}>"


SHORT = (NoneType, Number, PurePath, range)
"""Types whose values are shown as Python writes them, besides numpy scalars."""


def _abbreviate(members: Iterable[str], count: int) -> str:
    """The members of a list, or the first ones and the number of the others."""
    shown_members: list[str] = []
    width_left = LONG
    for text in members:
        if width_left <= 0:
            return f"{', '.join(shown_members)}, ... {count - len(shown_members)} more"
        shown_members.append(text)
        width_left -= FEW if text[0] in "<([{" and "<" in text else len(text)
    return ", ".join(shown_members)


def as_text(value: Any) -> str | None:
    """A key's value as text; None: it contains a function, or another object that cannot be compared."""
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        texts = {str(name): as_text(entry) for name, entry in value.items()}
        return (
            None if None in texts.values() else "{" + ", ".join(f"{name}: {text}" for name, text in sorted(texts.items())) + "}"
        )
    if isinstance(value, (list, tuple)):
        several = [as_text(entry) for entry in value]
        return None if None in several else f"[{', '.join(map(str, several))}]"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else None
