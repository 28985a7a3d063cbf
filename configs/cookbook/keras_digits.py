"""Keras: a convolutional network reads digits, which are somewhere in a noisy image.

python -m hvdtrain configs/cookbook/keras_digits.py
mpirun -np 2 --bind-to none python -m hvdtrain configs/cookbook/keras_digits.py ++use_horovod 1
"""

import keras
import numpy
import tensorflow as tf

import hvdtrain

backend = "tensorflow"
SHAPES = (0o75557, 0o26227, 0o71747, 0o71717, 0o55711, 0o74717, 0o74757, 0o71111, 0o75757, 0o75717)  # five rows of three dots
SIZE = 24


class Images:
    """Made-up images, in place of yours. An item is a dict of arrays; of an image, the rows are the frames."""

    def __init__(self, count, seed):
        self.count, self.seed = count, seed

    def __len__(self):
        return self.count

    def lengths(self):
        return {"data": numpy.full(self.count, SIZE, numpy.int32)}

    def __getitem__(self, index):
        rng = numpy.random.default_rng([self.seed, index])
        digit = int(rng.integers(10))
        dots = numpy.array([SHAPES[digit] >> place & 1 for place in reversed(range(15))]).reshape(5, 3)
        drawn = dots.repeat(rng.integers(2, 5), axis=0).repeat(rng.integers(2, 5), axis=1)
        row, column = (rng.integers(SIZE - length + 1) for length in drawn.shape)
        image = 0.3 * rng.normal(size=(SIZE, SIZE))
        image[row : row + drawn.shape[0], column : column + drawn.shape[1]] += drawn
        return {"data": image.astype(numpy.float32), "digit": digit}


train = {"class": Images, "count": 3000, "seed": 1, "seq_ordering": "random"}
dev = {"class": Images, "count": 300, "seed": 2}
max_seqs_total = 60
num_epochs = 4
optimizer = {"class": "adamw", "weight_decay": 0.01}
learning_rate = 0.003
learning_rate_schedule = {"class": "cosine", "num_warmup_steps": 20, "final": 0.05}
early_stopping_measure = "dev_loss_error"
model = "exp/cookbook/keras_digits/model"


def get_model(**_):
    layers = keras.layers
    network = keras.Sequential([keras.Input((SIZE, SIZE, 1))])
    for filters in (16, 32, 32):
        network.add(layers.Conv2D(filters, 3, padding="same", activation="relu"))
        network.add(layers.MaxPooling2D())
    network.add(layers.Flatten())
    network.add(layers.Dense(10))
    return network


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    digits = extern_data["digit"].raw_tensor[:, 0]
    scores = model(extern_data["data"].raw_tensor[..., None], training=context.train_flag)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(digits, scores)
    context.mark_as_loss(losses, "ce", use_normalized_loss=True)
    context.mark_as_loss(tf.argmax(scores, -1) != tf.cast(digits, tf.int64), "error", as_error=True)
