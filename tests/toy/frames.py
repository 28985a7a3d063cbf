"""After config.py or tensorflow_config.py: a model that treats every frame by itself, and batches of frames."""

# ruff: noqa: F821  `config` and the functions of the other config are defined while hvdtrain runs this file
import zlib

import hvdtrain

frame_batches = True
extern_data = {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True}}
max_seqs = None
batch_size_total = config.int("frames_of_all_ranks", 60)


def note_frames(epoch, frames):
    """Record which frames this rank trains on, by their checksums."""
    if record:
        with open(f"{record}.{hvdtrain.rank()}", "a") as file:
            file.writelines(f"{epoch} {zlib.crc32(frame.tobytes())}\n" for frame in frames)


if config.value("backend", "torch") == "torch":
    import torch

    def get_model(**_):
        torch.manual_seed(1 + hvdtrain.rank())
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 5))

    def train_step(*, model, extern_data, **_):
        context = hvdtrain.get_run_ctx()
        data, classes = extern_data["data"].raw_tensor, extern_data["classes"].raw_tensor.long()
        assert data.shape[:2] == classes.shape == (1, int(extern_data["data"].seq_lens[0]))
        assert extern_data["data"].mask.all()
        if context.train_flag:
            note_frames(context.epoch, data[0].numpy())
            if hvdtrain.rank() == int(fault_rank) and context.step in map(int, fault_steps):
                fail()
        scores = model(data)
        entropies = torch.nn.functional.cross_entropy(scores[0], classes[0], reduction="none")
        context.mark_as_loss(entropies, "ce", use_normalized_loss=losses != "sum")
        context.mark_as_loss(scores.argmax(-1) != classes, "fer", as_error=True)
else:
    import keras
    import tensorflow as tf

    def get_model(**_):
        keras.utils.set_random_seed(1 + hvdtrain.rank())
        model = keras.Sequential([keras.layers.Dense(8, activation="relu"), keras.layers.Dense(5)])
        model(tf.zeros([1, 1, 4]))
        return model

    def train_step(*, model, extern_data, **_):
        context = hvdtrain.get_run_ctx()
        data, classes = extern_data["data"].raw_tensor, extern_data["classes"].raw_tensor
        scores = model(data)
        entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(classes, scores)
        context.mark_as_loss(entropies, "ce", use_normalized_loss=losses != "sum")
        context.mark_as_loss(tf.argmax(scores, -1, tf.int32) != classes, "fer", as_error=True)
