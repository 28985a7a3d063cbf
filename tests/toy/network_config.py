"""A config with RETURNN's network for the tests on several ranks. Tests set what differs between them with ++key value."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
import os
import signal
from pathlib import Path

import hvdtrain

corpus = Path(config.value("corpus", "."))
train = {"class": "HDFDataset", "files": [str(corpus / config.value("part", "train.hdf"))]}
train["seq_ordering"] = config.value("ordering", "random")
train["partition_epoch"] = config.int("parts", 1)
dev = {"class": "HDFDataset", "files": [str(corpus / "dev.hdf")]} if config.bool("evaluated", False) else None

use_tensorflow = True
batch_size = 100000
extern_data = {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True}}
num_epochs = 1
max_seqs = 12 // hvdtrain.size()
num_threads = 1
log_interval = 0
learning_rate = 0.01
random_seed = 3
optimizer = {"class": "adam", "epsilon": 1e-8}
# Optimizing its graph takes a good part of the time of a small training.
tf_session_opts = {"graph_options": {"rewrite_options": {"disable_meta_optimizer": True}}}

layers = config.value("layers", "plain")
normalized = {"loss_opts": {"use_normalized_loss": True}} if config.value("losses", "sum") != "sum" else {}
cell = {"from": ["data:source", "prev:output"]}


class Stop:
    """Sends a rank the signal to stop after a step, once."""

    def on_step_end(self, training):
        if training.step == stop_at and hvdtrain.rank() == hvdtrain.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


stop_at = config.int("stop_at", 0)
callbacks = [Stop()] if stop_at else []

network = {
    "conv": {"class": "conv", "filter_size": (3,), "padding": "same", "n_out": 8, "activation": "relu", "from": ["data"]},
    "lstm": {"class": "rec", "from": "conv", "unit": {"output": {"class": "rnn_cell", "unit": "LSTMBlock", "n_out": 6, **cell}}},
    "output": {"class": "softmax", "from": "lstm", "target": "classes", "loss": "ce", **normalized},
}
network["conv"]["L2"] = 0.01
if layers == "statistics":
    network["norm"] = {"class": "batch_norm", "from": "conv", "momentum": 0.1}
    network["lstm"] |= {"from": "norm", "dropout": 0.3}
if layers == "dropout":
    network["lstm"]["dropout"] = 0.3
if layers == "embedding":  # its gradient has rows
    network["aligned"] = {"class": "reinterpret_data", "from": "data:classes", "size_base": "data"}
    network["words"] = {"class": "linear", "activation": None, "with_bias": False, "n_out": 3, "from": "aligned"}
    network["output"]["from"] = ["lstm", "words"]
if layers in ("conv", "conv_statistics"):  # without the loop, whose graph takes time
    network["output"]["from"] = "conv"
    del network["lstm"]
if layers == "conv_statistics":
    network["norm"] = {"class": "batch_norm", "from": "conv", "momentum": 0.1}
    network["output"] |= {"from": "norm", "dropout": 0.3}
if layers == "frames":  # each by itself
    network["conv"] = {"class": "linear", "n_out": 8, "activation": "relu", "from": ["data"]}
    network["output"]["from"] = "conv"
    del network["lstm"]
if layers == "context":  # which the data has in addition
    context_window = 3
    network["conv"]["padding"] = "valid"
if config.bool("shuffled", False):  # draws random numbers that neither are uniform nor normal
    draw = "source(0) + 0.0 * tf.cast(tf.random.shuffle(tf.range(2))[0], tf.float32)"
    network["shuffled"] = {"class": "eval", "eval": draw, "from": "conv"}
    network["lstm"]["from"] = "shuffled"
if config.value("losses", "sum") == "several":
    network["other"] = {"class": "softmax", "from": "conv", "target": "classes", "loss": "ce", "loss_scale": 0.5}
flaw = config.value("flaw", "")
if flaw == "class":
    network["conv"]["class"] = "convolution"
if flaw == "from":
    network["output"]["from"] = "lstn"
if flaw == "target":
    network["output"]["target"] = "phones"
if flaw == "key":
    extern_data["phones"] = {"dim": 5, "sparse": True}
    network["output"]["target"] = "phones"
if flaw == "state":
    network["lstm"] = {"class": "rec", "unit": "BasicLSTM", "n_out": 6, "from": "conv", "initial_state": "keep_over_epoch"}
if flaw == "axis":  # the data has a class for every frame
    extern_data["classes"] |= {"shape": (), "time_dim_axis": None}
    network["lstm"] = {"class": "reduce", "mode": "mean", "axes": "T", "from": "conv"}
