"""Which epochs begin with the model of an earlier one: the key `use_last_best_model`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

from hvdtrain.config.check import build, unknown_options
from hvdtrain.config.keys import ALONE, Section, Sections, key, positive
from hvdtrain.errors import Problem
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, errors_of


@dataclass(frozen=True, kw_only=True)
class LastBestRule:
    """The entries of `use_last_best_model`: for which epochs, and which earlier epochs are considered"""

    modulo: int = key(1, "for every Nth epoch only, and for those after an epoch whose score is above filter_score", positive)
    first_epoch: int | None = key(None, "the first epoch to consider; None: the last one of pretrain, or 1", positive)
    only_last_epochs: int | None = key(None, "consider the last N epochs only; None: all", positive)
    filter_score: float = key(inf, "do not consider epochs whose score is above this")
    only_last_n: int = key(-1, "of the epochs that are left, consider the last N only; -1: all")
    min_score_dist: float = key(0.0, "an epoch is better than the last one if its score is better by more than this")

    def better_epoch(self, epoch: int, history: Sequence[EpochRecord], measure: Measure, first: int = 1) -> EpochRecord | None:
        """The epoch whose model another one begins with; None: it continues with the last one.

        Args:
            history: the epochs before it.
            first: the default of `first_epoch`.

        >>> history = [EpochRecord(number, 0.1, {"dev_loss_ce": score}) for number, score in enumerate((2.0, 1.0, 1.5, 1.2), 1)]
        >>> LastBestRule().better_epoch(5, history, Measure()).epoch, LastBestRule().better_epoch(3, history[:2], Measure())
        (2, None)
        >>> LastBestRule(only_last_epochs=2).better_epoch(5, history, Measure()) is None
        True
        """
        named = [(record, name) for record in history if (name := measure.name([record])) is not None]
        errors = {record.epoch: errors_of(record.scores, measure.higher)[name] for record, name in named}
        if epoch % self.modulo != 0 and errors.get(epoch - 1, 0.0) <= self.filter_score:
            return None
        first = first if self.first_epoch is None else self.first_epoch
        first = first if self.only_last_epochs is None else max(first, epoch - self.only_last_epochs)
        named = [(record, name) for record, name in named if first <= record.epoch < epoch]
        if not named:
            return None
        last, last_name = named[-1]
        candidates = [record for record, name in named if name == last_name and errors[record.epoch] <= self.filter_score]
        candidates = candidates[-self.only_last_n :] if self.only_last_n >= 1 else candidates
        candidates = [record for record in candidates if errors[record.epoch] + self.min_score_dist < errors[last.epoch]]
        best = min(candidates, key=lambda record: (errors[record.epoch], record.epoch), default=None)
        return None if best is None or best.epoch == epoch - 1 else best


@dataclass(frozen=True, kw_only=True)
class LastBestKeys(Section):
    """Whether epochs begin with the best model."""

    changes_results = True
    dicts: ClassVar[Mapping[str, type]] = {"use_last_best_model": LastBestRule}

    use_last_best_model: bool | dict[str, Any] = key(
        False,
        "let an epoch begin with the model of the best earlier epoch, if that is not the last one, and with a new optimizer; a "
        "dict: its entries say for which epochs, and which earlier ones are considered. The score is that of newbob",
        needs="tensorflow-net-dict",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        return _parse(self.use_last_best_model)[1]

    @property
    def rule(self) -> LastBestRule | None:
        """None: every epoch continues with the last model."""
        return _parse(self.use_last_best_model)[0]


def _parse(value: bool | dict[str, Any]) -> tuple[LastBestRule | None, list[Problem]]:
    if not value:
        return None, []
    options = value if isinstance(value, dict) else {}
    rule, problems = build(LastBestRule, options, "use_last_best_model.", {})
    return rule, problems + unknown_options("use_last_best_model.", options, LastBestRule, "use_last_best_model")
