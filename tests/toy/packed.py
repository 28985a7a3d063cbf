"""The toy config with batches without padding: the same model, treating every sequence by itself."""

# ruff: noqa: F821  the other names are those of config.py, after which hvdtrain runs this file
packed = ["data", "classes"]


def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    if context.train_flag:
        note(context.epoch, extern_data["id"])
    hidden = data.conv1d(model.first).raw_tensor
    scores, targets = model.last(hidden.relu()), classes.raw_tensor.long()
    entropies = nn.functional.cross_entropy(scores, targets, reduction="none")
    context.mark_as_loss(entropies, "ce", seq_lens=classes.seq_lens)
    context.mark_as_loss(scores.argmax(-1) != targets, "fer", as_error=True, seq_lens=classes.seq_lens)


def forward_step(*, model, extern_data, **_):
    data = extern_data["data"]
    hidden = data.conv1d(model.first).raw_tensor
    hvdtrain.get_run_ctx().mark_as_output(model.last(hidden.relu()), "output", seq_lens=data.seq_lens)
