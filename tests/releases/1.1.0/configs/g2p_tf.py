"""configs/g2p.py with TensorFlow: the same data, model and training.

make data                                                          create the HDF files, once
python -m hvdtrain configs/g2p_tf.py                               train on one process
mpirun -np 2 --bind-to none python -m hvdtrain configs/g2p_tf.py ++use_horovod 1 ++max_seqs 128
"""

from pathlib import Path

import keras
import numpy
import tensorflow as tf
from rapidfuzz.distance import Levenshtein

import hvdtrain

root = Path(__file__).resolve().parent.parent

task = "train"
backend = "tensorflow"
model = str(root / "exp/g2p_tf/model")
log = str(root / "exp/g2p_tf/train.log")

# Bins of ten batches, sorted by length in alternating direction, so that the sequences of a batch need little padding.
train = {"class": "HDFDataset", "files": str(root / "data/g2p/train.hdf"), "seq_ordering": "laplace:.2560"}
dev = {"class": "HDFDataset", "files": str(root / "data/g2p/dev.hdf")}
eval = {"class": "HDFDataset", "files": str(root / "data/g2p/test.hdf")}
max_seqs = 256  # per rank

num_epochs = config.int("num_epochs", 24)  # noqa: F821  `config` is defined while hvdtrain runs this file
optimizer = {"class": "adamw", "weight_decay": 0.01, "betas": (0.9, 0.98), "epsilon": 1e-8}
gradient_clip_global_norm = 5.0
learning_rate = 0.002


def dynamic_learning_rate(*, epoch_continuous, learning_rate, **_):
    """Linear warm-up over the first 5 % of the training, then linear decay to zero."""
    done = epoch_continuous / num_epochs
    return learning_rate * min(0.01 + done / 0.05, (1 - done) / 0.95)


LETTERS, PHONES = 27, 39
BLANK = PHONES  # CTC's blank, after the phones: TensorFlow expects it to be the last class
BETWEEN = PHONES  # separates the pronunciations in the data key `variants`
UPSAMPLE = 2  # frames per letter: some letters stand for two phones (x: K S)


def uniform(fan_in):
    """PyTorch's default initialization of convolutions and linear layers."""
    bound = fan_in**-0.5
    return keras.initializers.RandomUniform(-bound, bound)


class GatedBlock(keras.layers.Layer):
    """A residual block: layer normalization, convolution over time, gated linear unit."""

    def __init__(self, channels, width, dropout):
        super().__init__()
        fan_in = channels * width
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.convolution = keras.layers.Conv1D(
            2 * channels, width, padding="same", kernel_initializer=uniform(fan_in), bias_initializer=uniform(fan_in)
        )
        self.dropout = keras.layers.Dropout(dropout)

    def call(self, frames, mask, training=False):
        """Map frames (batch, time, channels), with mask (batch, time, 1), to the same shape."""
        hidden = self.norm(frames) * mask  # keeps padding out of the convolution
        values, gates = tf.split(self.convolution(hidden), 2, axis=-1)
        return frames + self.dropout(values * tf.sigmoid(gates), training=training)


class LettersToPhones(keras.Model):
    """Map letters (batch, time) to log probabilities of phones and blank (batch, UPSAMPLE * time, PHONES + 1)."""

    def __init__(self, channels=160, letter_layers=4, phone_layers=3, width=5, dropout=0.1):
        super().__init__()
        self.channels = channels
        self.embedding = keras.layers.Embedding(LETTERS, channels, embeddings_initializer=keras.initializers.RandomNormal(0, 1))
        self.letter_blocks = [GatedBlock(channels, width, dropout) for _ in range(letter_layers)]
        self.place = self.add_weight(  # distinguishes the frames of a letter
            shape=(UPSAMPLE, channels), initializer=keras.initializers.RandomNormal(0, 0.5), name="place"
        )
        self.phone_blocks = [GatedBlock(channels, width, dropout) for _ in range(phone_layers)]
        self.norm = keras.layers.LayerNormalization(epsilon=1e-5)
        self.output_layer = keras.layers.Dense(
            PHONES + 1, kernel_initializer=uniform(channels), bias_initializer=uniform(channels)
        )

    def call(self, letters, mask, training=False):
        frames = self.embedding(letters)
        mask = tf.cast(mask, frames.dtype)[:, :, None]
        for block in self.letter_blocks:
            frames = block(frames, mask, training=training)
        batch, time = tf.shape(letters)[0], tf.shape(letters)[1]
        frames = tf.reshape(frames[:, :, None] + self.place, [batch, UPSAMPLE * time, self.channels])
        mask = tf.repeat(mask, UPSAMPLE, axis=1)
        for block in self.phone_blocks:
            frames = block(frames, mask, training=training)
        return tf.nn.log_softmax(self.output_layer(self.norm(frames)))


def get_model(**_):
    model = LettersToPhones()
    model(tf.zeros([1, 1], tf.int32), tf.ones([1, 1], tf.bool))  # Keras creates the weights of a layer in its first call
    return model


def train_step(*, model, extern_data, **_):
    context = hvdtrain.get_run_ctx()
    letters, phones = extern_data["data"], extern_data["classes"]
    log_probs = model(letters.raw_tensor, letters.mask, training=context.train_flag)
    targets = tf.RaggedTensor.from_tensor(tf.cast(phones.raw_tensor, tf.int32), lengths=phones.seq_lens)
    losses = tf.compat.v1.nn.ctc_loss(
        targets.to_sparse(),
        log_probs,
        letters.seq_lens * UPSAMPLE,
        time_major=False,
        ignore_longer_outputs_than_inputs=True,  # a word with more phones than frames
    )
    context.mark_as_loss(losses, "ctc", use_normalized_loss=True)
    if not context.train_flag:
        variants = extern_data["variants"]
        distances, lengths = tf.numpy_function(
            compare,
            [tf.argmax(log_probs, -1), letters.seq_lens * UPSAMPLE, variants.raw_tensor, variants.seq_lens],
            [tf.int64, tf.int64],
        )
        context.mark_as_loss(distances, "per", as_error=True, custom_inv_norm_factor=lengths)
        context.mark_as_loss(distances > 0, "wer", as_error=True)


def compare(best, seq_lens, variants, variant_lens):
    """For each word, the edit distance to the closest pronunciation in the dictionary, and the length of that one."""
    closest = []
    for path, frames, classes, length in zip(best, seq_lens, variants, variant_lens):
        path = path[:frames]
        changes = numpy.append(True, path[1:] != path[:-1])
        decoded = path[changes & (path != BLANK)].tolist()
        references = [[]]
        for phone in classes[:length].tolist():
            if phone == BETWEEN:
                references.append([])
            else:
                references[-1].append(phone)
        closest.append(min((Levenshtein.distance(decoded, reference), len(reference)) for reference in references))
    return tuple(numpy.array(closest, numpy.int64).T)
