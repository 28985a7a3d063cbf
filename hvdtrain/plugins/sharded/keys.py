"""The key of optimizers that are divided among the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import ALONE, Section, Sections, key
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.reducers import ReduceKeys


@dataclass(frozen=True, kw_only=True)
class ShardingKeys(Section):
    """An optimizer's state on several ranks."""

    sharded: bool = key(
        False,
        "shard the optimizer state over the ranks, for models that do not fit otherwise (with reduce_type 'grad')",
        names=("torch_distributed.sharded",),
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        reduce = sections.get(ReduceKeys)
        if not self.sharded or reduce is None or reduce.reduce_type == "grad":
            return []
        return problem(
            "conflict",
            "torch_distributed.sharded: expected reduce_type 'grad', where all ranks apply the same update, got "
            f"{reduce.reduce_type!r}",
        )
