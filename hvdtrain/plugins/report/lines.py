"""The types of the entries of a line of JSON, which may be damaged or of another release."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def start_of_line(line: Any) -> dict[str, Any]:
    """A line of starts.jsonl. Raises one of `DAMAGED_LINE_ERRORS`."""
    if not isinstance(line, dict):
        raise TypeError("no dict")
    entries: dict[str, Any] = {name: value for name, value in line.items() if name not in START or is_like(value, START[name])}
    entries["settings"] = {name: pair for name, pair in (entries.get("settings") or {}).items() if pair and len(pair) == 2}
    entries["hosts"] = [pair for pair in entries.get("hosts") or [] if pair and len(pair) == 2]
    return entries


NUMBER: Any = 0.0

START: Mapping[str, Any] = {
    **dict.fromkeys(("directory", "time", "command", "commit"), ""),
    **dict.fromkeys(("first_epoch", "num_parameters"), NUMBER),
    **dict.fromkeys(("texts", "versions"), {"": ""}),
    "settings": {"": [""]},
    "hosts": [[""]],
    "goodput": {"": NUMBER},
}
"""Examples of the entries of a line of starts.jsonl."""


def is_like(value: Any, example: Any) -> bool:
    """Whether a value has the same types as an example throughout, or is None.

    >>> is_like([{"compute": 1.5}], [{"": 0.0}]), is_like("<img>", 0.0), is_like([["host", "CPU"]], [[""]])
    (True, False, True)
    """
    if value is None:
        return True
    if isinstance(example, dict):
        return isinstance(value, dict) and all(
            entry is not None and is_like(entry, inner) for inner in example.values() for entry in value.values()
        )
    if isinstance(example, list):
        return isinstance(value, list) and all(
            entry is not None and is_like(entry, inner) for inner in example for entry in value
        )
    if isinstance(example, float):
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return isinstance(value, type(example))
