"""Scores of a whole dataset that are no means, such as BLEU: functions of sums, and metrics of torchmetrics (`epoch_scores`)."""

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.config.plugins import Plugin
from hvdtrain.config.references import is_reference
from hvdtrain.errors import Problem


@dataclass(frozen=True, kw_only=True)
class EpochScoreKeys(Section):
    """Scores of a whole dataset that are no means."""

    epoch_scores: dict[str, Any] = key(
        {},
        "scores of a whole dataset that are no means, such as BLEU: by name, a function of sums that train_step marks with "
        "mark_as_statistics, by their names, a metric of torchmetrics that train_step updates, or an object whose "
        "of_ranks(dataset, means) returns scores by name (docs/training.md)",
        needs=("torch", "tensorflow"),
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        return [
            Problem.of("wrong-type", f"epoch_scores.{name}: expected a function, 'module:name' or a metric, got {value!r:.60}")
            for name, value in self.epoch_scores.items()
            if not callable(value) and not is_reference(value) and not hasattr(value, "of_ranks")
        ]


PLUGIN = Plugin(scorings={"scores": f"{__name__}.functions:open_scoring"}, keys={"scores": EpochScoreKeys})
