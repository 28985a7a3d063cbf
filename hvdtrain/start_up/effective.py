"""The keys in effect, and where their values come from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hvdtrain.config.keys import declared_keys
from hvdtrain.config.value_text import value_text
from hvdtrain.settings import SECTIONS, Settings

DEFAULT = "default"
"""The origin of a key that was not set."""


@dataclass(frozen=True)
class Effective:
    """One key.

    Attributes:
        section: the title of the group it belongs to.
        value: as text, as it could be written in a config; a function by its name.
        origin: a config file's name, "the command line" or "default".
    """

    section: str
    name: str
    value: str
    origin: str


def effective_keys(settings: Settings) -> Iterator[Effective]:
    """All keys at the top level, in the order of the reference page."""
    for section in SECTIONS:
        title = (section.__doc__ or "").splitlines()[0].rstrip(".")
        for declared_key in declared_keys(section):
            value = getattr(settings.sections[section], declared_key.field)
            yield Effective(title, declared_key.name, value_text(value), settings.origins.get(declared_key.name, DEFAULT))


def print_config(settings: Settings, *, only_changed: bool = False) -> str:
    """All keys in effect, each followed by its origin: `num_epochs = 24    # g2p.py`.

    Args:
        only_changed: leave out those with their default.
    """
    lines: list[str] = []
    section = ""
    for key in effective_keys(settings):
        if only_changed and key.origin == DEFAULT:
            continue
        if key.section != section:
            section = key.section
            lines += ["", f"# {section}"]
        lines.append(f"{f'{key.name} = {key.value}':<50} # {key.origin}")
    return "\n".join(lines[1:])
