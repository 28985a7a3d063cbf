"""The toy config on a last rank whose memory does not suffice for batches with many frames."""

# ruff: noqa: F821  the other names are those of config.py, after which hvdtrain runs this file
most = config.int("most", 1000)
step_of_toy = train_step


def train_step(*, model, extern_data, **others):
    batch, time, _ = extern_data["data"].raw_tensor.shape
    if hvdtrain.get_run_ctx().train_flag and hvdtrain.rank() == hvdtrain.size() - 1 and batch * time > most:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate too much (planted by the test)")
    step_of_toy(model=model, extern_data=extern_data, **others)
