"""Rules of averages of checkpoints: which checkpoints they need, and which are chosen. `averages.py` makes the averages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan
from typing import TYPE_CHECKING, Any

from hvdtrain.checkpoint.files import Checkpoint
from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import Age, CheckpointHooks
from hvdtrain.errors import CheckpointError, ConfigError, Problem, problem
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, errors_of, wanted_of

if TYPE_CHECKING:  # as in checkpoint/hooks.py
    from hvdtrain.checkpoint.progress import Progress

KINDS = ("best", "last", "epochs", "steps", "running")
"""Ways to choose what is averaged: the entries of `average_checkpoints`, and the options of the command."""

MORE = ("measure", "recompute_statistics")
"""Further entries."""


def parse_numbers(value: Any) -> tuple[int, ...]:
    """Numbers of epochs or steps: 3, [3, 5], range(3, 6), '3,5,10-20'. Raises: ValueError.

    >>> parse_numbers("3,5,10-12"), parse_numbers([2, 1])
    ((3, 5, 10, 11, 12), (1, 2))
    """
    if isinstance(value, str):
        numbers: list[int] = []
        for span in value.split(","):
            match = re.fullmatch(r"(\d+)(?:-(\d+))?", span.strip())
            if match is None:
                raise ValueError(value)
            numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    elif isinstance(value, (list, tuple, range)):
        numbers = list(value)
    else:
        numbers = [value]
    if not numbers or not all(isinstance(number, int) and not isinstance(number, bool) and number > 0 for number in numbers):
        raise ValueError(value)
    return tuple(sorted(set(numbers)))


@dataclass(frozen=True)
class AverageRule:
    """What is averaged.

    Attributes:
        kind: 'best' or 'last': so many checkpoints; 'epochs' or 'steps': those with these numbers; 'running': the running average
            over the last `count` epochs, or from the first to the last of `numbers`.
        count: with 'best', 'last' and 'running'; 0: numbers are given instead.
        measure: the score by which 'best' chooses; None: that of early stopping and best.json.
        recompute_statistics: whether BatchNorm's statistics are computed anew on training data.
    """

    kind: str
    count: int = 0
    numbers: tuple[int, ...] = ()
    measure: str | None = None
    recompute_statistics: bool = False

    @property
    def name(self) -> str:
        """Its name in file names and messages, such as 'best-5' and 'epochs-10-20'."""
        if self.count:
            name = f"{self.kind}-{self.count}"
        elif self.numbers == tuple(range(self.numbers[0], self.numbers[-1] + 1)) and len(self.numbers) > 1:
            name = f"{self.kind}-{self.numbers[0]}-{self.numbers[-1]}"
        else:
            name = f"{self.kind}-{'-'.join(map(str, self.numbers))}"
        return name if self.measure is None else f"{name}-{self.measure}"

    def with_default(self, measure: Measure) -> Measure:
        """The measure by which it chooses, given that of the training."""
        return measure if self.measure is None else replace(measure, wanted=wanted_of(self.measure))

    def epochs_to_keep(self, epochs: Sequence[int], history: Sequence[EpochRecord], measure: Measure) -> list[int]:
        """The epochs with a model that it may need once training ends."""
        if self.kind == "best":
            records = [record for record in history if record.epoch in epochs]
            return [record.epoch for record in _best(records, self.with_default(measure), self.count)]
        if self.kind == "last":
            return list(epochs[-self.count :])
        if self.kind == "running" and self.count:
            return list(epochs[-self.count - 1 :])
        return [epoch for epoch in epochs if epoch in self.wanted_epochs(epoch)]

    def wanted_epochs(self, last: int) -> tuple[int, ...]:
        """The epochs that have to have a model, whatever the scores, when training has ended with epoch `last`."""
        if self.kind == "running":
            end = self.numbers[-1] if self.numbers else last
            begin = self.numbers[0] - 1 if self.numbers else max(0, end - self.count)
            return tuple(epoch for epoch in (begin, end) if epoch)
        return self.numbers if self.kind == "epochs" else ()


def parse_averages(value: Any) -> list[AverageRule]:
    """Parse the key `average_checkpoints`: a dict with one of `KINDS`, or a list of them. Raises: ConfigError."""
    rules: list[AverageRule] = []
    problems: list[Problem] = []
    several = isinstance(value, (list, tuple))
    for number, entry in enumerate(value if several else () if value is None else (value,)):
        where = f"average_checkpoints[{number}]" if several else "average_checkpoints"
        if not isinstance(entry, dict) or len(chosen := [name for name in KINDS if name in entry]) != 1:
            problems += problem("wrong-type", f"{where}: expected a dict with one of {', '.join(KINDS)}, got {entry!r}")
            continue
        if unknown := [name for name in entry if name not in (*KINDS, *MORE)]:
            problems += problem(
                "unknown-key", f"{where}.{unknown[0]}: expected one of {', '.join((*KINDS, *MORE))}, got {unknown[0]!r}"
            )
        [kind] = chosen
        try:
            rule = make_rule(kind, entry[kind], entry.get("measure"), entry.get("recompute_statistics", False))
        except ValueError:
            wanted = "a number of checkpoints" if kind in ("best", "last") else "numbers such as 5 or '10-20'"
            problems += problem("out-of-range", f"{where}.{kind}: expected {wanted}, got {entry[kind]!r}")
            continue
        measure = entry.get("measure")
        if measure is not None and (kind != "best" or not isinstance(measure, str)):
            problems += problem("conflict", f"{where}.measure: expected the name of a score, with best, got {measure!r}")
        if not isinstance(rule.recompute_statistics, bool):
            problems += problem(
                "wrong-type", f"{where}.recompute_statistics: expected True or False, got {rule.recompute_statistics!r}"
            )
        rules.append(rule)
    names = [rule.name for rule in rules]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        problems += problem("duplicate", f"average_checkpoints: expected different averages, got {doubled[0]} twice")
    if problems:
        raise ConfigError(problems)
    return rules


class Averages(CheckpointHooks):
    """The averages that a training makes at its end need the models that they are made of.

    Args:
        measure: compares epochs, unless a rule has its own.
        num_epochs: the last epoch.
        save_interval: the model is saved after every N epochs, and after the last one.
        has_within: whether models of evaluations within epochs are kept.
    """

    def __init__(
        self, rules: Sequence[AverageRule], measure: Measure, num_epochs: int, save_interval: int = 1, has_within: bool = True
    ) -> None:
        self._rules = rules
        self._measure = measure
        self._num_epochs = num_epochs
        self._save_interval = save_interval
        self._has_within = has_within

    def restored(self, progress: Progress) -> None:
        """Raises: ConfigError, on all ranks, if epochs or steps to come will not have the model that a rule wants of them."""
        for rule in self._rules:
            if rule.kind == "steps" and rule.numbers[-1] > progress.step and not self._has_within:
                raise ConfigError.of(
                    "missing",
                    "average_checkpoints.steps: expected evaluations within epochs, whose models are kept (eval_interval_steps "
                    "or eval_interval_minutes, with best_model in eval_interval_for), got none",
                ).on_all_ranks()
            wanted = [epoch for epoch in rule.wanted_epochs(self._num_epochs) if epoch > progress.epoch]
            unsaved = [epoch for epoch in wanted if epoch % self._save_interval and epoch != self._num_epochs]
            if unsaved := unsaved or [epoch for epoch in wanted if epoch > self._num_epochs]:
                raise ConfigError.of(
                    "conflict",
                    f"average_checkpoints.{rule.kind}: expected epochs whose models are saved (save_interval is "
                    f"{self._save_interval}, num_epochs {self._num_epochs}), got one that needs those of {_text(unsaved)}",
                ).on_all_ranks()

    def needed_within(self, records: Sequence[EpochRecord]) -> set[Age]:
        needed: list[EpochRecord] = []
        for rule in self._rules:
            if rule.kind == "best":
                needed += _best(records, rule.with_default(self._measure), rule.count)
            elif rule.kind == "steps":
                needed += [record for record in records if record.at_step in rule.numbers]
        return {record.age for record in needed if record.at_step is not None}

    def needed_epochs(self, epochs: Sequence[int], history: Sequence[EpochRecord]) -> dict[int, list[str]]:
        reasons: dict[int, list[str]] = {}
        for rule in self._rules:
            for epoch in rule.epochs_to_keep(epochs, history, self._measure):
                reasons.setdefault(epoch, []).append(f"average {rule.name}")
        return reasons


def make_rule(kind: str, value: Any, measure: Any = None, recompute_statistics: Any = False) -> AverageRule:
    """A rule from one entry. Raises: ValueError."""
    if kind in ("best", "last"):
        [count] = parse_numbers(value)
        return AverageRule(kind, count, measure=measure, recompute_statistics=recompute_statistics)
    numbers = parse_numbers(value)
    if kind == "running" and len(numbers) == 1 and not (isinstance(value, str) and "-" in value):
        return AverageRule(kind, numbers[0], recompute_statistics=recompute_statistics)
    if kind == "running" and numbers != tuple(range(numbers[0], numbers[-1] + 1)):
        raise ValueError(value)
    return AverageRule(kind, 0, numbers, measure, recompute_statistics)


def select(
    rule: AverageRule, checkpoints: CheckpointFolder, history: Sequence[EpochRecord], measure: Measure
) -> list[Checkpoint]:
    """The checkpoints whose models a rule averages, oldest first; for 'running' those at the beginning (if there is one) and the
    end. There may be fewer than a rule with a count wants (`shortfall`).

    Raises:
        CheckpointError: some of those with given numbers do not exist, or none at all.
    """
    last = history[-1].epoch if history else inf  # the models of later epochs are of another training
    existing = [epoch for epoch in checkpoints.finished_epochs() if epoch <= last]
    if rule.kind == "best":
        chosen = sorted(_best_checkpoints(rule, checkpoints, history, measure), key=lambda checkpoint: checkpoint.age)
    elif rule.kind == "last":
        chosen = [checkpoints.checkpoint_at(epoch) for epoch in existing[-rule.count :]]
    elif rule.kind == "steps":
        by_step = {checkpoint.step: checkpoint for checkpoint in checkpoints.within_epochs()}
        if missing := [step for step in rule.numbers if step not in by_step]:
            raise _missing(checkpoints, f"a model after each of steps {_text(rule.numbers)}", f"none after {_text(missing)}")
        chosen = [by_step[step] for step in rule.numbers]
    elif rule.kind == "epochs":
        if missing := [epoch for epoch in rule.numbers if epoch not in existing]:
            raise _missing(checkpoints, f"a model of each of epochs {_text(rule.numbers)}", f"none of {_text(missing)}")
        chosen = [checkpoints.checkpoint_at(epoch) for epoch in rule.numbers]
    else:
        return _ends(rule, checkpoints, existing)
    if not chosen:
        of = f" with the score {rule.with_default(measure).name(history)}" if rule.kind == "best" else ""
        raise _missing(checkpoints, f"{rule.count} models{of}", "none")
    return chosen


def shortfall(rule: AverageRule, chosen: Sequence[Checkpoint]) -> str | None:
    """What is missing to what a rule wants, in words; None: nothing."""
    count, unit = (chosen[-1].epoch, "epochs") if rule.kind == "running" else (len(chosen), "models")
    return f"expected {rule.count} {unit}, got {count}" if count < rule.count else None


def _missing(checkpoints: CheckpointFolder, expected: str, got: str) -> CheckpointError:
    return CheckpointError(f"{checkpoints.prefix}: expected {expected}, got {got}")


def _text(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")


def _best_checkpoints(
    rule: AverageRule, checkpoints: CheckpointFolder, history: Sequence[EpochRecord], measure: Measure
) -> list[Checkpoint]:
    measure = rule.with_default(measure)
    if measure.name(history) is None:
        score_names = sorted({name for record in history for name in record.scores})
        wanted = " or ".join(map(repr, measure.wanted)) or "the minimized loss"
        raise _missing(checkpoints, f"epochs with the score {wanted}", f"the scores {', '.join(score_names) or 'of none'}")
    with_model = [record for record in history if checkpoints.checkpoint_at(record.epoch, record.at_step).model_file.exists()]
    return [checkpoints.checkpoint_at(record.epoch, record.at_step) for record in _best(with_model, measure, rule.count)]


def _best(records: Sequence[EpochRecord], measure: Measure, count: int) -> list[EpochRecord]:
    """The best records, of equally good ones the earlier; without those that have no comparable score."""
    name = measure.name(records)
    if name is None:
        return []
    errors = [errors_of(record.comparable, measure.higher).get(name, nan) for record in records]
    places = [(error, place) for place, error in enumerate(errors) if not isnan(error)]  # records are in their order already
    return [records[place] for _, place in sorted(places)[:count]]


def _ends(rule: AverageRule, checkpoints: CheckpointFolder, existing: Sequence[int]) -> list[Checkpoint]:
    """The checkpoints with the sums at the beginning, if it is not that of the training, and at the end of a running average."""
    if not existing:
        raise _missing(checkpoints, "checkpoints with running averages (key running_average)", "none")
    return [checkpoints.checkpoint_at(epoch) for epoch in rule.wanted_epochs(existing[-1])]
