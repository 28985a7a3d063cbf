"""The keys of the model and its updates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.convert import signature_error
from hvdtrain.config.keys import ALONE, REQUIRED, Rule, Section, Sections, key, not_negative, positive, share
from hvdtrain.config.references import is_reference
from hvdtrain.errors import Problem, problem
from hvdtrain.learner.optimizer_spec import spec_problems


@dataclass(frozen=True, kw_only=True)
class LearnerKeys(Section):
    """The model and its updates."""

    get_model: Callable[..., Any] | str = key(
        REQUIRED, "function {signature} that returns the model; in JSON 'module:name'", signature="*, epoch, step, device, **_"
    )
    extra_models: dict[str, Any] = key(
        {},
        "further models for train_step and forward_step, such as the teacher of a distillation: for each name a dict of "
        "get_model and load, the file with its parameters; get_run_ctx().extra_models[NAME] is frozen, in evaluation mode, and "
        "not saved",
        needs="torch",
        instead="with TensorFlow, load it in get_model into a variable of the module, and make its layers not trainable",
    )
    train_step: Callable[..., Any] | str = key(
        REQUIRED,
        "function {signature} that marks the losses of a batch; used for evaluation, too (not for the tasks forward and search)",
        signature="*, model, extern_data, **_",
    )
    epoch_scores: dict[str, Any] = key(
        {},
        "scores of a whole dataset that are no means, such as BLEU: by name, a function of sums that train_step marks with "
        "mark_as_statistics, by their names, a metric of torchmetrics that train_step updates, or an object whose "
        "of_ranks(dataset, means) returns scores by name (docs/training.md)",
        needs=("torch", "tensorflow"),
    )
    forward_step: Callable[..., Any] | str | None = key(
        None, "task forward or search: function {signature} that marks a batch's outputs", signature="*, model, extern_data, **_"
    )
    optimizer: dict[str, Any] | list[dict[str, Any]] | str | Callable[..., Any] = key(
        {"class": "adam"},
        "the optimizer's class by name (or 'package.module.Class') and its options, a function {signature} that returns one, or "
        "a list of several such dicts, each with the parameters that it has (`parameters`; docs/optimizers.md)",
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
    count_flops: bool = key(
        False,
        "count the floating-point operations of a batch and measure the device's peak before training begins (about a second), "
        "and report the operations of each epoch and their share of the peak (docs/reports.md)",
        needs="torch",
        instead="--summary shows the layers; TensorFlow's profiler counts in graphs of known lengths only",
    )
    deterministic: bool = key(
        False,
        "compute with operations that give the same bits in every run on the same hardware, and end with an error where there is "
        "none: torch.use_deterministic_algorithms, cuDNN and cuBLAS, or TensorFlow's op determinism; some steps take longer",
    )
    device: str | None = key(None, "cpu, cuda or cuda:N; None: this rank's GPU where there is one, else the CPU")

    def problems(self, others: Sections = ALONE) -> list[Problem]:
        return [*self._score_problems(), *self._extra_problems(), *self._update_problems()]

    def _score_problems(self) -> list[Problem]:
        return [
            Problem.of("wrong-type", f"epoch_scores.{name}: expected a function, 'module:name' or a metric, got {value!r:.60}")
            for name, value in self.epoch_scores.items()
            if not callable(value) and not is_reference(value) and not hasattr(value, "of_ranks")
        ]

    def _extra_problems(self) -> list[Problem]:
        problems: list[Problem] = []
        for name, entry in self.extra_models.items():
            where = f"extra_models.{name}"
            if not isinstance(entry, dict) or entry.get("get_model") is None:
                problems += problem("wrong-type", f"{where}: expected a dict with the entry 'get_model', got {entry!r}")
                continue
            problems += [
                Problem.of("unknown-key", f"{where}.{name}: expected one of get_model, load, got {name!r}")
                for name in entry
                if name not in ("get_model", "load")
            ]
            get_model = entry["get_model"]
            load = entry.get("load")
            if not callable(get_model) and not is_reference(get_model):
                problems += problem("wrong-type", f"{where}.get_model: expected a function or 'module:name', got {get_model!r}")
            elif wrong := "" if isinstance(get_model, str) else signature_error(get_model, "*, epoch, step, device, **_"):
                problems += problem(
                    "wrong-signature", f"{where}.get_model: expected a function (*, epoch, step, device, **_), got {wrong}"
                )
            if load is not None and not isinstance(load, str):
                problems += problem("wrong-type", f"{where}.load: expected a model's file, got {load!r}")
        return problems

    def _update_problems(self) -> list[Problem]:
        if problems := spec_problems(self.optimizer):
            return problems
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
        return []
