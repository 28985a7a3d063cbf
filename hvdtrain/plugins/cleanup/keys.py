"""The key `cleanup_old_models`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import ConfigError, Problem
from hvdtrain.plugins.cleanup.rule import parse_rule


@dataclass(frozen=True, kw_only=True)
class OldModelsKeys(Section):
    """Removing the models of earlier epochs."""

    cleanup_old_models: bool | dict[str, Any] = key(
        False,
        "after every epoch, remove all models but the last, the best, and some of earlier epochs; or a dict of keep_last_n (2), "
        "keep_best_n (4, by each score), keep (a list of epochs, such as []; if it is left out, a pattern such as every "
        "4th epoch of the first 10 and every 20th of the first 50), ignore_score_keys (scores whose best are not kept)",
    )

    @property
    def compares_all_scores(self) -> str | None:
        rule = parse_rule(self.cleanup_old_models)
        return "cleanup_old_models" if rule is not None and rule.keep_best_n > 0 else None

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        try:
            parse_rule(self.cleanup_old_models)
        except ConfigError as error:
            return error.problems
        return []
