"""What other trainers call our keys. Imports nothing: `--help` reads it."""

from __future__ import annotations

SYNONYMS = {
    **dict.fromkeys(
        ("epochs", "max_epochs", "max_epoch", "num_train_epochs", "number_of_epochs", "n_epochs", "nb_epochs", "num_epoch"),
        "num_epochs",
    ),
    **dict.fromkeys(("max_steps", "max_updates"), "num_epochs (partition_epoch makes short ones)"),
    **dict.fromkeys(("limit_train_batches", "max_train_samples"), "partition_epoch, or overfit_batches"),
    "fast_dev_run": "the option --dry-run",
    "accelerator": "device",
    "strategy": "ngpu, or use_horovod",
    "wandb": "trackers = 'wandb'",
    "mlflow": "trackers = 'mlflow'",
    **dict.fromkeys(("seed", "manual_seed", "seed_everything"), "random_seed"),
    **dict.fromkeys(("lr", "base_lr"), "learning_rate"),
    **dict.fromkeys(("optim", "optimizer_name"), "optimizer"),
    **{name: f"optimizer = {{'class': ..., '{name}': ...}}" for name in ("weight_decay", "momentum", "betas")},
    **dict.fromkeys(
        ("scheduler", "lr_scheduler", "lr_scheduler_type", "warmup_steps", "num_warmup_steps", "warmup_ratio"),
        "learning_rate_schedule",
    ),
    **dict.fromkeys(
        ("clip_grad_norm", "gradient_clip_val", "max_grad_norm", "grad_clip_norm", "clip_grad"), "gradient_clip_global_norm"
    ),
    **dict.fromkeys(
        (
            "accum_grad",
            "accumulate_grad_batches",
            "gradient_accumulation_steps",
            "grad_accumulation_factor",
            "accumulation_steps",
        ),
        "accum_grad_multiple_step",
    ),
    **dict.fromkeys(("fp16", "bf16", "use_amp", "amp", "auto_mix_prec"), "mixed_precision"),
    **dict.fromkeys(("patience", "early_stopping"), "early_stopping_patience"),
    **dict.fromkeys(("tensorboard", "tensorboard_dir", "log_to_tensorboard"), "use_tensorboard"),
    **dict.fromkeys(("logger", "loggers", "report_to"), "trackers"),
    **dict.fromkeys(("log_every", "log_every_n_steps", "logging_steps", "log_steps"), "log_interval_steps"),
    **dict.fromkeys(("val_check_interval", "eval_steps", "eval_every", "valid_every"), "eval_interval_steps"),
    **dict.fromkeys(("save_steps", "save_every", "save_every_n_steps"), "save_interval_steps"),
    **dict.fromkeys(("output_dir", "exp_dir", "default_root_dir", "output_folder", "save_dir"), "model = 'FOLDER/model'"),
    **dict.fromkeys(("resume_from_checkpoint", "resume", "ckpt_path"), "load (the same command resumes by itself)"),
    **dict.fromkeys(("gpus", "devices", "num_gpus", "n_gpu"), "ngpu"),
    **dict.fromkeys(("save_total_limit", "keep_nbest_models", "keep_checkpoint_max", "save_top_k"), "cleanup_old_models"),
    **dict.fromkeys(("batch_bins", "max_tokens"), "batch_size"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size"), "max_seqs"),
    "num_workers": "num_workers in a MapDataset",
    "gradient_checkpointing": "checkpoint_modules",
    "val_dataset": "dev",
    "valid_dataset": "dev",
    "eval_dataset": "dev",
    "train_dataset": "train",
}
"""By another trainer's name of an option, our key."""
