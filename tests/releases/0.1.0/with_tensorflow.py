"""A config as it was with hvdtrain 0.1.0, and later ones, whose checkpoints are in the folders beside it. It stays as it is."""

import keras
import numpy
import tensorflow as tf

import hvdtrain

random = numpy.random.RandomState(1)


def sequences(number):
    lengths = random.randint(2, 9, number)
    frames = [random.rand(length, 3).astype("float32") for length in lengths]
    return [{"data": one, "classes": (4 * one[:, 0]).astype("int64")} for one in frames]


backend = "tensorflow"
train, dev = sequences(48), sequences(12)
batching = "random"
max_seqs = 8 // hvdtrain.size()
num_epochs = 3
num_threads = 1
log_interval = 0
lengths_dir = None
learning_rate = 0.05
learning_rate_control = "newbob"
learning_rate_control_error_measure = "dev_loss_ce"
learning_rate_schedule = {"class": "linear", "num_warmup_steps": 5, "num_steps": 30}
optimizer = {"class": "adam"}
ema_decay = 0.9
save_interval_steps = 4
crash_at = 0


class Crash:
    def on_step_end(self, training):
        if training.step == crash_at:
            raise RuntimeError("planted")


callbacks = [Crash]


class Model(keras.Model):
    def __init__(self):
        super().__init__()
        self.norm = keras.layers.BatchNormalization(momentum=0.9)
        self.dropout = keras.layers.Dropout(0.1)
        self.scores = keras.layers.Dense(4)

    def call(self, frames, training=False):
        return self.scores(self.dropout(self.norm(frames, training=training), training=training))


def get_model(**_):
    keras.utils.set_random_seed(1)
    model = Model()
    model(tf.zeros([1, 3]))
    return model


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    data, classes = extern_data["data"], extern_data["classes"]
    scores = model(tf.boolean_mask(data.raw_tensor, data.mask), training=context.train_flag)
    targets = tf.boolean_mask(classes.raw_tensor, classes.mask)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)
    context.mark_as_loss(losses, "ce", use_normalized_loss=True)
    context.mark_as_loss(tf.argmax(scores, -1, targets.dtype) != targets, "fer", as_error=True)
