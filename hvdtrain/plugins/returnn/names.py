"""Keys of RETURNN that have another name in hvdtrain, are not supported, or have no effect here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Number
from types import ModuleType
from typing import Any

ALIASES = {
    "learning_rate_decay": "newbob_learning_rate_decay",
    "learning_rate_growth": "newbob_learning_rate_growth",
    "torch_amp": "mixed_precision",
    "packed_tensors": "packed",
}
"""By RETURNN's name of a key, hvdtrain's name."""

EPOCH_OF_MODEL = {"epoch": "load_epoch"}
"""More of them, for tasks in which RETURNN reads `epoch` as that of the model."""

UNSUPPORTED = {
    "network": "hvdtrain trains configs that define get_model and train_step",
    "get_network": "hvdtrain trains configs that define get_model and train_step",
    "optimizer_epsilon": "set epsilon in the dict `optimizer`",
    "dry_run": "the option --dry-run, or task = 'dry_run'",
    "pretrain": "none",
    "chunking_variance": "none",
    "default_float_dtype": "with a config that imports the installed RETURNN, a type of PyTorch such as 'bfloat16' is honoured; "
    "otherwise create the model with that dtype in get_model",
    "gradient_clip_norm": "set gradient_clip_global_norm",
    "gradient_clip_avg_norm": "set gradient_clip_global_norm",
    "inc_seq_length": "set max_seq_length",
    "packed_batch_cost": "set batch_cost, a function of the lengths of all sequences, and packed_batch_size",
    "packed_batch_cost_train": "set batch_cost, a function of the lengths of all sequences, and packed_batch_size_train",
    "packed_batch_cost_dev": "set batch_cost, a function of the lengths of all sequences, and packed_batch_size_dev",
    "torch_batching": "batches are planned from the lengths, on every rank, not made from a stream: set batch_size, max_seqs or "
    "max_pad_size, seq_ordering in the dataset's dict, shuffle_batches; docs/batches.md has all limits",
    "seq_drop": "none",
    "dataset_random_seed_offset": "set random_seed_offset in the dataset's dict",
    "window": "stack the frames in the model, or in map_seq of a MapDataset",
    "shuffle_frames_of_nseqs": "shuffle the frames in map_seq of a MapDataset",
    "grad_clip": "set gradient_clip",
    "gradient_nan_inf_filter": "num_allowed_consec_invalid_gradient_steps skips updates whose gradients are not finite",
    "grad_norm_to_clip_to_zero": "none",
    "maximize_grad_norm": "none",
}
"""Keys of RETURNN that are refused, since ignoring them would change the training, with what to do instead."""

KEYS_OF_NETWORKS = frozenset(
    """
    network get_network pretrain pretrain_construction_algo pretrain_copy_output_layer pretrain_greedy pretrain_learning_rate
    pretrain_repetitions init_new_network_callback reinit_network_each_epoch use_learning_rate_control_always
    optimizer_epsilon gradient_clip_norm gradient_clip_avg_norm gradient_nan_inf_filter grad_norm_to_clip_to_zero search_do_eval

    adadelta adagrad adam combine_labels ctc_prior_file debug_add_check_numerics_on_output debug_add_check_numerics_ops
    debug_print_layer_output debug_print_layer_output_shape debug_print_layer_output_template debug_rec_layer
    debug_runtime_sanity_checks decouple_constraints decouple_constraints_factor default_input deterministic_train exclude
    extra_updates flat_net_construction forward_output_layer forward_use_search global_norm_tag gradient_clip_global_norm_tag
    inf_value load_ignore_missing_vars loss momentum nadam optimize_move_layers_out optimizer_use_locking param_dropout
    param_dropout_min_ndim param_variational_noise rmsprop search_train_network_layers target tf_native_ctc_zero_infinity
    tf_session_opts use_tensorflow
    """.split()
)
"""Keys that the functions of RETURNN read which build a network and its updater: honoured in configs with a network."""

TORCH_DISTRIBUTED = {
    "class": "gradients are reduced without a wrapper around the model",
    "options": "gradients are reduced without a wrapper around the model",
    "sync_on_cpu": "backend 'gloo' averages on the CPU",
    "sync": "set reduce_type, param_sync_step and the related keys",
    "sync_optimizer_state": "every rank keeps the state of its optimizer",
    "sync_at_epoch_end": "the ranks always have the same parameters at the end of an epoch",
    "sync_complete_frac": "every rank knows how many steps an epoch has",
}
"""RETURNN's entries of the dict torch_distributed that hvdtrain does not need, with the reason."""

OF_THE_WRAPPER = (
    "find_unused_parameters", "static_graph", "bucket_cap_mb", "gradient_as_bucket_view", "broadcast_buffers", "check_reduction",
)  # fmt: skip
"""Arguments of torch's DistributedDataParallel in the entry `options` that do not change gradients; there is no wrapper here."""

NO_OPS: dict[str, tuple[Any, ...]] = {"window": (1,), "default_float_dtype": ("float32",)}
"""Values of unsupported keys without effect, in addition to None, False, 0, '' and empty lists and dicts."""

OFF_WORDS = ("false", "no", "off", "none", "0", "0.0")
"""Such values as words."""

ELSEWHERE = {
    "stop_for_resubmission_when_low_time_left": "set time_limit, or submit with hvdtrain submit",
    "tensorboard_opts": "use_tensorboard writes after every epoch, and within it every log_interval_steps",
    "wandb_opts": 'trackers = [{"class": "wandb", ...}]',
    "torch_dataloader_opts": "every rank reads ahead; num_workers of a MapDataset",
    "torch_profile": "hvdtrain doctor",
    "file_cache_opts": "set cache_dir",
    "use_cache_manager": "set cache_dir",
    "log_format": "the format of the log is fixed",
}
"""For some keys without effect, hvdtrain's counterpart."""

BY_VALUES = frozenset(("use_dummy_datasets", "dummy_dataset_num_seqs", "train_dummy_dataset_num_seqs"))
"""Names that `values.py` reads in configs for RETURNN."""

READ_BY_RETURNN = KEYS_OF_NETWORKS.difference(UNSUPPORTED).union(
    """
    EnableAutoNumpySharedMemPickling PYTORCH_CUDA_ALLOC_CONF SprintInterfacePythonFeatureScorer allow_random_model_init
    allow_skipping_seqs_in_forward analyze_dataset apply_cleanup_old_models_to_optim_states calculate_exp_loss
    check_learning_rates check_unsupported_device chunk_eval conv_pad_seq_len_to_power data_key dataset_pipeline
    debug_grad_summaries debug_objective_loss_summaries debug_save_updater_vars debug_shell_before_train_loop
    debug_shell_in_runner debug_shell_in_runner_step debug_unnormalized_loss_summaries distributed_tf enforce_min_len1 epoch
    eval_batch_size eval_learning_rate eval_output_file eval_output_file_per_seq eval_use_train_flag extract file_cache_opts
    forward_auto_split_batch_on_oom forward_batch_size forward_override_hdf_output gpu_local_cpu_affinity hyper_param_tuning
    init_train_epoch_posthook ipython jax_amp jax_compilation_cache_dir jax_data_prefetch jax_default_matmul_precision
    jax_jit jax_static_shapes jax_time_buckets lm_dataset_debug_limit_line_count log_format log_grad_norm loss_name need_data
    on_size_limit onnx_export output_per_seq_file_format output_per_seq_format packed_fallback_allowed patch_atfork
    propagate_behavior_version_to_subprocs reset_dev_memory_caches reset_updater_vars_mod_step restart_after_num_net_reinit
    save_epoch1_initial_model seq_drop_freq share_batches sil_label_idx sort_dataset sparse_input
    sprint_interface_custom_dataset sprint_interface_dataset_opts sprint_trainer_exec_path start_batch statistics
    statistics_dtype statistics_save_prefix stop_for_resubmission_safety_factor stop_for_resubmission_when_low_time_left
    store_metadata_mod_step store_tf_profile tensorboard_opts tf_amp tf_cudnn_autotune tf_data_provider_capacity tf_jit
    tf_log_dir tf_log_memory_usage tf_profile_step tf_profiler_logdir tf_run_options tf_static_shapes torch_cuda_graph
    torch_dataloader_opts torch_dataloader_shard_workers torch_optimizer_step torch_profile torch_watch_stall train_in_eval
    update_batch_size use_hot_reloading use_lovely_tensors use_train_proc_manager wandb_opts watch_memory web_server_port
    wrap_tf_session
    """.split()
)
"""Names that RETURNN reads from a config and hvdtrain does not; if a config sets one, the log says so.

They are the arguments of `config.value("...")`, `config.typed_value("...")`, `config.bool("...")` and the like, and of
`typed_dict["..."]`, in the sources of RETURNN 1.20261022 (`tools/returnn_keys.py` prints them), without hvdtrain's own keys,
the tables above, and behavior_version and rf_*, which concern only returnn.frontend.
"""


def is_no_op(name: str, value: Any) -> bool:
    """Whether the value of a key of RETURNN has no effect, or is a module or a class, so that the name is no key."""
    if value is None or value is False or isinstance(value, (ModuleType, type)):
        return True
    if isinstance(value, str) and value.lower() in OFF_WORDS:
        return True
    if isinstance(value, (str, Number)) and not isinstance(value, bool) and not value:
        return True
    if isinstance(value, (list, tuple, dict)) and not value and name in UNSUPPORTED:
        return True
    return not isinstance(value, bool) and any(type(value) is type(no_op) and value == no_op for no_op in NO_OPS.get(name, ()))


def explain(name: str) -> str | None:
    """What hvdtrain does with a key of RETURNN that has no counterpart; None: it is not one that hvdtrain knows."""
    instead = UNSUPPORTED.get(name)
    reason = "" if instead in (None, "none") else f": {instead}"
    if name in ("network", "get_network"):
        return "RETURNN's key for a TensorFlow network, which hvdtrain trains with RETURNN's layers (docs/returnn.md)"
    if name in KEYS_OF_NETWORKS:
        with_get_model = "" if instead is None else f"; with get_model, hvdtrain refuses it{reason}"
        return f"a key of RETURNN that has its meaning where network or get_network is set (docs/returnn.md){with_get_model}"
    return None if instead is None else f"a key of RETURNN that hvdtrain refuses{reason}"


def without_effect(values: Mapping[str, Any]) -> list[str]:
    """The keys in a config that RETURNN reads and hvdtrain ignores, each with its counterpart, if there is one."""
    names = [name for name in values if name in READ_BY_RETURNN and not is_no_op(name, values[name])]
    names += [f"{name}.{entry}" for name in ("train", "dev", "eval") for entry in _entries(values.get(name), "use_cache_manager")]
    return [f"{name} ({ELSEWHERE[last]})" if (last := name.split(".")[-1]) in ELSEWHERE else name for name in names]


def _entries(dataset: Any, wanted: str) -> Iterator[str]:
    """The paths at which an entry is set in a dataset's dict and in the dicts inside it."""
    if not isinstance(dataset, Mapping):
        return
    if dataset.get(wanted):
        yield wanted
    inside = dataset.get("datasets")
    for name, value in inside.items() if isinstance(inside, Mapping) else ():
        yield from (f"datasets.{name}.{entry}" for entry in _entries(value, wanted))
    yield from (f"dataset.{entry}" for entry in _entries(dataset.get("dataset"), wanted))
