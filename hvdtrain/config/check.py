"""From names and values to sections of checked keys: every problem is found before any is reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher
from types import ModuleType
from typing import Any, TypeVar

from hvdtrain.config.keys import REQUIRED, Key, Mismatch, convert, declared, words_of
from hvdtrain.config.source import COMMAND_LINE, Source

S = TypeVar("S")

CLOSE = 0.85
"""From this similarity on (difflib's ratio) an unknown name is taken for a misspelt key."""


def build(section: type[S], values: dict[str, Any], where: str, origins: dict[str, str]) -> tuple[S | None, list[str]]:
    """A section filled from the values, or None and the problems.

    Args:
        where: put before a key's name in a message: '' at the top level, 'train.' inside the dict `train`.
    """
    problems = []
    filled: dict[str, Any] = {}
    for key in declared(section):
        if key.name not in values:
            if key.default is REQUIRED:
                problems.append(f"{where}{key.name}: expected {words_of(key.type)} ({key.doc}), got nothing")
            continue
        value = values[key.name]
        try:
            filled[key.name] = convert(value, key)
        except Mismatch as mismatch:
            origin = origins.get(key.name, "the config")
            problems.append(f"{where}{key.name}: expected {mismatch}, got {_shown(value)} in {origin}")
    return (None, problems) if problems else (section(**filled), [])


def unsupported(sections: Iterable[Any], backend: str) -> list[str]:
    """Problems with keys that are set although they do not work with the config's framework.

    Args:
        sections: filled ones.
        backend: the framework.
    """
    problems = []
    for section in sections:
        for key in declared(type(section)):
            if key.needs and backend not in key.needs and getattr(section, key.name) != key.default:
                needs = " or ".join(map(repr, key.needs))
                hint = f" ({key.instead})" if key.instead else ""
                problems.append(f"{key.name}: expected backend = {needs}, got {backend!r}{hint}")
    return problems


def unknown(source: Source, known: Iterable[str], foreign: dict[str, str]) -> list[str]:
    """Problems with names that are no keys: misspelt keys, keys of RETURNN that mean nothing here, unused overrides.

    Every other name is the author's own business.

    Args:
        foreign: keys of RETURNN that would change the training but are not supported, with what to do instead.
    """
    problems = []
    keys = list(known)
    for name, value in source.values.items():
        if name in keys or name.startswith("_") or isinstance(value, (ModuleType, type)):
            continue
        origin = source.origins[name]
        match = closest(name, keys)
        if name in foreign and not _off(name, value):
            problems.append(f"{name}: a key of RETURNN that is not supported, in {origin} ({foreign[name]})")
        elif match:
            problems.append(f"{name}: unknown key in {origin} (did you mean {match}?)")
        elif name in source.unused and origin == COMMAND_LINE:
            problems.append(f"{name}: unknown key in {origin} (it is no key, and the config never mentions it)")
    return problems


def closest(name: str, keys: Iterable[str]) -> str | None:
    """The key that `name` was probably meant to be.

    >>> closest("learning_rat", ["learning_rate", "learning_rates"]), closest("trian", ["train"]), closest("hidden", ["train"])
    ('learning_rate', 'train', None)
    """

    def likeness(key: str) -> float:
        if sorted(name) == sorted(key):  # two letters swapped
            return CLOSE
        return SequenceMatcher(None, name, key).ratio()

    best = max(keys, key=likeness, default=None)
    return best if best is not None and likeness(best) >= CLOSE else None


def did_you_mean(name: str, keys: Iterable[str]) -> str:
    """For the end of a message about a name that is not among the keys.

    >>> did_you_mean("learning_rat", ["learning_rate"]), did_you_mean("hidden", ["learning_rate"])
    (' (did you mean learning_rate?)', '')
    """
    match = closest(name, keys)
    return f" (did you mean {match}?)" if match else ""


def _off(name: str, value: Any) -> bool:
    """Whether a key of RETURNN has a value that asks for nothing."""
    nothing = (0, "0", "", 1) if name == "accum_grad_multiple_step" else (0, "0", "")
    return value is None or value is False or (not isinstance(value, bool) and value in nothing)


def describe(key: Key) -> str:
    """A key's type, rule and default in words, for the help and the reference page."""
    words = words_of(key.type)
    if key.rule is not None:
        words = key.rule.words if key.rule.is_choice else f"{words}; {key.rule.words}"
    if key.needs:
        words = f"{words}; backend {' or '.join(map(repr, key.needs))} only"
    return f"{words}; required" if key.required else f"{words}; default {_shown(key.default)}"


def _shown(value: Any) -> str:
    """A value in a message: its repr, cut where it is long."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def unknown_options(where: str, options: Mapping[str, Any], section: type, kind: str, others: Iterable[str] = ()) -> list[str]:
    """Problems with options that a section does not declare.

    Args:
        where: put before the option's name: 'train.'
        kind: whose options these are, for the message.
        others: names that are known besides.
    """
    own = [key.name for key in declared(section)]
    known = [*own, *others]
    problems = []
    for option in options:
        if option not in known:
            problems.append(f"{where}{option}: unknown key of {kind}" + did_you_mean(str(option), known))
    return problems
