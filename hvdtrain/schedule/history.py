"""The history of a training: learning rate and scores of the finished epochs; which score compares them, which epoch is the best,
and whether training ends before its last epoch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan

from hvdtrain.config.check import did_you_mean
from hvdtrain.config.keys import Section, key, not_negative, positive

META = ":meta:"
"""The prefix of entries in learning rate files that are metadata, not scores."""


@dataclass
class UsedRates:
    """The learning rates that the optimizer used in the updates of an epoch so far.

    >>> rates = UsedRates()
    >>> for rate in (0.25, 0.75, 0.5):
    ...     rates.add(rate)
    >>> rates.last, rates.summary()
    (0.5, {'first': 0.25, 'lowest': 0.25, 'highest': 0.75, 'mean': 0.5})
    """

    updates: int = 0
    first: float = 0.0
    last: float = 0.0
    lowest: float = 0.0
    highest: float = 0.0
    total: float = 0.0

    def add(self, rate: float) -> None:
        """Add the rate of one more update."""
        if not self.updates:
            self.first = self.lowest = self.highest = rate
        self.updates += 1
        self.last = rate
        self.lowest, self.highest = min(self.lowest, rate), max(self.highest, rate)
        self.total += rate

    def summary(self) -> dict[str, float] | None:
        """The first, lowest and highest rate and their mean; None if all are the same."""
        if self.lowest == self.highest:
            return None
        return {"first": self.first, "lowest": self.lowest, "highest": self.highest, "mean": self.total / self.updates}


@dataclass(frozen=True)
class EpochRecord:
    """The learning rate of a finished epoch, before a schedule scales it in each step, and its scores by key: 'dev_loss_ce'."""

    epoch: int
    learning_rate: float
    scores: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class ScoreKeys(Section):
    """Which scores are better if they are higher; all others are better if they are lower."""

    higher_is_better: list[str] = key(
        [],
        "scores whose higher values are better, such as ['accuracy', 'bleu']: names that train_step marks, or single scores "
        "(dev_loss_bleu); for newbob, early stopping, best.json and cleanup_old_models",
    )


def is_higher_better(score: str, names: Collection[str]) -> bool:
    """Whether the key `higher_is_better` names a score.

    >>> is_higher_better("dev_loss_bleu", ["bleu"]), is_higher_better("dev_loss_ce", ["bleu"])
    (True, False)
    """
    return score in names or score.partition("_loss_")[2] in names


def as_errors(history: list[EpochRecord], higher: Collection[str]) -> list[EpochRecord]:
    """The same history with the scores negated whose higher values are better, so that lower ones are."""
    if not higher:
        return history
    return [replace(record, scores=errors_of(record.scores, higher)) for record in history]


def errors_of(scores: Mapping[str, float], higher: Collection[str]) -> dict[str, float]:
    """The same scores, negated where higher values are better."""
    return {name: -score if is_higher_better(name, higher) else score for name, score in scores.items()}


def best_of(
    history: Iterable[EpochRecord], score: str, higher: Collection[str], min_difference: float = 0.0
) -> EpochRecord | None:
    """The first epoch with the best value of a score; None if no epoch has it.

    Args:
        min_difference: an epoch is better if its score is by more than this.
    """
    best: EpochRecord | None = None
    lowest = inf
    for record in history:
        error = errors_of(record.scores, higher).get(score, inf)
        if score in record.scores and (best is None or error < lowest - min_difference):
            best, lowest = record, inf if isnan(error) else error
    return best


def wanted_of(measure: str | Sequence[str] | None) -> list[str]:
    """The names in a key that names a score, or several of which the first that exists is used."""
    return [measure] if isinstance(measure, str) else list(measure or ())


def missing_scores(
    history: Sequence[EpochRecord],
    measures: Mapping[str, str | Sequence[str] | None],
    higher: Collection[str],
    origins: Mapping[str, str],
) -> list[str]:
    """Problems with keys that name scores which none of the finished epochs has, with the scores that there are.

    Args:
        measures: by key, the name of a score, or several of which one has to be there.
        higher: the key higher_is_better, of which all have to be there.
        origins: by key, where it is set.
    """
    there = sorted({name for record in history for name in record.scores if not name.startswith(META)})
    wanted = [(key, wanted_of(measure)) for key, measure in measures.items()]
    missing = [(key, names) for key, names in wanted if names and error_key(dict.fromkeys(there, 0.0), names) is None]
    missing += [("higher_is_better", [name]) for name in higher if not any(is_higher_better(one, [name]) for one in there)]
    return [
        f"{key}: expected one of the scores {', '.join(there)}, got {' or '.join(map(repr, names))} in "
        f"{origins.get(key, 'the config')}{did_you_mean(names[0], there)}"
        for key, names in missing
    ]


def error_key(scores: Mapping[str, float], wanted: Sequence[str] = ()) -> str | None:
    """The score that controls the learning rate, chosen as in RETURNN; None if there are no scores.

    The first of the wanted ones that exists (each also with the suffix `_output`, the name of a network's main output), and None
    if none of them does, where RETURNN takes another score. If none is wanted, the first of these: dev_score, the first dev
    score in alphabetical order, train_score, the first score in alphabetical order.

    >>> error_key({"train_loss_ce": 1.0, "dev_loss_wer": 0.2, "dev_loss_ce": 1.1})
    'dev_loss_ce'
    >>> error_key({"dev_loss_wer": 0.2, "dev_loss_ce": 1.1}, ["dev_loss_wer"])
    'dev_loss_wer'
    """
    names = sorted(name for name in scores if not name.startswith(META))
    if wanted:
        return next((name for one in wanted for name in (one, f"{one}_output") if name in names), None)
    candidates = ["dev_score", "dev_score_output"]
    candidates += [name for name in names if name == "dev_score_output/output" or name.startswith("dev_score_output/output_")]
    candidates += [name for name in names if name.startswith("dev_score_output/")]
    candidates += [name for name in names if name.startswith("dev_")]
    candidates += ["train_score", "train_score_output", *names]
    return next((name for name in candidates if name in names), None)


@dataclass(frozen=True, kw_only=True)
class EarlyStoppingKeys(Section):
    """When training ends before its last epoch."""

    early_stopping_patience: int | None = key(
        None, "end training after N consecutive epochs without a better score; None: never", positive
    )
    early_stopping_measure: str | None = key(
        None,
        "the score by which epochs are compared, such as dev_loss_ce, also for best.json; None: the score that newbob uses. "
        "Lower is better, but see higher_is_better",
    )
    early_stopping_min_difference: float = key(0.0, "an epoch is better if its score is better by more than this", not_negative)
    stop_on_nonfinite_train_score: bool = key(
        True, "end with an error when a training loss is not finite, reporting rank, step, sequences and parameters"
    )


def ends_early(
    keys: EarlyStoppingKeys,
    history: list[EpochRecord],
    newbob_measure: str | list[str] | None = None,
    higher: Collection[str] = (),
) -> str | None:
    """The reason to end training after the epochs of a history, for the log; None: training continues.

    Args:
        history: the finished epochs, oldest first.
        newbob_measure: the config's learning_rate_control_error_measure.
        higher: the scores whose higher values are better.
    """
    if keys.early_stopping_patience is None or not history:
        return None
    name = error_key(history[-1].scores, wanted_of(keys.early_stopping_measure or newbob_measure))
    best = None if name is None else best_of(history, name, higher, keys.early_stopping_min_difference)
    if name is None or best is None or history[-1].epoch - best.epoch < keys.early_stopping_patience:
        return None
    patience = keys.early_stopping_patience
    return f"{name} was best after epoch {best.epoch} ({best.scores[name]:.4g}), early_stopping_patience is {patience}"
