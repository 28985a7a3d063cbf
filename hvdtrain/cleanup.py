"""Which models to keep when disk space is short; RETURNN's rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isnan
from typing import Any

from hvdtrain.errors import ConfigError


@dataclass(frozen=True)
class CleanupRule:
    """The models to keep: the last ones, the best ones by every score, and those of some epochs.

    Attributes:
        keep: these epochs; None: some of all times, fewer of them the longer the training is.
    """

    keep_last_n: int = 2
    keep_best_n: int = 4
    keep: Sequence[int] | None = None

    def kept(self, epochs: Iterable[int], scores: Mapping[int, Mapping[str, float]]) -> list[int]:
        """The epochs to keep, ascending.

        Args:
            epochs: those whose model is there.
            scores: by epoch, its scores by name; the smaller the better.
        """
        there = sorted(epochs)
        if max(self.keep_last_n, self.keep_best_n) >= len(there):
            return there
        wanted = set(self.keep if self.keep is not None else _pattern(there[-1])) | set(there[-self.keep_last_n :])
        for name in sorted({name for epoch in there for name in scores.get(epoch, {})}):
            wanted.update(self._best(there, {epoch: scores.get(epoch, {}).get(name) for epoch in there}))
        return [epoch for epoch in there if epoch in wanted]

    def _best(self, epochs: list[int], scores: Mapping[int, float | None]) -> list[int]:
        """The epochs with the smallest scores; none where all are equal. An epoch without a score counts as the worst one."""
        known = [score for score in scores.values() if score is not None and not isnan(score)]
        if not known or min(known) == max(known):
            return []

        def rank(epoch: int) -> tuple[float, int]:
            score = scores[epoch]
            return (max(known) if score is None or isnan(score) else score), epoch

        return sorted(epochs, key=rank)[: self.keep_best_n]


def _pattern(last: int) -> set[int]:
    """Epochs to keep of a training up to the epoch `last`: multiples of a number, and doublings of another."""
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


def parse_rule(value: bool | dict[str, Any]) -> CleanupRule | None:
    """The key `cleanup_old_models`: True, or a dict of the rule's attributes; None where nothing is to be removed.

    Raises:
        ConfigError: other entries, or entries of another type.
    """
    if isinstance(value, bool):
        return CleanupRule() if value else None
    names = [field.name for field in fields(CleanupRule)]
    problems = [
        f"cleanup_old_models.{name}: expected one of {', '.join(names)}, got {name!r}" for name in value if name not in names
    ]
    least = {"keep_last_n": 1, "keep_best_n": 0}
    for name, smallest in least.items():
        number = value.get(name, smallest)
        if not isinstance(number, int) or number < smallest:
            problems.append(f"cleanup_old_models.{name}: expected an integer, {smallest} or more, got {number!r}")
    keep = value.get("keep", [])
    if not isinstance(keep, (list, tuple, set)) or not all(isinstance(epoch, int) for epoch in keep):
        problems.append(f"cleanup_old_models.keep: expected a list of epochs, got {keep!r}")
    if problems:
        raise ConfigError(problems)
    return CleanupRule(**value)
