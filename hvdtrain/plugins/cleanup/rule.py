"""Which models a training keeps (the key `cleanup_old_models`)."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import isnan
from typing import Any

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import key, not_negative, positive
from hvdtrain.errors import ConfigError
from hvdtrain.schedule.measure import errors_of


@dataclass(frozen=True)
class CleanupKeys:
    """Which models to keep: the last, the best by each score, and those of certain epochs."""

    keep_last_n: int = key(2, "the number of last epochs to keep", positive)
    keep_best_n: int = key(4, "for each score, the number of best epochs to keep", not_negative)
    keep: list[int] | None = key(
        None, "further epochs to keep; None: a pattern over the whole training that gets sparser as training gets longer"
    )
    ignore_score_keys: list[str] = key([], "scores whose best epochs are not kept")


@dataclass(frozen=True)
class CleanupRule(CleanupKeys):
    """The same, knowing for which scores higher is better."""

    higher_is_better: Collection[str] = ()

    def epochs_to_keep(self, epochs: Iterable[int], scores: Mapping[int, Mapping[str, float]]) -> dict[int, list[str]]:
        """The epochs to keep, in ascending order, with the reasons.

        Args:
            epochs: the epochs that have a model.
            scores: the scores of each epoch by name.
        """
        existing = sorted(epochs)
        if max(self.keep_last_n, self.keep_best_n) >= len(existing):
            return {epoch: ["of so few, all"] for epoch in existing}
        reasons: dict[int, list[str]] = {epoch: [] for epoch in existing}
        for epoch in existing[-self.keep_last_n :]:
            reasons[epoch].append("last")
        errors = {epoch: errors_of(scores.get(epoch, {}), self.higher_is_better) for epoch in existing}
        for name in sorted({name for of_epoch in errors.values() for name in of_epoch}.difference(self.ignore_score_keys)):
            for epoch in self._best(existing, {epoch: errors[epoch].get(name) for epoch in existing}):
                reasons[epoch].append(f"best {name}")
        for epoch in self.keep if self.keep is not None else _default_pattern(existing[-1]):
            if epoch in reasons:
                reasons[epoch].append("keep" if self.keep is not None else PATTERN)
        return {epoch: why for epoch, why in reasons.items() if why}

    def _best(self, epochs: list[int], scores: Mapping[int, float | None]) -> list[int]:
        """The epochs with the lowest scores; empty if all are equal. An epoch without a score counts as the worst, one whose
        score is NaN is none of the best."""
        comparable = [epoch for epoch in epochs if (score := scores[epoch]) is None or not isnan(score)]
        present = [score for epoch in comparable if (score := scores[epoch]) is not None]
        if not present or (min(present) == max(present) and len(comparable) == len(epochs)):
            return []

        def rank(epoch: int) -> tuple[float, int]:
            score = scores[epoch]
            return (max(present) if score is None else score), epoch

        return sorted(comparable, key=rank)[: self.keep_best_n]


PATTERN = "pattern"
"""The reason to keep an epoch in the default of `keep`."""


def _default_pattern(last: int) -> set[int]:
    """The epochs up to `last` to keep by default: multiples of one number, and another number times powers of 2."""
    if last <= 10:
        every, doubled = 4, 5
    elif last <= 50:
        every, doubled = 20, 5
    elif last <= 100:
        every, doubled = 40, 10
    else:
        every, doubled = 80 * (1 << (last // 240).bit_length()), 20
    doublings = {doubled << power for power in range(last.bit_length())}
    return set(range(every, last + 1, every)) | {epoch for epoch in doublings if epoch <= last}


def parse_rule(value: bool | dict[str, Any], higher_is_better: Collection[str] = ()) -> CleanupRule | None:
    """Parse the key `cleanup_old_models`: a bool, or a dict of the rule's entries. None, for False: keep all.

    Raises:
        ConfigError: there are unknown entries, or entries of the wrong type.
    """
    if isinstance(value, bool):
        return CleanupRule(higher_is_better=higher_is_better) if value else None
    options = {name: sorted(option) if isinstance(option, set) else option for name, option in value.items()}
    keys, problems = build(CleanupKeys, options, "cleanup_old_models.", {})
    problems += unknown_options("cleanup_old_models.", options, CleanupKeys, "cleanup_old_models")
    if keys is None or problems:
        raise ConfigError(problems)
    return CleanupRule(**vars(keys), higher_is_better=higher_is_better)
