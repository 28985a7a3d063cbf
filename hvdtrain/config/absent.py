"""The names that hvdtrain's own plug-ins add to configs and command lines, for messages where a plug-in's folder is missing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.errors import ConfigError

NAMES = {
    "average": "average average_checkpoints running_average",
    "bars": "tqdm",
    "cache": "cache_size",
    "chunks": "chunking min_chunk_size chunking_tail context_window",
    "cleanup": "cleanup_old_models",
    "combine": "FilesDataset CombinedDataset ConcatDataset MixingDataset MetaDataset MapDataset",
    "completion": "completion",
    "compute": "compute sync_batch_norm freeze_until_step torch_compile checkpoint_modules split_on_oom",
    "compression": "powersgd int8 int4 int2",
    "copies": "cache_dir cache_dir_size",
    "doctor": "doctor build-horovod",
    "epoch_scores": "epoch_scores",
    "epoch_keys": "keys_of_epoch",
    "espnet": "espnet_model espnet",
    "extra_models": "extra_models",
    "forward": "forward search output_file forward_callback",
    "frozen_base": "frozen_base save_parameters",
    "goodput": "goodput",
    "hdf_tools": "dump check",
    "horovod": "horovod elastic_horovodrun",
    "init": "init",
    "inspect": "summary export count_flops",
    "lengths": "lengths_dir",
    "lightning": "lightning_module datamodule lightning_callbacks lightning_trainer num_val_loaders save_ckpt lightning",
    "local_disk": "checkpoint_local",
    "packed": "Packed",
    "param_average": "param horovod_param_sync_step horovod_param_sync_time_diff horovod_param_sync_rule "
    "horovod_param_sync_delay horovod_param_sync_parts horovod_param_outer horovod_param_group horovod_param_start",
    "optimizer_modes": "optimizer_modes",
    "local_ranks": "ngpu",
    "other_trainer": "OtherTrainer",
    "preload": "preload_from_files",
    "programs": "Average Best Result evaluate forward load_model train",
    "prove": "prove",
    "reductions": "all_reduce",
    "remote": "fsspec",
    "same_data": "accept_changed_data",
    "report": "report card",
    "returnn": "tensorflow-net-dict NextGenHDFDataset ReturnnDataset network returnn search_output_file "
    "search_output_file_format search_output_layer search_labels use_last_best_model epoch_start "
    "epoch_end",
    "several_optimizers": "several_optimizers",
    "sharded": "sharded torch_distributed.sharded",
    "schedules": "newbob newbob_rel newbob_relative newbob_abs newbob_multi_epoch learning_rate_schedule min_learning_rate "
    "learning_rate_control_relative_error_relative_lr learning_rate_control_min_num_epochs_per_new_lr newbob_learning_rate_decay "
    "newbob_learning_rate_growth newbob_relative_error_threshold newbob_relative_error_div_by_old newbob_error_threshold "
    "newbob_multi_num_epochs newbob_multi_update_interval newbob_relative_error_grow_threshold learning_rate_file",
    "speechbrain": "brain speechbrain",
    "speech": "KaldiFolder LhotseDataset LogMel SpecAugment SpeedPerturbation AddNoise Tokens",
    "streams": "IterableDataset",
    "submit": "submit",
    "synthetic": "Task12AXDataset DummyDataset",
    "tables": "TarDataset ParquetDataset ArrowDataset FolderDataset HuggingFaceDataset",
    "tensorflow": "tensorflow",
    "trace": "trace_sequences profile_steps",
    "torchrun": "restarting_torchrun",
    "transformers": "transformers_trainer transformers SavePretrained",
    "trial": "dry_run find_batch_size find_learning_rate predict_ranks learning_rate_ramp",
    "watchdog": "watchdog_timeout",
    "trackers": "use_tensorboard tensorboard_histograms trackers track_best_model metrics_file track_epoch",
}
"""By plug-in, the names of what it adds: keys, backends, classes of datasets, tasks, commands and so on."""

REQUIRED = ("numpy", "h5py", "tqdm")
"""The packages that are installed with hvdtrain: a checkout may be used without."""

PLUGINS = Path(__file__).parents[1] / "plugins"


def absent(name: Any) -> str:
    """A hint for the end of a message; empty, unless the name is one of a plug-in that is missing.

    >>> absent("max_seqs"), absent("tensorflow")
    ('', '')
    """
    for plugin, names in NAMES.items():
        if name in names.split() and not (PLUGINS / plugin / "__init__.py").exists():
            return f" (hvdtrain's plug-in {plugin} has it, and is missing in {PLUGINS})"
    return ""


def import_part(module: str) -> ModuleType:
    """A module that a table names. Raises: ConfigError, if it needs a plug-in or a package of hvdtrain's that is missing."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        name = str(error.name)
        if name in REQUIRED:
            raise ConfigError.of(
                "missing-package", f"{module}: expected the package {name}, which hvdtrain needs, got none (pip install {name})"
            ) from None
        if not name.startswith("hvdtrain.plugins."):
            raise
        importer = module.removeprefix("hvdtrain.")
        missing = name.split(".")[2]
        raise ConfigError.of(
            "missing-package", f"{importer}: expected hvdtrain's plug-in {missing}, which it needs, got none in {PLUGINS}"
        ) from error
