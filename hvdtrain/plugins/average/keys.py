"""The keys of averages: what they are made of, and those that a training makes at its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Section, Sections, key, positive
from hvdtrain.errors import ConfigError, Problem, problem
from hvdtrain.plugins.average.rules import parse_averages


@dataclass(frozen=True, kw_only=True)
class AverageKeys(Section):
    """Averages of checkpoints."""

    running_average: int | None = key(
        None,
        "add the weights to a sum after every N-th update, such as 100, and save the sum with every checkpoint: the mean over "
        "any range of epochs follows from two checkpoints",
        positive,
        needs=("torch", "tensorflow"),
    )
    average_checkpoints: dict[str, Any] | list[Any] | None = key(
        None,
        "averages of checkpoints to make and evaluate at the end of a training: {'best': 5}, {'last': 10}, {'epochs': '10-20'}, "
        "{'steps': [...]} or {'running': 5}, with measure and recompute_statistics (docs/training.md), or a list of these",
        needs=("torch", "tensorflow"),
    )

    @property
    def measures(self) -> Mapping[str, str | list[str] | None]:
        try:
            rules = parse_averages(self.average_checkpoints)
        except ConfigError:  # which `problems` reports
            return {}
        names = [f"average_checkpoints[{number}]" if len(rules) > 1 else "average_checkpoints" for number in range(len(rules))]
        return {f"{name}.measure": rule.measure for name, rule in zip(names, rules, strict=True)}

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        try:
            rules = parse_averages(self.average_checkpoints)
        except ConfigError as error:
            return error.problems
        if self.running_average is None and any(rule.kind == "running" for rule in rules):
            return problem("missing", "running_average: expected a number of updates, with average_checkpoints.running, got None")
        return []
