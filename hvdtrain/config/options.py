"""Options of a dict in a config that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.config.check import closest
from hvdtrain.config.keys import declared


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
            match = closest(str(option), known)
            problems.append(f"{where}{option}: unknown key of {kind}" + (f" (did you mean {match}?)" if match else ""))
    return problems
