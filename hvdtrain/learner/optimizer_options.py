"""Whether an optimizer takes the options that a config has for it."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from typing import Any

from hvdtrain.config.check import did_you_mean

SET_BY_US = ("self", "params", "lr", "learning_rate")
FRAMEWORKS = ("torch", "keras")
"""Their classes take no more than they name, even where they say that they take anything."""


def option_problems(made: type, options: Mapping[str, Any], where: str, others: Collection[str] = ()) -> list[str]:
    """Problems with options that a class does not take. One that takes any is not asked: it may say so when it is made.

    Args:
        where: put before an option's name: 'optimizer.'
        others: names that are known besides.
    """
    known = _names(made)
    if known is None:
        return []
    problems = []
    for name, value in options.items():
        if name not in known and name not in others:
            hint = did_you_mean(name, [*known, *others])
            problems.append(
                f"{where}{name}: expected options of {made.__name__}: {', '.join(known)}, got {name} = {value!r}{hint}"
            )
    return problems


def _names(made: type) -> list[str] | None:
    """What a class's constructor takes by name, those it hands its arguments on to included; None: anything."""
    names: list[str] = []
    for kind in made.__mro__:
        if kind is object or "__init__" not in vars(kind):
            continue
        parameters = inspect.signature(vars(kind)["__init__"]).parameters.values()
        names += [one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)]
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    else:
        if made.__module__.partition(".")[0] not in FRAMEWORKS:
            return None
    return [name for name in dict.fromkeys(names) if name not in SET_BY_US]
