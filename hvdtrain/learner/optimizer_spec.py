"""The key `optimizer`: the entries of its dicts that are not options of a class, and the mistakes that need no framework."""

from __future__ import annotations

from typing import Any

from hvdtrain.errors import Problem, problem

MULTIPLIER = "learning_rate_multiplier"
MULTIPLIERS = "learning_rate_multipliers"
"""A factor on the learning rate, and factors by patterns of parameters' names."""

PARAMETERS = "parameters"
OTHERS = "others"
"""Which parameters one of several optimizers has; and the optimizer of those that Muon does not take."""


def spec_problems(spec: Any) -> list[Problem]:
    """Problems with the value of the key: a dict, a list of dicts, or anything else, which is not looked into."""
    entries = {"optimizer": spec}
    if isinstance(spec, list):
        entries = {f"optimizer[{number}]": entry for number, entry in enumerate(spec)}
    elif isinstance(spec, dict) and OTHERS in spec:
        entries[f"optimizer.{OTHERS}"] = spec[OTHERS]
    problems = [] if entries else problem("wrong-type", "optimizer: expected at least one dict in the list, got none")
    for where, entry in entries.items():
        is_one_of_several = len(entries) > 1 or isinstance(spec, list)
        if isinstance(entry, dict):
            problems += _entry_problems(where, entry, is_one_of_several)
        elif is_one_of_several:
            problems += problem("wrong-type", f"{where}: expected a dict with the entry 'class', got {entry!r}")
    return problems


def _entry_problems(where: str, entry: dict[str, Any], is_one_of_several: bool) -> list[Problem]:
    problems = []
    if "class" not in entry:
        problems += problem("wrong-type", f"{where}: expected a dict with the entry 'class' (the optimizer's name), got none")
    hint = f" ({MULTIPLIER} is a factor on it)" if is_one_of_several else ""
    for rate in sorted({"lr", "learning_rate"} & entry.keys()):
        problems += problem(
            "conflict", f"{where}.{rate}: expected the learning rate in the key learning_rate, got it in the optimizer{hint}"
        )
    return problems
