"""The keys of the model and its updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.keys import ALONE, REQUIRED, Section, Sections, key, not_negative, positive, share
from hvdtrain.errors import Problem
from hvdtrain.learner.optimizer_spec import spec_problems


@dataclass(frozen=True, kw_only=True)
class LearnerKeys(Section):
    """The model and its updates."""

    get_model: Callable[..., Any] | str = key(
        REQUIRED, "function {signature} that returns the model; in JSON 'module:name'", signature="*, epoch, step, device, **_"
    )
    train_step: Callable[..., Any] | str = key(
        REQUIRED,
        "function {signature} that marks the losses of a batch; used for evaluation, too (not for the tasks forward and search)",
        signature="*, model, extern_data, **_",
    )
    forward_step: Callable[..., Any] | str | None = key(
        None, "task forward or search: function {signature} that marks a batch's outputs", signature="*, model, extern_data, **_"
    )
    optimizer: dict[str, Any] | list[dict[str, Any]] | str | Callable[..., Any] = key(
        {"class": "adam"},
        "the optimizer's class by name (or 'package.module.Class') and its options, a function {signature} that returns one, or "
        "a list of several such dicts, each with the parameters that it has (`parameters`; docs/optimizers.md)",
        instead='each rank makes it for its model: {"class": "adam", "betas": ...}, or def optimizer(parameters) that returns it',
        signature="parameters",
    )
    gradient_clip_global_norm: float | None = key(
        None, "scale gradients down to this global norm, after they were reduced over the ranks", positive
    )
    gradient_clip: float | None = key(None, "clip each element of the gradients to [-V, V], after the reduction", positive)
    gradient_noise: float = key(
        0.0,
        "add normal noise with this standard deviation, truncated at two deviations, to the gradients, after the reduction and "
        "before clipping",
        not_negative,
    )
    change_gradients: Callable[..., Any] | str | None = key(
        None,
        "function {signature}, called before every update: it may read and change the gradients (`parameter.grad`), which are "
        "reduced over the ranks; before noise and clipping",
        signature="*, model, optimizer, **_",
        needs="torch",
    )
    num_allowed_consec_invalid_gradient_steps: int | None = key(
        None,
        "skip an update, on all ranks, if a gradient is not finite after the reduction, and end the training when more than N "
        "updates in a row were skipped; None: no update is skipped",
        positive,
    )
    ema_decay: float | None = key(
        None,
        "evaluate, and save as the model, an exponential moving average of the weights with this decay per update, such as "
        "0.999; the decay starts lower",
        share,
        needs=("torch", "tensorflow"),
    )
    objective_per_rank: bool = key(
        False,
        "minimize the objective of every rank's batch as it is: a normalized loss is divided by the batch's own count, and "
        "constraints such as L2 are added for every batch; False: by the count over all ranks, and once for an update",
        needs="tensorflow-net-dict",
    )
    deterministic: bool = key(
        False,
        "compute with operations that give the same bits in every run on the same hardware, and end with an error where there is "
        "none: torch.use_deterministic_algorithms, cuDNN and cuBLAS, or TensorFlow's op determinism; some steps take longer",
    )
    device: str | None = key(None, "cpu, cuda or cuda:N; None: this rank's GPU where there is one, else the CPU")

    def problems(self, sections: Sections = ALONE) -> list[Problem]:
        return spec_problems(self.optimizer)
