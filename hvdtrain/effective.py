"""Every key in effect: its value, and where that comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import declared
from hvdtrain.settings import SECTIONS, Settings

DEFAULT = "default"
"""The origin of a key that nobody set."""


@dataclass(frozen=True)
class Effective:
    """One key.

    Attributes:
        section: the first words about the group it belongs to.
        value: as text, such as could stand in a config; a function by its name.
        origin: a config file's name, "the command line" or "default".
    """

    section: str
    name: str
    value: str
    origin: str


def effective(settings: Settings) -> Iterator[Effective]:
    """All keys at the top level, in the order of the reference page."""
    sections = {type(value): value for value in vars(settings).values() if type(value) in SECTIONS}
    for section in SECTIONS:
        title = (section.__doc__ or "").splitlines()[0].rstrip(".")
        for key in declared(section):
            value = getattr(sections[section], key.name)
            yield Effective(title, key.name, shown(value), settings.origins.get(key.name, DEFAULT))


def print_config(settings: Settings) -> str:
    """All keys in effect, with their origins behind them: `num_epochs = 24    # g2p.py`."""
    keys = list(effective(settings))
    lines: list[str] = []
    section = ""
    for key in keys:
        if key.section != section:
            section = key.section
            lines += ["", f"# {section}"]
        lines.append(f"{f'{key.name} = {key.value}':<50} # {key.origin}")
    return "\n".join(lines[1:])


def shown(value: Any) -> str:
    """A value as text.

    >>> shown({"class": "adam", "check": print}), shown([1, "2G"])
    ("{'class': 'adam', 'check': <function print>}", "[1, '2G']")
    """
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name!r}: {shown(member)}" for name, member in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        brackets = "[]" if isinstance(value, list) else "()"
        return brackets[0] + ", ".join(shown(member) for member in value) + brackets[1]
    if callable(value):
        code = getattr(getattr(value, "__wrapped__", value), "__code__", None)
        where = f" in {os.path.basename(code.co_filename)}" if code is not None else ""
        return f"<{'class' if isinstance(value, type) else 'function'} {getattr(value, '__name__', repr(value))}{where}>"
    return repr(value)
