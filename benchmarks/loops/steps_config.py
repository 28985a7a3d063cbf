"""The steps of small_steps.py with hvdtrain: `python -m hvdtrain steps_config.py`, ++backend tensorflow for Keras."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import small_steps
from small_steps import BATCH, CLASSES, EPOCHS, FEATURES, Clock, Frames, decode

import hvdtrain

small_steps.RANK, small_steps.RANKS = hvdtrain.rank(), hvdtrain.size()
workers = config.int("workers", 0)
train = Frames()
if workers:
    train = {"class": "MapDataset", "dataset": Frames(decodes=False), "map_seq": decode, "num_workers": workers}
backend = config.value("backend", "torch")
max_seqs = BATCH
num_epochs = EPOCHS
num_threads = 1
optimizer = {"class": "sgd"}
learning_rate = 0.01
callbacks = Clock()

plugin = config.value("plugin", "")  # a model of another trainer: lightning, speechbrain, transformers, espnet
if plugin or config.bool("collates", False):
    train = {"class": Frames, "seq_ordering": "random", **({} if plugin == "espnet" else {"collate": small_steps.padded})}

if plugin == "lightning":
    lightning_module = small_steps.lightning_module
    num_val_loaders = 0
    del train, optimizer, learning_rate
elif plugin == "speechbrain":
    brain = small_steps.brain
    del optimizer, learning_rate
elif plugin == "transformers":
    transformers_trainer = small_steps.transformers_arguments()
    del train, optimizer, learning_rate
elif plugin == "espnet":
    espnet_model = small_steps.espnet_model
elif backend == "torch" and config.bool("collates", False):
    import torch

    def get_model(**_):
        return torch.nn.Linear(FEATURES, CLASSES)

    def train_step(*, model, extern_data, **_):
        hvdtrain.get_run_ctx().mark_as_loss(small_steps.loss_of(model, *extern_data), "ce")

elif backend == "torch":
    import torch

    def get_model(**_):
        return torch.nn.Linear(FEATURES, CLASSES)

    def train_step(*, model, extern_data, **_):
        data, classes = extern_data["data"], extern_data["classes"]
        scores = model(data.raw_tensor)[data.mask]
        losses = torch.nn.functional.cross_entropy(scores, classes.raw_tensor[data.mask], reduction="none")
        hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)

else:
    import tensorflow as tf

    def get_model(**_):
        return tf.keras.Sequential([tf.keras.Input((None, FEATURES)), tf.keras.layers.Dense(CLASSES)])

    def train_step(*, model, extern_data, **_):
        data, classes = extern_data["data"], extern_data["classes"]
        scores, labels = model(data.raw_tensor, training=True)[data.mask], classes.raw_tensor[data.mask]
        losses = tf.keras.losses.sparse_categorical_crossentropy(labels, scores, from_logits=True)
        hvdtrain.get_run_ctx().mark_as_loss(losses, "ce", use_normalized_loss=True)
