"""Checks of the scores that keys name: an error if no epoch has such a score, or if the worst epoch would count as the best."""

from __future__ import annotations

from hvdtrain.errors import ConfigError, Problem
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import missing_scores, wrong_directions
from hvdtrain.settings import Settings


def refuse_wrong_directions(settings: Settings, history: list[EpochRecord]) -> None:
    """Raises: ConfigError, on all ranks, if keys take the worst of the finished epochs for the best one."""
    problems = wrong_directions_of(settings, history)
    if problems:
        raise ConfigError(problems).on_all_ranks()


def wrong_scores(settings: Settings, history: list[EpochRecord], *, is_saved: bool = True) -> ConfigError | None:
    """The error of all ranks if keys name scores that no epoch has had, or take the worst epoch for the best one.

    The names of scores are known once an epoch was evaluated.

    Args:
        is_saved: whether training can continue after the last epoch with other keys.
    """
    problems = missing_scores(history, measures_of(settings), settings.scoring.higher_is_better, settings.origins)
    problems += wrong_directions_of(settings, history)
    if not problems:
        return None
    if is_saved:
        saved = f"(epoch {history[-1].epoch} is saved: with other keys, the same command continues after it)"
        problems[-1] = Problem.of(problems[-1].rule, f"{problems[-1]} {saved}")
    return ConfigError(problems).on_all_ranks()


def wrong_directions_of(settings: Settings, history: list[EpochRecord]) -> list[Problem]:
    """Problems with keys that take the worst of the finished epochs for the best one."""
    all_scores = [key for section in settings.sections.values() if (key := section.compares_all_scores) is not None]
    return wrong_directions(history, measures_of(settings), all_scores, settings.scoring.higher_is_better, settings.origins)


def measures_of(settings: Settings) -> dict[str, str | list[str] | None]:
    """The scores that keys name, by key."""
    return {key: measure for section in settings.sections.values() for key, measure in section.measures.items()}
