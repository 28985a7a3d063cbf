"""Options of a dict in a config that nobody knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hvdtrain.config.check import did_you_mean
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
            problems.append(f"{where}{option}: unknown key of {kind}" + did_you_mean(str(option), known))
    return problems
