"""The keys of how steps compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, Rule, Section, Sections, key
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.reducers import ReduceKeys


@dataclass(frozen=True, kw_only=True)
class ComputeKeys(Section):
    """How steps compute."""

    changes_results = True

    sync_batch_norm: bool = key(
        False,
        "compute BatchNorm's statistics over the batches of all ranks (with horovod_reduce_type 'grad')",
        needs="torch",
    )
    freeze_until_step: dict[str, int] = key(
        {},
        "by patterns of parameters' names such as 'encoder.*', the number of steps for which they are not trained; of several "
        "patterns, the first one that matches",
        Rule("numbers of steps, zero or positive", lambda value: all(step >= 0 for step in value.values())),
        needs="torch",
        instead="TensorFlow traces the step as one graph: train twice, the second time from the first model (load)",
    )
    torch_compile: bool | dict[str, Any] = key(
        False,
        "compile the model in place: True, or a dict of the options of torch.compile and `modules`: the classes of modules, or "
        "their names, that are compiled one by one instead of the whole model",
        needs="torch",
        instead="Keras models have jit_compile",
    )
    checkpoint_modules: list[str] = key(
        [],
        "modules, by patterns of their names such as 'encoder.*', whose activations are not kept for backward but computed again "
        "(torch.utils.checkpoint): less memory, more time",
        needs="torch",
        instead="TensorFlow traces the step as one graph: use tf.recompute_grad in the model, or keras.RematScope in get_model",
    )
    split_on_oom: bool = key(
        False,
        "split a batch that does not fit into a rank's memory, and add up the gradients of its pieces, which are those of the "
        "batch; gradients are then sent after backward, not during it",
        needs="torch",
    )

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        if self.torch_compile is not False and self.checkpoint_modules:
            return problem(
                "conflict",
                "checkpoint_modules: expected torch_compile = False, got both (a compiled graph itself decides what it keeps)",
            )
        if self.split_on_oom and self.sync_batch_norm:
            return problem(
                "conflict",
                "split_on_oom: expected sync_batch_norm = False, got both (ranks that split batches communicate more often)",
            )
        if self.torch_compile is not False and self.sync_batch_norm:
            return problem(
                "conflict",
                "torch_compile: expected sync_batch_norm = False, got both (communication between ranks cannot be compiled)",
            )
        reduce = sections.get(ReduceKeys)
        if reduce is None or not self.sync_batch_norm or reduce.reduce_type == "grad":
            return []
        return problem(
            "conflict",
            f"sync_batch_norm: expected reduce_type 'grad', got {reduce.reduce_type!r}, with which every rank updates alone",
        )
