"""Keys of RETURNN with another name in hvdtrain, and keys that are not supported."""

ALIASES = {
    "learning_rate_decay": "newbob_learning_rate_decay",
    "learning_rate_growth": "newbob_learning_rate_growth",
    "torch_amp": "mixed_precision",
}
"""hvdtrain's key for RETURNN's other name of it."""

UNSUPPORTED = {
    "network": "hvdtrain trains configs that define get_model and train_step",
    "get_network": "hvdtrain trains configs that define get_model and train_step",
    "optimizer_epsilon": "set epsilon in the dict `optimizer`",
    "dry_run": "the option --dry-run, or task = 'dry_run'",
    "pretrain": "none",
    "chunking_variance": "none",
    "default_float_dtype": "create the model with that dtype in get_model",
    "epoch_start": "use get_run_ctx().epoch in train_step",
    "epoch_end": "use get_run_ctx().epoch in train_step",
    "gradient_clip_norm": "set gradient_clip_global_norm",
    "gradient_clip_avg_norm": "set gradient_clip_global_norm",
    "inc_seq_length": "set max_seq_length",
    "load_model_post_hooks": "do it in get_model, or in startup_callback",
    "packed_batch_cost": "set packed_batch_size",
    "packed_tensors": "none",
    "use_last_best_model": "none",
    "online_shuffle_batches": "set shuffle_batches, which shuffles all batches of an epoch",
    "torch_batching": "none",
    "seq_drop": "none",
}
"""Keys of RETURNN that are refused, as ignoring them would change the training, with what to do instead."""
