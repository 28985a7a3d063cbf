"""After network_config.py: pretraining that adds a layer, widens another, and changes keys. RETURNN runs it, too."""

# ruff: noqa: F821  `config` and names of the other config are defined while hvdtrain runs this file
import os
import signal

import hvdtrain

task = "train"
use_tensorflow = True
cache_size = "0"
num_epochs = 5
batch_size = 10000
max_seqs = 12 // hvdtrain.size()
chunking = "0"
use_learning_rate_control_always = True
learning_rate_control = "newbob"
newbob_relative_error_threshold = -0.5
cell = {"from": ["data:source", "prev:output"]}
network = {
    "hidden": {"class": "linear", "activation": "relu", "n_out": 8, "from": "data", "L2": 0.01},
    "lstm": {
        "class": "rec",
        "from": "hidden",
        "unit": {"output": {"class": "rnn_cell", "unit": "LSTMBlock", "n_out": 6, **cell}},
    },
    "output": {"class": "softmax", "from": "lstm", "target": "classes", "loss": "ce"},
}


def grow(idx, net_dict):
    """Two epochs of frames, one of chunks with a new layer, then whole sequences."""
    if idx == 2:
        return None
    net_dict["#config"] = {"learning_rate": [0.004, 0.003][idx]}
    if idx == 0:
        del net_dict["lstm"]
        net_dict["hidden"]["n_out"] = 4
        net_dict["output"]["from"] = "hidden"
        net_dict["#repetition"] = 2
        net_dict["#config"].update(batch_size=48 // hvdtrain.size(), max_seqs=-1)
    else:
        net_dict["#config"]["chunking"] = "5:5"
        net_dict["#copy_param_mode"] = "subset"
    return net_dict


class StopAfter:
    """Sends the last rank the signal to stop after some steps."""

    def on_step_end(self, training):
        if training.step in stops and hvdtrain.rank() == hvdtrain.size() - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


stops = [int(step) for step in config.list("stop_after", [])]
callbacks = [StopAfter()] if stops else []
pretrain = {"copy_param_mode": "subset", "construction_algo": grow}
