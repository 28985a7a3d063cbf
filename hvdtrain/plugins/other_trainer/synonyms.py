"""What other trainers call our keys."""

from __future__ import annotations

SYNONYMS = {
    **dict.fromkeys(
        (
            "epochs",
            "max_epochs",
            "max_epoch",
            "num_train_epochs",
            "number_of_epochs",
            "n_epochs",
            "nb_epochs",
            "num_epoch",
            "train_epochs",
            "training_epochs",
            "n_epoch",
        ),
        "num_epochs",
    ),
    **dict.fromkeys(
        ("max_steps", "max_updates", "max_train_steps", "num_train_steps", "max_iters", "num_iterations"),
        "num_epochs (partition_epoch makes short ones)",
    ),
    **dict.fromkeys(("limit_train_batches", "limit_val_batches"), "max_batches in the dict of train or dev, or overfit_batches"),
    "max_train_samples": "partition_epoch, or overfit_batches",
    "fast_dev_run": "the option --dry-run",
    **dict.fromkeys(("accelerator", "use_cuda", "use_gpu", "no_cuda"), "device"),
    "strategy": "ngpu, or use_horovod",
    **dict.fromkeys(("wandb", "use_wandb", "wandb_project"), "trackers = 'wandb'"),
    **dict.fromkeys(("mlflow", "use_mlflow"), "trackers = 'mlflow'"),
    **dict.fromkeys(("seed", "manual_seed", "seed_everything"), "random_seed"),
    **dict.fromkeys(("lr", "base_lr", "init_lr", "initial_lr", "peak_lr"), "learning_rate"),
    **dict.fromkeys(("optim", "optimizer_name"), "optimizer"),
    **{name: f"optimizer = {{'class': ..., '{name}': ...}}" for name in ("weight_decay", "momentum", "betas")},
    **dict.fromkeys(
        (
            "scheduler",
            "lr_scheduler",
            "lr_scheduler_type",
            "warmup_steps",
            "num_warmup_steps",
            "warmup_ratio",
            "warmup_epochs",
            "warmup_proportion",
            "lr_decay",
            "lr_schedule",
            "min_lr",
        ),
        "learning_rate_schedule",
    ),
    **dict.fromkeys(
        ("clip_grad_norm", "gradient_clip_val", "max_grad_norm", "grad_clip_norm", "clip_grad", "clip_norm"),
        "gradient_clip_global_norm",
    ),
    **dict.fromkeys(
        (
            "accum_grad",
            "accumulate_grad_batches",
            "gradient_accumulation_steps",
            "grad_accumulation_factor",
            "accumulation_steps",
            "grad_accum_steps",
            "accum_iter",
            "update_freq",
        ),
        "accum_grad_multiple_step",
    ),
    **dict.fromkeys(("fp16", "bf16", "use_amp", "amp", "auto_mix_prec", "use_fp16", "use_bf16"), "mixed_precision"),
    **dict.fromkeys(("patience", "early_stopping", "early_stop"), "early_stopping_patience"),
    **dict.fromkeys(("metric_for_best_model", "best_model_criterion"), "early_stopping_measure"),
    "greater_is_better": "higher_is_better",
    **dict.fromkeys(("tensorboard", "tensorboard_dir", "log_to_tensorboard"), "use_tensorboard"),
    **dict.fromkeys(("logger", "loggers", "report_to"), "trackers"),
    **dict.fromkeys(
        ("log_every", "log_every_n_steps", "logging_steps", "log_steps", "log_freq", "print_every", "print_freq", "report_every"),
        "log_interval_steps",
    ),
    **dict.fromkeys(
        ("val_check_interval", "eval_steps", "eval_every", "valid_every", "eval_freq", "val_every", "val_freq"),
        "eval_interval_steps",
    ),
    **dict.fromkeys(("save_steps", "save_every", "save_every_n_steps", "save_freq", "checkpoint_every"), "save_interval_steps"),
    **dict.fromkeys(
        ("output_dir", "exp_dir", "default_root_dir", "output_folder", "save_dir", "checkpoint_dir", "ckpt_dir"),
        "model = 'FOLDER/model'",
    ),
    **dict.fromkeys(
        ("resume_from_checkpoint", "resume", "ckpt_path", "resume_from"), "load (the same command resumes by itself)"
    ),
    **dict.fromkeys(("gpus", "devices", "num_gpus", "n_gpu", "nproc_per_node"), "ngpu"),
    **dict.fromkeys(
        ("save_total_limit", "keep_nbest_models", "keep_checkpoint_max", "save_top_k", "max_to_keep"), "cleanup_old_models"
    ),
    **dict.fromkeys(("use_ema", "ema_rate", "model_ema"), "ema_decay"),
    **dict.fromkeys(("batch_bins", "max_tokens"), "batch_size"),
    **dict.fromkeys(("per_device_train_batch_size", "train_batch_size", "micro_batch_size"), "max_seqs"),
    **dict.fromkeys(("num_workers", "dataloader_num_workers"), "num_workers in a MapDataset"),
    **dict.fromkeys(("gradient_checkpointing", "activation_checkpointing"), "checkpoint_modules"),
    **dict.fromkeys(("sync_bn", "sync_batchnorm"), "sync_batch_norm"),
    "cudnn_deterministic": "deterministic",
    **dict.fromkeys(("val_dataset", "valid_dataset", "eval_dataset", "val_data", "valid_data"), "dev"),
    **dict.fromkeys(("train_dataset", "train_data"), "train"),
}
"""By another trainer's name of an option, our key."""
