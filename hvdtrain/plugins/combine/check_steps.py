"""Checks of the steps that the `map_seq` of a MapDataset has."""

from __future__ import annotations

from typing import Any

from hvdtrain.config.absent import absent
from hvdtrain.config.check import build, unknown_options
from hvdtrain.data.kinds import STEPS
from hvdtrain.errors import Problem, problem


def check_steps(where: str, steps: list[Any], datasets: dict[str, Any]) -> tuple[list[Any], list[Problem]]:
    """The keys of the steps (or functions) of a `map_seq`, and the problems with them.

    Args:
        where: prefix of the names of keys in messages.
        datasets: the names of the datasets that steps may read.
    """
    checked: list[Any] = []
    problems: list[Problem] = []
    for number, step in enumerate(steps):
        name = f"{where}.{number}"
        if callable(step):
            checked.append(step)
            continue
        kind = step.get("class") if isinstance(step, dict) else None
        if not isinstance(kind, str) or kind not in STEPS:
            expected = f"a function, or a dict with a class of {', '.join(STEPS)}"
            problems += problem("unknown-value", f"{name}: expected {expected}, got {step!r}{absent(kind)}")
            continue
        options = {option: value for option, value in step.items() if option != "class"}
        keys, more = build(STEPS[kind], options, f"{name}.", {})
        problems += more + unknown_options(f"{name}.", options, STEPS[kind], kind)
        if keys is None:
            continue
        problems += [problem.within(f"{name}.") for problem in keys.problems()]
        for wanted in keys.reads:
            if wanted not in datasets:
                got = ", ".join(datasets) or "none"
                problems += problem("missing", f"datasets: expected a dataset {wanted!r} for {name}, got {got}")
        checked.append(keys)
    return checked, problems
