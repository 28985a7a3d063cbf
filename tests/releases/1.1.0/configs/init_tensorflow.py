"""A GRU learns to name the largest feature of the frame before.

    python -m hvdtrain init_tensorflow.py                                                trains in one process
    mpirun -np 2 --bind-to none python -m hvdtrain init_tensorflow.py ++use_horovod 1    on two Horovod ranks
    python -m hvdtrain init_tensorflow.py --dry-run                                      tries some steps, and writes nothing
    python -m hvdtrain export init_tensorflow.py                                         writes the trained model for other programs

The same command continues a training that was stopped. ++KEY VALUE overrides any key: ++num_epochs 5.
"""

import keras
import numpy
import tensorflow as tf

import hvdtrain

backend = "tensorflow"
FEATURES = 8


class Frames:
    """Made-up data, in place of yours: an item is a dict of arrays, with time on the first axis."""

    def __init__(self, size, seed):
        self.size, self.seed = size, seed

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = numpy.random.default_rng([self.seed, index])
        frames = generator.normal(size=(generator.integers(5, 30), FEATURES)).astype(numpy.float32)
        return {"data": frames, "classes": numpy.roll(frames.argmax(axis=1), 1)}


train = {"class": Frames, "size": 4000, "seed": 1, "seq_ordering": "laplace:.1000"}  # random, in bins of similar lengths
dev = {"class": Frames, "size": 400, "seed": 2}  # evaluated after every epoch

batch_size = 2000  # frames per rank and step, with padding
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.01
gradient_clip_global_norm = 5.0
model = "exp/init_tensorflow/model"  # checkpoints: exp/init_tensorflow/model.001.npz, ...

# Often wanted, too; docs/keys.md has all keys.
# log_interval = 10  # seconds from one line about steps to the next; `python -m hvdtrain report exp/init_tensorflow` draws them
# cleanup_old_models = {"keep_last_n": 2, "keep_best_n": 1, "keep": []}  # removes other models; best.json names the best one
# early_stopping_patience = 5  # ends training after 5 epochs without a better score
# early_stopping_measure = "dev_loss_ce"  # the score by which epochs are compared
# trackers = ["wandb"]  # or "mlflow", or a class of your own: where numbers are reported
# callbacks = "my_callbacks:MyCallbacks"  # a class with methods such as on_epoch_end(training)


class Tagger(keras.Model):
    def __init__(self):
        super().__init__()
        self.gru = keras.layers.GRU(64, return_sequences=True)
        self.output_layer = keras.layers.Dense(FEATURES)

    def call(self, frames, training=False):
        return self.output_layer(self.gru(frames, training=training))


def get_model(**_):
    model = Tagger()
    model(tf.zeros([1, 1, FEATURES]))  # Keras creates the weights of a layer in its first call
    return model


def train_step(*, model, extern_data, **_):
    """The losses of a batch: one number per frame, so that N ranks compute what one rank does."""
    context = hvdtrain.get_run_ctx()
    data, classes = extern_data["data"], extern_data["classes"]
    # raw_tensor (batch, time, features), mask (batch, time), seq_lens (batch,)
    scores = tf.boolean_mask(model(data.raw_tensor, training=context.train_flag), data.mask)
    targets = tf.boolean_mask(classes.raw_tensor, classes.mask)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, scores)
    context.mark_as_loss(losses, "ce", use_normalized_loss=True)
    context.mark_as_loss(tf.argmax(scores, -1) != targets, "error", as_error=True)
