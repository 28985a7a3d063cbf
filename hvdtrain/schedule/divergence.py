"""Whether training has diverged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hvdtrain.schedule.directions import base_of
from hvdtrain.schedule.history import META, EpochRecord
from hvdtrain.schedule.measure import TOTALS, with_totals

DIVERGENCE_FACTOR = 1000.0
"""A loss above this multiple of the initial loss has diverged."""


def has_diverged(
    history: Sequence[EpochRecord], scores: Mapping[str, float], losses: Mapping[str, float], initial: Mapping[str, float]
) -> bool:
    """Whether the loss that is minimized, or the sum of several, is far above that of the first epoch, in absolute terms, too: a
    loss that was almost zero may grow by any factor. In the first epoch, above that of its first batch.

    Args:
        history: the epochs before.
        scores, losses: those of the epoch, or of an evaluation within it.
        initial: as of `divergence_lines`.

    >>> has_diverged([], {"train_loss_ce": 4.8e31}, {"ce": 1.0}, {"train_loss_ce": 2.3})
    True
    >>> first = EpochRecord(1, 0.1, {"dev_loss_ce": 3e31}, is_diverged=True)
    >>> [has_diverged([first], {"dev_loss_ce": loss}, {"ce": 1.0}, {}) for loss in (2e31, 2.0)]
    [True, False]
    >>> has_diverged([EpochRecord(1, 0.1, {"dev_loss_ce": 1e-9})], {"dev_loss_ce": 0.5}, {"ce": 1.0}, {})
    False
    """
    compared = [name for name in scores if base_of(name) in (losses if len(losses) == 1 else TOTALS)]
    if not history:
        totals = {base_of(name): score for name, score in with_totals(initial, losses).items()}
        return any(_is_far_above(scores[name], totals.get(base_of(name))) for name in compared)
    first = history[0]
    scale = 1 / DIVERGENCE_FACTOR**2 if first.is_diverged else 1.0  # it still does, unless it comes down again
    return any(_is_far_above(scores[name], first.scores[name] * scale) for name in compared if name in first.scores)


def _is_far_above(loss: float, first: float | None) -> bool:
    return first is not None and abs(loss) > DIVERGENCE_FACTOR * max(abs(first), 1.0)


def divergence_lines(history: Sequence[EpochRecord], initial: Mapping[str, float], learning_rate: float) -> list[str]:
    """Warnings about losses of the last epoch that are finite, but far above the initial ones.

    Args:
        initial: the scores of the epoch's first batch by name, such as 'train_loss_ce', to compare the first epoch with.
        learning_rate: of the epoch's last update.

    >>> divergence_lines([EpochRecord(1, 0.1, {"train_loss_ce": 4.8e31}, {"ce": 1.0})], {"train_loss_ce": 2.3}, 0.1)[0][:81]
    'train_loss_ce of epoch 1 is 4.8e+31, more than 1000 times that of its first batch'
    """
    last = history[-1]
    before, when = (initial, "its first batch") if len(history) == 1 else (history[0].scores, f"epoch {history[0].epoch}")
    names = [name for name in last.scores if base_of(name) in (*last.losses, *TOTALS) and not name.startswith(META)]
    return [
        f"{name} of epoch {last.epoch} is {last.scores[name]:.4g}, more than {DIVERGENCE_FACTOR:g} times that of {when}, "
        f"{before[name]:.4g}: training diverges (learning rate {learning_rate:.4g}; a lower one, a warm-up in "
        "learning_rate_schedule, or gradient_clip_global_norm may help)"
        for name in names
        if abs(last.scores[name]) > DIVERGENCE_FACTOR * abs(before.get(name, 0.0)) > 0
    ]
