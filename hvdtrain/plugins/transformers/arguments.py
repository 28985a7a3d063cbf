"""The names of transformers' TrainingArguments in our keys; what would change the training and has no counterpart is refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from functools import cached_property
from typing import Any

from hvdtrain.errors import ConfigError
from hvdtrain.plugins.other_trainer.trainer import fixed_number

WITHOUT_EFFECT = frozenset(
    {
        "average_tokens_across_devices", "bf16_full_eval", "dataloader_in_order",
        "dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers", "dataloader_pin_memory",
        "dataloader_prefetch_factor", "ddp_backend", "ddp_broadcast_buffers", "ddp_bucket_cap_mb",
        "ddp_find_unused_parameters", "ddp_static_graph", "ddp_timeout", "disable_tqdm", "do_eval", "do_predict", "do_train",
        "eval_accumulation_steps", "eval_do_concat_batches", "eval_use_gather_object", "include_num_input_tokens_seen",
        "local_rank", "log_level", "log_level_replica", "log_on_each_node", "logging_dir", "logging_first_step",
        "logging_nan_inf_filter", "logging_steps", "logging_strategy", "overwrite_output_dir", "prediction_loss_only",
        "project", "restore_callback_states_from_checkpoint", "resume_from_checkpoint", "run_name", "save_on_each_node",
        "save_only_model", "skip_memory_metrics", "sortish_sampler", "torch_empty_cache_steps", "use_cpu",
    }
)  # fmt: skip
"""Arguments about how a training is distributed, read or logged, which hvdtrain has other keys for: they change no result."""

LAYERS_WITHOUT_DECAY = (r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)")
"""The names of parameters that do not decay, as in the Trainer."""

KEY = "transformers_trainer"
IGNORED = -100
"""The label of an element without a loss."""

UPDATES_BETWEEN = 1e-6
"""How far a share of an epoch may be rounded below the number of updates that it stands for."""


class Arguments:
    """The arguments by name: those of a dict, a TrainingArguments or a Seq2SeqTrainingArguments, or else their defaults. Raises:
    ConfigError, with an argument that is unknown, or whose value hvdtrain cannot serve."""

    def __init__(self, value: Any) -> None:
        from transformers import Seq2SeqTrainingArguments

        defaults = {argument.name: default_of(argument) for argument in fields(Seq2SeqTrainingArguments)}
        if value is None or isinstance(value, Mapping):
            changed = dict(value or {})
        elif is_dataclass(value) and not isinstance(value, type):
            kind: Any = type(value)
            usual = kind(output_dir=getattr(value, "output_dir", None))  # which fills in some values
            names = [argument.name for argument in fields(value)]
            names = [name for name in names if name == "output_dir" or getattr(value, name) != getattr(usual, name)]
            changed = {name: getattr(value, name) for name in names}
        else:
            raise ConfigError.of("wrong-type", f"{KEY}.args: expected a TrainingArguments, or a dict of them, got {value!r}")
        self._values = defaults | changed
        served = SERVED | WITHOUT_EFFECT  # some of them in other releases of transformers only, such as warmup_ratio
        unknown = sorted(changed.keys() - defaults.keys() - served)
        for name in [*unknown, *(name for name in defaults if name not in served)]:
            if name in unknown or plain(self._values[name]) not in (plain(defaults[name]), *UNSET):
                raise ConfigError.of(
                    "unknown-value",
                    f"{KEY}.args: expected arguments that hvdtrain serves, got {name} = {changed[name]!r} "
                    "(docs/transformers.md has a table)",
                )

    def __getattr__(self, name: str) -> Any:
        return plain(self._values.get(name))

    @cached_property
    def keys(self) -> dict[str, Any]:
        return _lengths(self) | _optimizer(self) | _precision(self) | _saving(self)


UNSET: tuple[Any, ...] = (None, False, "", [], {}, "none")


def default_of(argument: Field[Any]) -> Any:
    if argument.default is not MISSING:
        return argument.default
    return argument.default_factory() if argument.default_factory is not MISSING else None


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def refuse(name: str, expected: str, got: Any) -> ConfigError:
    return ConfigError.of("unknown-value", f"{KEY}.args.{name}: expected {expected}, got {got!r}")


def _lengths(args: Arguments) -> dict[str, Any]:
    keys = {
        "num_epochs": max(1, math.ceil(args.num_train_epochs)),
        "max_seqs": args.per_device_train_batch_size,
        "max_seqs_dev": args.per_device_eval_batch_size,
        "accum_grad_multiple_step": args.gradient_accumulation_steps,
        "random_seed": args.seed,
    }
    if args.dataloader_drop_last:
        raise refuse("dataloader_drop_last", "False (each item is trained exactly once in an epoch)", True)
    return keys | ({"deterministic": True} if args.full_determinism else {})


def _optimizer(args: Arguments) -> dict[str, Any]:
    options = dict(option.split("=") for option in args.optim_args.replace(" ", "").split(",")) if args.optim_args else {}
    adam = {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    kinds: dict[str, dict[str, Any]] = {
        "adamw_torch": {"class": "adamw", **adam},
        "adamw_torch_fused": {"class": "adamw", **adam, "fused": True},
        "adafactor": {"class": "transformers.optimization.Adafactor", "scale_parameter": False, "relative_step": False},
        "sgd": {"class": "sgd"},
        "adagrad": {"class": "adagrad"},
        "rmsprop": {"class": "rmsprop"},
    }
    if args.optim not in kinds or options:
        raise refuse("optim", f"one of {', '.join(kinds)}, without optim_args (or the key optimizer)", args.optim)
    spec = {**kinds[args.optim], "weight_decay": args.weight_decay, "param_groups_custom": decayed_and_others}
    clip = {"gradient_clip_global_norm": args.max_grad_norm} if args.max_grad_norm else {}
    return {"optimizer": spec, "learning_rate": args.learning_rate, **clip}


def decayed_and_others(*, model: Any, optimizer_opts: Mapping[str, Any], **_: Any) -> list[dict[str, Any]]:
    """The Trainer's two groups of parameters: neither norms nor biases decay."""
    from torch.nn import LayerNorm
    from transformers.trainer_pt_utils import get_parameter_names

    decayed = set(get_parameter_names(model, [LayerNorm], list(LAYERS_WITHOUT_DECAY)))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    weight_decay = optimizer_opts.get("weight_decay", 0.0)
    groups = [
        {"params": [parameter for name, parameter in trained if name in decayed], "weight_decay": weight_decay},
        {"params": [parameter for name, parameter in trained if name not in decayed], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _precision(args: Arguments) -> dict[str, Any]:
    if args.bf16 and args.fp16:
        raise refuse("fp16", "either it or bf16", True)
    keys: dict[str, Any] = {"mixed_precision": "bfloat16"} if args.bf16 else {"mixed_precision": "float16"} if args.fp16 else {}
    if args.torch_compile or args.torch_compile_backend or args.torch_compile_mode:
        options = {"backend": args.torch_compile_backend, "mode": args.torch_compile_mode}
        keys["torch_compile"] = {name: value for name, value in options.items() if value is not None} or True
    return keys


def _saving(args: Arguments) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if args.eval_strategy == "steps":
        keys["eval_interval_steps"] = whole("eval_steps", args.eval_steps or args.logging_steps)
    if args.save_strategy == "steps":
        keys["save_interval_steps"] = whole("save_steps", args.save_steps)
    if args.save_total_limit is not None:
        keys["cleanup_old_models"] = {"keep_last_n": args.save_total_limit, "keep_best_n": 1, "keep": []}
    if (metric := args.metric_for_best_model) is not None:
        name = metric.removeprefix("eval_")
        keys["early_stopping_measure"] = f"dev_loss_{name}"
        better = not metric.endswith("loss") if args.greater_is_better is None else args.greater_is_better  # as the class has it
        keys["higher_is_better"] = [name] if better else []
    trackers = [args.report_to] if isinstance(args.report_to, str) else list(args.report_to or [])
    if unknown := [name for name in trackers if name not in ("tensorboard", "wandb", "mlflow", "none")]:
        raise refuse("report_to", "tensorboard, wandb or mlflow (or the key trackers)", unknown[0])
    if "tensorboard" in trackers:
        keys["use_tensorboard"] = True
    if services := [name for name in trackers if name not in ("tensorboard", "none")]:
        keys["trackers"] = services
    if args.output_dir is not None:
        keys["model"] = f"{args.output_dir}/model"
    return keys


def whole(name: str, steps: float) -> int:
    if steps < 1:
        raise refuse(name, "a number of steps", steps)
    return int(steps)


SERVED = frozenset(
    {
        "adam_beta1", "adam_beta2", "adam_epsilon", "bf16", "data_seed", "dataloader_drop_last", "eval_steps", "eval_strategy",
        "fp16", "full_determinism", "generation_config", "generation_max_length", "generation_num_beams",
        "gradient_accumulation_steps", "gradient_checkpointing", "gradient_checkpointing_kwargs", "greater_is_better",
        "label_names", "label_smoothing_factor", "learning_rate", "length_column_name", "load_best_model_at_end",
        "lr_scheduler_kwargs", "lr_scheduler_type", "max_grad_norm", "max_steps", "metric_for_best_model", "num_train_epochs",
        "optim", "optim_args", "output_dir", "per_device_eval_batch_size", "per_device_train_batch_size",
        "predict_with_generate", "remove_unused_columns", "report_to", "save_steps", "save_strategy", "save_total_limit",
        "seed", "torch_compile", "torch_compile_backend", "torch_compile_mode", "train_sampling_strategy", "use_cache",
        "warmup_ratio", "warmup_steps", "weight_decay",
    }
)  # fmt: skip
"""Arguments that have an effect here. All others have to have their default."""


def items_in_update(keys: Mapping[str, Any], size: int) -> int:
    in_batch = (
        fixed_number(KEY, keys, "max_seqs_total") if "max_seqs_total" in keys else fixed_number(KEY, keys, "max_seqs") * size
    )
    return in_batch * fixed_number(KEY, keys, "accum_grad_multiple_step")


class Extent:
    """How long a training is: the Trainer's number of updates, of which the last epoch may have only the first ones.

    Args:
        keys: those of the config, and those that follow from the arguments.
        num_items: of the training data.
        size: the number of ranks.
        has_num_epochs: whether the config says how many epochs there are.
    """

    def __init__(self, args: Arguments, keys: Mapping[str, Any], num_items: int, size: int, has_num_epochs: bool) -> None:
        self.num_items = num_items
        self._accumulated = fixed_number(KEY, keys, "accum_grad_multiple_step")
        self.in_update = items_in_update(keys, size)
        self.of_epoch = math.ceil(num_items / self.in_update)
        epochs = keys["num_epochs"] if has_num_epochs else args.num_train_epochs
        self.updates = int(args.max_steps) if args.max_steps > 0 and not has_num_epochs else math.ceil(epochs * self.of_epoch)

    @property
    def keys_of_train(self) -> dict[str, Any]:
        return {"max_batches": self._batches} if self.updates % self.of_epoch else {}

    @property
    def num_epochs(self) -> int:
        return math.ceil(self.updates / self.of_epoch)

    def items_in(self, epoch: int) -> int:
        return min(self.num_items, self._updates_from(epoch) * self.in_update)

    def _updates_from(self, epoch: int) -> int:
        return max(1, self.updates - (epoch - 1) * self.of_epoch)

    def _batches(self, *, epoch: int, **_: Any) -> int | None:
        """Those of a rank in an epoch; None: all."""
        updates = self._updates_from(epoch)
        return None if updates >= self.of_epoch else updates * self._accumulated


def rates(args: Arguments, extent: Extent) -> Callable[..., float]:
    """The function `dynamic_learning_rate`, with the Trainer's rate of each update.

    It follows the share of the epoch's items, so it is the same on any number of ranks if the items of an update are.
    """
    factor: list[Callable[[int], float]] = []

    def rate(*, epoch: int, epoch_continuous: float, learning_rate: float, **_: Any) -> float:
        if not factor:
            factor.append(_factor(args, extent.updates, learning_rate))
        share = epoch_continuous - (epoch - 1)
        within = math.floor(share * extent.items_in(epoch) / extent.in_update + UPDATES_BETWEEN)
        return learning_rate * factor[0]((epoch - 1) * extent.of_epoch + within)

    return rate


def _factor(args: Arguments, total: int, learning_rate: float) -> Callable[[int], float]:
    """The factor on the rate by update; schedules with rates of their own, such as min_lr, depend on it. Raises: ConfigError."""
    import torch
    from transformers import get_scheduler

    warmup = args.warmup_steps or args.warmup_ratio or 0
    warmup = int(warmup) if warmup >= 1 else math.ceil(total * warmup)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], learning_rate)
    kwargs = args.lr_scheduler_kwargs
    schedule = get_scheduler(args.lr_scheduler_type, optimizer, warmup, total, dict(kwargs) if kwargs else None)
    factors = getattr(schedule, "lr_lambdas", None)
    if factors is None:
        raise refuse(
            "lr_scheduler_type", "one whose rate follows from the step (or learning_rate_control)", args.lr_scheduler_type
        )
    return factors[0]  # type: ignore[no-any-return]
