"""config.py with TensorFlow: the same keys and an equivalent model."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import os
import signal
import time
from pathlib import Path

import keras
import tensorflow as tf

import hvdtrain

corpus = Path(config.value("corpus"))
train = {"files": str(corpus / config.value("part", "train.hdf")), "seq_ordering": config.value("ordering", "random")}
train["partition_epoch"] = config.int("parts", 1)
dev = {"files": str(corpus / "dev.hdf")} if config.bool("evaluated", False) else None

backend = "tensorflow"
num_epochs = 1
max_seqs = 12 // hvdtrain.size()
num_threads = 1
log_interval = 0
log_verbosity = 5
learning_rate = 0.01
optimizer = {"class": "sgd", "momentum": 0.9}

layers = config.value("layers", "plain")
losses = config.value("losses", "sum")
fault, fault_rank, *fault_steps = config.list("fault", ["", -1, -1])
record = config.value("record")


class Plain(keras.Model):
    """One convolution, a parameter that never gets a gradient and a parameter that is not trained."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Conv1D(8, 3, padding="same", activation="relu")
        self.last = keras.layers.Dense(5)
        self.unused = self.add_weight(shape=(3,), initializer="random_normal", name="unused")
        self.frozen = keras.layers.Dense(3)
        self.frozen.build((None, 1))
        self.frozen.trainable = False

    def call(self, frames, training=False):
        return self.last(self.first(frames))


class WithStatistics(Plain):
    """The same model with BatchNorm (float buffers), an integer buffer, one of a type that Horovod lacks, and dropout."""

    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.dropout = keras.layers.Dropout(0.1)
        self.batches = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="batches")
        self.first_rank = tf.Variable(hvdtrain.rank() == 0, trainable=False)

    def call(self, frames, training=False):
        if training:
            self.batches.assign_add(1)
        return super().call(self.dropout(self.norm(frames, training=training), training=training))


class Embedded(tf.Module):
    """A tf.Module: an embedding of the frame's first feature, so large that its gradient is reduced as rows.

    The two parameters without a gradient fill one message each, with the same zeros.
    """

    def __init__(self):
        super().__init__()
        self.table = tf.Variable(tf.random.normal([70000, 5]))
        self.idle = [tf.Variable(tf.ones([600_000])) for _ in range(2)]

    def __call__(self, frames, training=False):
        return tf.gather(self.table, tf.cast(tf.abs(frames[:, :, 0]) * 100, tf.int32))


def get_model(**_):
    keras.utils.set_random_seed(1 + hvdtrain.rank())  # rank 0's weights have to be broadcast
    model = {"plain": Plain, "statistics": WithStatistics, "embedding": Embedded}[layers]()
    model(tf.zeros([1, 1, 4]))
    return model


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    data, classes = extern_data["data"], extern_data["classes"]
    if context.train_flag and (record or fault):
        done = tf.numpy_function(note, [context.epoch, context.step, extern_data["id"].raw_tensor], tf.bool)
    else:
        done = True
    with tf.control_dependencies([done]):
        frames = tf.identity(data.raw_tensor)
    scores = tf.boolean_mask(model(frames, training=context.train_flag), data.mask)
    targets = tf.boolean_mask(classes.raw_tensor, classes.mask)
    entropies = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, tf.cast(scores, tf.float32))
    if fault == "overflow" and context.train_flag and hvdtrain.rank() == int(fault_rank):
        planted = tf.reduce_any(context.step == tf.constant([int(step) for step in fault_steps], tf.int64))
        entropies *= tf.where(planted, 1e9, 1.0)  # finite, but its gradient overflows in float16
    context.mark_as_loss(entropies, "ce", use_normalized_loss=losses != "sum", seq_lens=classes.seq_lens)
    if losses == "several":
        energy = tf.reduce_sum(tf.square(scores), -1)[targets > 2]  # has its own count, which may be zero in a batch
        context.mark_as_loss(energy, "energy", scale=0.1, use_normalized_loss=True)
        context.mark_as_loss(tf.square(scores[:, 0]), "first", scale=0.001)
    context.mark_as_loss(tf.argmax(scores, -1, tf.int32) != targets, "fer", as_error=True, seq_lens=classes.seq_lens)


def note(epoch, step, ids):
    """Record which sequences this rank trains on, and fail where a test asks for it."""
    if fault != "overflow" and hvdtrain.rank() == int(fault_rank) and step in map(int, fault_steps):
        fail()
    if record:
        with open(f"{record}.{hvdtrain.rank()}", "a") as file:
            file.writelines(f"{epoch} {number}\n" for number in ids[:, 0].tolist())
    return True


def fail():
    Path(f"{record}.fault").write_text(str(time.time()))
    if fault == "raise":
        raise RuntimeError("planted by the test")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(600)
    if fault.startswith("SIG"):
        os.kill(os.getpid(), getattr(signal, fault))
