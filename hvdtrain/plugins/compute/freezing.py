"""Parameters that are frozen until a step of the training."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch

from hvdtrain.errors import ConfigError, problem
from hvdtrain.learner.torch.parameter_groups import pattern_problems


class FrozenUntil:
    """Freezes trained parameters before their first step. Until then, backward computes no gradients for them, and the optimizer,
    which has them from the beginning, skips them.

    It depends on the step only, so a resumed training needs no state of it.

    Args:
        until: by pattern of names, the number of steps of the training after which parameters are trained; of several patterns
            that match, the first one counts.
        named: the trained parameters by name.

    Raises:
        ConfigError: a pattern matches no parameter, or all are frozen at first.
    """

    def __init__(self, until: Mapping[str, int], named: Mapping[str, torch.nn.Parameter]) -> None:
        problems = [problem for pattern in until for problem in pattern_problems("freeze_until_step", pattern, list(named))]
        first = {name: next((step for pattern, step in until.items() if fnmatchcase(name, pattern)), 0) for name in named}
        if named and all(first.values()):
            problems += problem(
                "wrong-result", "freeze_until_step: expected a parameter that is trained from the beginning, got none"
            )
        if problems:
            raise ConfigError(problems)
        self._steps = [(number, named[name], step) for number, (name, step) in enumerate(first.items()) if step]

    def apply(self, step: int) -> None:
        for _, parameter, first in self._steps:
            if parameter.requires_grad != (step >= first):
                parameter.requires_grad_(step >= first)

    def frozen_now(self) -> list[int]:
        return [number for number, parameter, _ in self._steps if not parameter.requires_grad]
