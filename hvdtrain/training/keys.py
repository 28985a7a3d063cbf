"""The keys of evaluations within epochs."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key, positive
from hvdtrain.data.keys import DataKeys
from hvdtrain.errors import Problem, problem
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys
from hvdtrain.schedule.rates import ScheduleKeys

USES = ("best_model", "early_stopping", "learning_rate")
"""What can use the scores of evaluations within epochs."""


@dataclass(frozen=True, kw_only=True)
class EvaluationKeys(Section):
    """Evaluations within epochs, in addition to those at their ends."""

    eval_interval_steps: int | None = key(
        None, "also evaluate within an epoch, after every N steps of the whole training", positive
    )
    eval_interval_minutes: float | None = key(
        None, "also evaluate within an epoch, when the last evaluation is N minutes old", positive
    )
    eval_interval_for: list[str] = key(
        ["best_model"],
        "what uses the scores of evaluations within epochs: best_model (best.json; the model is saved if it is the best so far), "
        "early_stopping (early_stopping_patience counts evaluations), learning_rate (newbob decides after every evaluation)",
        Rule(f"a list of {', '.join(USES)}", lambda value: set(value) <= set(USES)),
    )

    @property
    def is_used(self) -> bool:
        """Whether there are evaluations within epochs."""
        return self.eval_interval_steps is not None or self.eval_interval_minutes is not None

    def serves(self, use: str) -> bool:
        """Whether evaluations within epochs count for something."""
        return self.is_used and use in self.eval_interval_for

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        data = sections.get(DataKeys)
        ending = sections.get(EarlyStoppingKeys)
        schedule = sections.get(ScheduleKeys)
        problems: list[Problem] = []
        if not self.is_used:
            return problems
        name = "eval_interval_steps" if self.eval_interval_steps is not None else "eval_interval_minutes"
        if data is not None and data.dev is None and data.eval is None and not data.eval_datasets:
            problems += problem("missing", f"{name}: expected a dataset to evaluate (dev, eval or eval_datasets), got none")
        if self.serves("early_stopping") and ending is not None and ending.early_stopping_patience is None:
            problems += problem(
                "missing",
                "eval_interval_for: expected early_stopping_patience for 'early_stopping', got None (a number of evaluations)",
            )
        if self.serves("learning_rate") and schedule is not None and schedule.learning_rate_control == "constant":
            problems += problem(
                "missing", "eval_interval_for: expected learning_rate_control = 'newbob...' for 'learning_rate', got 'constant'"
            )
        return problems
