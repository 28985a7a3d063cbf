"""What is remembered of the epochs before: their learning rates and scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

META = ":meta:"
"""What a score's name begins with where it is no score but a note (in learning-rate files)."""


@dataclass(frozen=True)
class EpochRecord:
    """What is remembered of a finished epoch: its learning rate and its scores by key, such as 'dev_loss_ce'."""

    epoch: int
    learning_rate: float
    scores: dict[str, float] = field(default_factory=dict)


def error_key(scores: Mapping[str, float], wanted: Sequence[str] = ()) -> str | None:
    """The score that the learning rate is controlled by, chosen as RETURNN chooses it; None where there are no scores.

    The first that is there of: those wanted (also with `_output` behind, the name of a network's main output), the score of dev,
    any score of dev in alphabetical order, the score of the training, the first of all in alphabetical order.

    >>> error_key({"train_loss_ce": 1.0, "dev_loss_wer": 0.2, "dev_loss_ce": 1.1})
    'dev_loss_ce'
    >>> error_key({"dev_loss_wer": 0.2, "dev_loss_ce": 1.1}, ["dev_loss_wer"])
    'dev_loss_wer'
    """
    names = sorted(name for name in scores if not name.startswith(META))
    likely = [name for one in wanted for name in (one, f"{one}_output")] + ["dev_score", "dev_score_output"]
    likely += [name for name in names if name == "dev_score_output/output" or name.startswith("dev_score_output/output_")]
    likely += [name for name in names if name.startswith("dev_score_output/")]
    likely += [name for name in names if name.startswith("dev_")]
    likely += ["train_score", "train_score_output", *names]
    return next((name for name in likely if name in names), None)
