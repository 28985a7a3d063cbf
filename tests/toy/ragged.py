"""The TensorFlow toy config with batches without padding, which it takes as ragged tensors."""

# ruff: noqa: F821  the other names are those of tensorflow_config.py, after which hvdtrain runs this file
packed = True


def train_step(*, model, extern_data, **_):
    context, data, classes = hvdtrain.get_run_ctx(), extern_data["data"], extern_data["classes"]
    scores = model(data.ragged.to_tensor(), training=context.train_flag)
    scores = tf.RaggedTensor.from_tensor(scores, lengths=data.seq_lens).values
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(classes.raw_tensor, scores)
    context.mark_as_loss(entropies, "ce")
    context.mark_as_loss(tf.argmax(scores, -1, tf.int32) != classes.raw_tensor, "fer", as_error=True)
    context.mark_as_loss(data.offsets[1:] - data.offsets[:-1] != data.seq_lens, "misplaced", as_error=True)
