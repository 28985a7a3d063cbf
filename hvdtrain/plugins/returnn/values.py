"""Values of keys as RETURNN interprets them: those that mean off or default there, and keys that change others.

RETURNN tests `if value:` for most keys, so that 0, "", an empty list and None turn them off. hvdtrain's checks would refuse them,
so they are replaced by their meaning before the checks.
"""

from __future__ import annotations

from binascii import crc32
from collections.abc import Collection, Mapping
from numbers import Real
from typing import Any

from hvdtrain.config.overrides import OVERRIDING
from hvdtrain.plugins.returnn.names import is_no_op
from hvdtrain.schedule.measure import FALLBACK

DEFAULT: Any = object()
"""In `OFF`: hvdtrain's default, which is the same as off."""

FALSE: tuple[Any, ...] = (None, False, 0, "", (), [], {})
"""What is false in Python."""

NO_DATA: tuple[Any, ...] = (None, False, 0, "", {})
"""Values for no dataset. An empty list is refused, since a pattern may have matched no files."""


def _off(names: str, *values: Any, meaning: Any = DEFAULT) -> dict[str, tuple[tuple[Any, ...], Any]]:
    return dict.fromkeys(names.split(), (values, meaning))


OFF: dict[str, tuple[tuple[Any, ...], Any]] = {
    **_off("eval_datasets gradient_clip gradient_clip_global_norm gradient_noise learning_rate_control_error_measure", *FALSE),
    **_off("learning_rates load_model_post_hooks log online_shuffle_batches packed preload_from_files", *FALSE),
    **_off("use_last_best_model", *FALSE),
    **_off("cleanup_old_models", *FALSE, meaning=False),
    **_off("chunking", *FALSE, "0"),
    **_off("context_window", *FALSE, 1),
    **_off("dev eval forward_data search_data", *NO_DATA),
    **_off("cache_size learning_rate_control_min_num_epochs_per_new_lr mixed_precision search_output_file_format", None),
    **_off("start_epoch torch_distributed", None),
    **_off("newbob_learning_rate_decay newbob_learning_rate_growth", None, meaning=1.0),
    **_off(
        "import_model_train_epoch1 learning_rate_control learning_rate_file load output_file search_output_file task", None, ""
    ),
    **_off("accum_grad_multiple_step max_pad_size min_chunk_size min_learning_rate min_seq_length", None, 0),
    **_off("max_seq_length", None, 0, float("inf")),
    **_off("load_epoch", None, 0, -1),
    **_off("epoch_end epoch_start startup_callback", None, False),
    **_off("dynamic_learning_rate", None, False, ""),
    **_off("log_verbosity", None, []),
    **_off("batching device", ""),
}
"""By hvdtrain's name of a key: the values that turn it off or select its default in RETURNN, and the value that replaces them.
`tools/returnn_keys.py` writes docs/returnn_keys.md from it, next to RETURNN's defaults."""


IGNORED_WITH_TORCH = (
    "network",
    "get_network",
    "pretrain",
    "optimizer_epsilon",
    "use_last_best_model",
    "seq_drop",
    "inc_seq_length",
    "context_window",
)
"""Keys that RETURNN reads only for TensorFlow: without effect in a config for its PyTorch engine."""

DATASETS = ("dev", "eval", "forward_data", "search_data")


def is_off(name: str, value: Any) -> bool:
    """Whether a value of a key turns it off or selects its default in RETURNN.

    >>> is_off("gradient_clip", 0.0), is_off("gradient_clip", 5.0), is_off("load_epoch", -1), is_off("load_epoch", False)
    (True, False, True, False)
    """
    return name in OFF and any(_equal(value, off) for off in OFF[name][0])


def _equal(value: Any, off: Any) -> bool:
    """Whether two values are equal and of the same kind: 0 is 0.0, but not False."""
    if isinstance(off, Real) and not isinstance(off, bool):
        return isinstance(value, Real) and not isinstance(value, bool) and bool(value == off)
    return type(value) is type(off) and bool(value == off)


def convert_values(
    values: Mapping[str, Any], origins: Mapping[str, str], booleans: Collection[str] = (), *, for_returnn: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """Convert RETURNN's values to hvdtrain's with the same meaning.

    Args:
        values: the config's values by hvdtrain's names.
        booleans: the keys that are true or false.
        for_returnn: whether the config was written for RETURNN.

    Returns:
        The values, and remarks for the log about changed ones.
    """
    converted = dict(values)
    remarks = []
    for name, value in values.items():
        if value is None and name in booleans:
            converted[name] = False
        if is_off(name, value):
            meaning = OFF[name][1]
            if meaning is DEFAULT:
                del converted[name]
            else:
                converted[name] = meaning
    both = converted.get("use_horovod") and "torch_distributed" in converted
    if both and not {origins.get("use_horovod"), origins.get("torch_distributed")}.intersection(OVERRIDING):
        converted["use_horovod"] = False
        remarks.append("use_horovod: without effect, since torch_distributed connects the ranks, as in RETURNN")
    for task in ("forward", "search"):
        name = f"{task}_data"
        if isinstance(converted.get(name), str) and converted[name] in ("train", "dev", "eval"):
            converted[name] = converted.get(converted[name])
    if _is_true(converted.get("dry_run")) and converted.get("task", "train") == "train":
        converted |= {"task": "dry_run", "dry_run": None}
        remarks.append("dry_run: runs some steps and writes nothing, as --dry-run does")
    if for_returnn and _is_true(converted.get("use_dummy_datasets")) and converted.get("extern_data"):
        converted |= dummy_datasets(converted)
        remarks.append("use_dummy_datasets: RETURNN generates the data")
    if for_returnn and isinstance(converted.get("cleanup_old_models"), (list, tuple)):
        remarks.append("cleanup_old_models: expected a dict, got a list or tuple: as in RETURNN, the default rule holds")
        converted["cleanup_old_models"] = True
    measure = converted.get("learning_rate_control_error_measure")
    if for_returnn and measure:
        converted["learning_rate_control_error_measure"] = [*([measure] if isinstance(measure, str) else measure), FALLBACK]
    return converted, remarks


def _is_true(value: Any) -> bool:
    return value.lower() in ("true", "yes", "on", "1") if isinstance(value, str) else bool(value)


def dummy_datasets(values: Mapping[str, Any]) -> dict[str, Any]:
    """The datasets that RETURNN uses with `use_dummy_datasets` instead of the given ones."""

    def dummy(num_seqs: int, **more: Any) -> dict[str, Any]:
        return {"class": "DummyGenericDataset", "data_template": values["extern_data"], "num_seqs": num_seqs, **more}

    def fixed_dataset(name: str) -> dict[str, Any]:
        return dummy(num_seqs, fixed_random_seed=crc32(name.encode()))

    num_given: int | None = values.get("dummy_dataset_num_seqs")
    num_train: int = values.get("train_dummy_dataset_num_seqs", num_given) or 1000
    num_seqs = num_given or (max(num_train // 20, 1) if values.get("train") else 100)
    datasets = {name: fixed_dataset(name) for name in DATASETS if values.get(name)}
    if values.get("train"):
        datasets["train"] = dummy(num_train)
    if values.get("eval_datasets"):
        datasets["eval_datasets"] = {name: fixed_dataset(name) for name in values["eval_datasets"]}
    return datasets


def ignored_by_returnn(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The keys that a config for RETURNN's PyTorch engine sets but only its TensorFlow engine reads."""
    if values.get("backend", "torch") != "torch" or not values.get("get_model"):
        return ()
    return tuple(name for name in IGNORED_WITH_TORCH if name in values and not is_no_op(name, values[name]))
