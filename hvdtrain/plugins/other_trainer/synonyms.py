"""What other trainers call our keys."""

from __future__ import annotations

NAMES = {
    "num_epochs": (
        "epochs max_epochs max_epoch num_train_epochs number_of_epochs n_epochs nb_epochs num_epoch train_epochs "
        "training_epochs n_epoch"
    ),
    "num_epochs (partition_epoch makes short ones)": (
        "max_steps max_updates max_train_steps num_train_steps max_iters num_iterations"
    ),
    "max_batches in the dict of train or dev, or overfit_batches": "limit_train_batches limit_val_batches",
    "partition_epoch, or overfit_batches": "max_train_samples",
    "the option --dry-run": "fast_dev_run",
    "device": "accelerator use_cuda use_gpu no_cuda",
    "ngpu, or use_horovod": "strategy",
    "trackers = 'wandb'": "wandb use_wandb wandb_project",
    "trackers = 'mlflow'": "mlflow use_mlflow",
    "random_seed": "seed manual_seed seed_everything",
    "learning_rate": "lr base_lr init_lr initial_lr peak_lr",
    "optimizer": "optim optimizer_name",
    "optimizer = {'class': ..., 'weight_decay': ...}": "weight_decay",
    "optimizer = {'class': ..., 'momentum': ...}": "momentum",
    "optimizer = {'class': ..., 'betas': ...}": "betas",
    "learning_rate_schedule": (
        "scheduler lr_scheduler lr_scheduler_type warmup_steps num_warmup_steps warmup_ratio warmup_epochs warmup_proportion "
        "lr_decay lr_schedule min_lr"
    ),
    "gradient_clip_global_norm": "clip_grad_norm gradient_clip_val max_grad_norm grad_clip_norm clip_grad clip_norm",
    "accum_grad_multiple_step": (
        "accum_grad accumulate_grad_batches gradient_accumulation_steps grad_accumulation_factor accumulation_steps "
        "grad_accum_steps accum_iter update_freq"
    ),
    "mixed_precision": "fp16 bf16 use_amp amp auto_mix_prec use_fp16 use_bf16",
    "early_stopping_patience": "patience early_stopping early_stop",
    "early_stopping_measure": "metric_for_best_model best_model_criterion",
    "higher_is_better": "greater_is_better",
    "use_tensorboard": "tensorboard tensorboard_dir log_to_tensorboard",
    "trackers": "logger loggers report_to",
    "log_interval_steps": "log_every log_every_n_steps logging_steps log_steps log_freq print_every print_freq report_every",
    "eval_interval_steps": "val_check_interval eval_steps eval_every valid_every eval_freq val_every val_freq",
    "save_interval_steps": "save_steps save_every save_every_n_steps save_freq checkpoint_every",
    "model = 'FOLDER/model'": "output_dir exp_dir default_root_dir output_folder save_dir checkpoint_dir ckpt_dir",
    "load (the same command resumes by itself)": "resume_from_checkpoint resume ckpt_path resume_from",
    "ngpu": "gpus devices num_gpus n_gpu nproc_per_node",
    "cleanup_old_models": "save_total_limit keep_nbest_models keep_checkpoint_max save_top_k max_to_keep",
    "ema_decay": "use_ema ema_rate model_ema",
    "batch_size": "batch_bins max_tokens",
    "max_seqs": "per_device_train_batch_size train_batch_size micro_batch_size",
    "num_workers in a MapDataset": "num_workers dataloader_num_workers",
    "checkpoint_modules": "gradient_checkpointing activation_checkpointing",
    "sync_batch_norm": "sync_bn sync_batchnorm",
    "deterministic": "cudnn_deterministic",
    "dev": "val_dataset valid_dataset eval_dataset val_data valid_data",
    "train": "train_dataset train_data",
}
"""By our key, what to do with it in brackets, the names of such an option."""

SYNONYMS = {name: key for key, names in NAMES.items() for name in names.split()}
"""By another trainer's name of an option, our key."""
