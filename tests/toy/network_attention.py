"""A network with an encoder, CTC, and a decoder with attention in a loop, as speech recognizers have them."""

# ruff: noqa: F821  `config` is defined while the file is run
from pathlib import Path

corpus = Path(config.value("corpus", ""))
train = {"class": "HDFDataset", "files": [str(corpus / config.value("part", "train.hdf"))], "seq_ordering": "random"}
dev = {"class": "HDFDataset", "files": [str(corpus / "dev.hdf")]}
if config.value("task", "train") == "forward":
    eval = dev  # which RETURNN forwards

use_tensorflow = True
vocabulary = {"class": "Vocabulary", "vocab_file": None, "labels": ["a", "b", "c", "d", "e"], "unknown_label": None}
extern_data = {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True, "vocab": vocabulary}}
num_epochs = 1
batch_size = 100000
max_seqs = 12
num_threads = 1
learning_rate = 0.001
random_seed = 3
target = "classes"
optimizer = {"class": "adam", "epsilon": 1e-8}
gradient_clip_global_norm = 20.0

decoder = {
    "output": {"class": "choice", "target": target, "beam_size": 2, "from": "output_prob", "initial_output": 0},
    "end": {"class": "compare", "from": "output", "value": 0},
    "embed": {"class": "linear", "activation": None, "with_bias": False, "from": "output", "n_out": 3, "initial_output": 0},
    "s": {"class": "rnn_cell", "unit": "LSTMBlock", "from": ["prev:embed", "prev:att"], "n_out": 6},
    "energy_in": {"class": "combine", "kind": "add", "from": ["base:keys", "query"], "n_out": 6},
    "query": {"class": "linear", "activation": None, "with_bias": False, "from": "s", "n_out": 6},
    "energy": {"class": "linear", "activation": "tanh", "with_bias": False, "from": "energy_in", "n_out": 1},
    "weights": {"class": "softmax_over_spatial", "from": "energy"},
    "att": {"class": "generic_attention", "weights": "weights", "base": "base:encoder"},
    "readout": {"class": "linear", "activation": "relu", "n_out": 6, "from": ["s", "prev:embed", "att"], "dropout": 0.2},
    "output_prob": {
        "class": "softmax", "from": "readout", "target": target, "loss": "ce", "loss_opts": {"label_smoothing": 0.1},
    },
}  # fmt: skip

network = {
    "encoder": {"class": "linear", "activation": "tanh", "n_out": 6, "from": "data", "dropout": 0.1},
    "keys": {"class": "linear", "activation": None, "n_out": 6, "from": "encoder"},
    "output": {"class": "rec", "from": [], "target": target, "max_seq_len": "max_len_from('base:encoder')", "unit": decoder},
    "decision": {"class": "decide", "from": "output", "loss": "edit_distance", "target": target, "only_on_search": True},
}
