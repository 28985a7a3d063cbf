"""The score that compares epochs, whether lower or higher is better, and which epoch is best.

Unless a key names a score, it is the minimized loss: the only one, or the sum of several, each times its scale.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf, isnan, nan

from hvdtrain.config.check import did_you_mean
from hvdtrain.config.keys import Section, key
from hvdtrain.errors import Problem
from hvdtrain.schedule.directions import base_of, implies_higher_is_better
from hvdtrain.schedule.history import META, EpochRecord

TOTALS = ("total", "total_minimized")
"""The names for the sum of the minimized losses; the second one is used if train_step has a score of the first name."""


@dataclass(frozen=True, kw_only=True)
class ScoreKeys(Section):
    """Scores for which higher is better; for all others, lower is better."""

    higher_is_better: list[str] = key(
        [],
        "scores whose higher values are better, such as ['accuracy', 'bleu']: names that train_step marks, or single scores "
        "(dev_loss_bleu); for newbob, early stopping, best.json and cleanup_old_models",
    )


@dataclass(frozen=True)
class Measure:
    """How epochs are compared.

    Attributes:
        wanted: the names in the config, of which the first existing score is used; empty: the minimized loss.
        higher: the key higher_is_better.

    >>> history = [EpochRecord(1, 0.1, {"dev_loss_accuracy": 0.8, "dev_loss_ce": 0.4}, {"ce": 1.0})]
    >>> Measure().describe(history), Measure(["dev_loss_accuracy"], ["accuracy"]).describe(history)
    ('dev_loss_ce, lower is better', 'dev_loss_accuracy, higher is better')
    """

    wanted: Sequence[str] = ()
    higher: Collection[str] = ()

    def name(self, history: Sequence[EpochRecord]) -> str | None:
        """The score that compares the epochs; None if no epoch has one."""
        losses = minimized_in(history)
        names = (error_key(record.scores, self.wanted, losses, self.higher) for record in reversed(history))
        return next((name for name in names if name is not None), None)

    def best(self, history: Sequence[EpochRecord], min_difference: float = 0.0) -> EpochRecord | None:
        """The best epoch, the first of several that are equally good; None if no epoch with updates has a finite score."""
        name = self.name(history)
        return None if name is None else best_of(history, name, self.higher, min_difference)

    def is_higher_better(self, name: str) -> bool:
        return is_higher_better(name, self.higher)

    def describe(self, history: Sequence[EpochRecord]) -> str:
        """The score and its direction, for the log."""
        name = self.name(history)
        if name is None and not self.wanted:
            return "the loss that is minimized, lower is better"
        if name is None and FALLBACK in self.wanted:
            return f"{self.wanted[0]}, or the loss that is minimized"
        name = name or self.wanted[0]
        return f"{name}, {self.direction(name)}"

    def direction(self, name: str) -> str:
        """Whether lower or higher values of a score are better, for the log."""
        return f"{'higher' if self.is_higher_better(name) else 'lower'} is better"


def minimized_in(history: Iterable[EpochRecord]) -> Mapping[str, float]:
    """The minimized losses with their scales, from the newest epoch for which they are known."""
    return next((record.losses for record in reversed(list(history)) if record.losses), {})


def with_totals(scores: Mapping[str, float], losses: Mapping[str, float]) -> dict[str, float]:
    """The scores of an epoch, and for each dataset the sum of the minimized losses, times their scales.

    A dataset with a single one needs no sum, unless its scale is negative: for the sum, lower is better again.

    >>> with_totals({"dev_loss_ce": 1.0, "dev_loss_ctc": 2.0, "dev_loss_fer": 0.5}, {"ce": 1.0, "ctc": 0.25})
    {'dev_loss_ce': 1.0, 'dev_loss_ctc': 2.0, 'dev_loss_fer': 0.5, 'dev_loss_total': 1.5}
    """
    totals = dict(scores)
    names = {name.partition("_loss_")[2] for name in scores}
    total = TOTALS[1] if TOTALS[0] in names else TOTALS[0]
    for dataset in dict.fromkeys(name.partition("_loss_")[0] for name in scores if "_loss_" in name):
        parts = {name: scale for name, scale in losses.items() if f"{dataset}_loss_{name}" in scores}
        if len(parts) > 1 or any(scale < 0 for scale in parts.values()):
            totals[f"{dataset}_loss_{total}"] = sum(scale * scores[f"{dataset}_loss_{name}"] for name, scale in parts.items())
    return totals


def complete_history(history: Iterable[EpochRecord], losses: Mapping[str, float]) -> list[EpochRecord]:
    """The history, with sums added to epochs whose minimized losses are unknown: those of earlier releases or another program."""
    return [
        record if record.losses else replace(record, scores=with_totals(record.scores, losses), losses=dict(losses))
        for record in history
    ]


def is_higher_better(score: str, names: Collection[str]) -> bool:
    """Whether the key `higher_is_better` names a score.

    >>> is_higher_better("dev_loss_bleu", ["bleu"]), is_higher_better("dev_loss_ce", ["bleu"])
    (True, False)
    """
    return score in names or score.partition("_loss_")[2] in names


def negate_higher(history: list[EpochRecord], higher: Collection[str]) -> list[EpochRecord]:
    """The same history, with scores negated if higher is better, so that lower is."""
    if not higher:
        return history
    return [replace(record, scores=errors_of(record.scores, higher)) for record in history]


def errors_of(scores: Mapping[str, float], higher: Collection[str]) -> dict[str, float]:
    """The same scores, negated if higher is better."""
    return {name: -score if is_higher_better(name, higher) else score for name, score in scores.items()}


def best_of(
    history: Iterable[EpochRecord], score: str, higher: Collection[str], min_difference: float = 0.0
) -> EpochRecord | None:
    """The first epoch with the best finite value of a score, among those with updates; None if there is none.

    Args:
        min_difference: an epoch is better if its score is better by more than this.
    """
    best: EpochRecord | None = None
    lowest = inf
    for record in history:
        error = errors_of(record.comparable, higher).get(score, nan)
        if not isnan(error) and (best is None or error < lowest - min_difference):
            best = record
            lowest = error
    return best


def wanted_of(measure: str | Sequence[str] | None) -> list[str]:
    """The names in a key with a score, or with several scores of which the first existing one is used."""
    return [measure] if isinstance(measure, str) else list(measure or ())


FALLBACK = "*"
"""Allows, after the names of wanted scores, another score if none of them exists, instead of an error."""


def error_key(
    scores: Mapping[str, float],
    wanted: Sequence[str] = (),
    losses: Mapping[str, float] | None = None,
    higher: Collection[str] = (),
) -> str | None:
    """The score that controls the learning rate; None if there are no scores.

    The first wanted score that exists (each also with the suffix `_output`, the name of a network's main output), and None if
    none does. If none is wanted, or if `FALLBACK` follows missing ones: the minimized loss, or the sum of several, of dev, else
    of the first other dataset by name, else of train. If the minimized losses are unknown, as in the history of another
    program: dev_score, the first dev score in alphabetical order, train_score, the first score in alphabetical order; without
    scores whose names imply that higher is better, unless `higher` has them.

    Args:
        losses: the minimized losses with their scales; the scores include their sums (`with_totals`).

    >>> error_key({"train_loss_ce": 1.0, "dev_loss_wer": 0.2, "dev_loss_ce": 1.1})
    'dev_loss_ce'
    >>> error_key({"train_loss_ce": 1.0, "dev_loss_accuracy": 0.2, "dev_loss_ce": 1.1}, losses={"ce": 1.0})
    'dev_loss_ce'
    >>> error_key({"dev_loss_wer": 0.2, "dev_loss_ce": 1.1}, ["dev_loss_wer"])
    'dev_loss_wer'
    """
    names = sorted(name for name in scores if not name.startswith(META))
    name = next((name for score in wanted for name in (score, f"{score}_output") if name in names), None)
    if name is not None or (wanted and FALLBACK not in wanted):
        return name
    if losses and (name := _minimized_score(names, losses)) is not None:
        return name
    names = [name for name in names if is_higher_better(name, higher) or not implies_higher_is_better(base_of(name))] or names
    candidates = ["dev_score", "dev_score_output"]
    candidates += [name for name in names if name == "dev_score_output/output" or name.startswith("dev_score_output/output_")]
    candidates += [name for name in names if name.startswith("dev_score_output/")]
    candidates += [name for name in names if name.startswith("dev_")]
    candidates += ["train_score", "train_score_output", *names]
    return next((name for name in candidates if name in names), None)


def _minimized_score(names: Sequence[str], losses: Mapping[str, float]) -> str | None:
    datasets = {name.partition("_loss_")[0] for name in names if "_loss_" in name}
    for dataset in sorted(datasets, key=lambda dataset: (dataset != "dev", dataset == "train", dataset)):
        parts = [f"{dataset}_loss_{name}" for name in losses if f"{dataset}_loss_{name}" in names]
        totals = [f"{dataset}_loss_{name}" for name in reversed(TOTALS) if f"{dataset}_loss_{name}" in names]
        if len(parts) == 1 and losses[base_of(parts[0])] > 0:
            return parts[0]
        if parts and totals:
            return totals[0]
    return None


def missing_scores(
    history: Sequence[EpochRecord],
    measures: Mapping[str, str | Sequence[str] | None],
    higher: Collection[str],
    origins: Mapping[str, str],
) -> list[Problem]:
    """Problems with keys that name scores that no finished epoch has, with the existing scores.

    Args:
        measures: by key, the name of a score, or several of which one has to exist.
        higher: the key higher_is_better, of which all have to exist.
        origins: by key, where it is set.
    """
    existing = sorted({name for record in history for name in record.scores if not name.startswith(META)})
    wanted = [(key, wanted_of(measure)) for key, measure in measures.items()]
    missing = [(key, names) for key, names in wanted if names and error_key(dict.fromkeys(existing, 0.0), names) is None]
    missing += [("higher_is_better", [name]) for name in higher if not any(is_higher_better(score, [name]) for score in existing)]
    return [
        Problem.of(
            "unknown-value",
            f"{key}: expected one of the scores {', '.join(existing)}, got {' or '.join(map(repr, names))} in "
            f"{origins.get(key, 'the config')}{did_you_mean(names[0], existing)}",
        )
        for key, names in missing
    ]


def unclear_scores(history: Sequence[EpochRecord], higher: Collection[str]) -> list[str]:
    """The scores of the last epoch whose names imply that higher is better, but which are not in `higher_is_better`.

    For a minimized loss, lower is better, whatever its name.
    """
    losses = minimized_in(history)
    names = history[-1].scores if history else {}
    return sorted(
        name
        for name in names
        if implies_higher_is_better(base_of(name)) and base_of(name) not in losses and not is_higher_better(name, higher)
    )


def wrong_directions(
    history: Sequence[EpochRecord],
    measures: Mapping[str, str | Sequence[str] | None],
    all_scores: Sequence[str],
    higher: Collection[str],
    origins: Mapping[str, str],
) -> list[Problem]:
    """Problems with keys that would mistake the worst epochs for the best, as they use scores of `unclear_scores`.

    Args:
        measures: by key, the name of a score, or several of which the first existing one is used.
        all_scores: keys by which the best epochs by each score are chosen.
        origins: by key, where it is set.
    """
    unclear = unclear_scores(history, higher)
    used = {key: error_key(history[-1].scores, wanted_of(measure)) for key, measure in measures.items() if measure and history}
    if unclear:
        used |= dict.fromkeys(all_scores, next((name for name in unclear if not name.startswith("train_")), unclear[0]))
    return [
        Problem.of(
            "missing",
            f"{key}: expected a score whose lower values are better, or one in higher_is_better, got {name!r} in "
            f"{origins.get(key, 'the config')}, whose name says that higher values are better ({_remedy(name)})",
        )
        for key, name in used.items()
        if name in unclear
    ]


def unclear_line(history: Sequence[EpochRecord], measure: Measure) -> str | None:
    """The warning about unclear scores that no key uses; None: there are none."""
    names = list(dict.fromkeys(map(base_of, unclear_scores(history, measure.higher))))
    if not names:
        return None
    return f"{', '.join(names)}: the name implies that higher is better, so no best epoch is chosen by it ({_remedy(*names)})"


def changed_scales_line(history: Sequence[EpochRecord], measure: Measure) -> str | None:
    """The warning that epochs are compared by a sum of losses whose weights changed in the last epoch; None: they are not."""
    name = measure.name(history)
    if len(history) < 2 or name is None or base_of(name) not in TOTALS:
        return None
    before, last = history[-2].losses, history[-1].losses
    changed = sorted(loss for loss in {*before, *last} if before.get(loss, 0.0) != last.get(loss, 0.0))
    if not before or not last or not changed:
        return None
    return (
        f"{name}: the weights of {', '.join(changed)} differ between epochs {history[-2].epoch} and {history[-1].epoch}, so "
        "their sums cannot be compared: name the score that chooses the best epoch (early_stopping_measure)"
    )


def _remedy(*scores: str) -> str:
    names = list(dict.fromkeys(map(base_of, scores)))
    return f"set higher_is_better = {names}, or if lower is better, give it another name in train_step: {names[0]}_error"


def fallback_line(history: Sequence[EpochRecord], measure: Measure) -> str | None:
    """The warning that the score in use is not one that the config names; None: it is."""
    names = [name for name in measure.wanted if name != FALLBACK]
    used = measure.name(history)
    if FALLBACK not in measure.wanted or used is None or used.removesuffix("_output") in names or used in names:
        return None
    missing = " or ".join(map(repr, names))
    return f"learning_rate_control_error_measure: no score {missing} exists, so {used} is used"
