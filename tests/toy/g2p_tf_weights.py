"""A second config after configs/g2p_tf.py: plain SGD without dropout; the initial weights are those of g2p_weights.py."""

# ruff: noqa: F821  names that are not defined here are in configs/g2p_tf.py
import numpy

from hvdtrain.plugins.tensorflow.tensors import variables_of

optimizer = {"class": "sgd"}
gradient_clip_global_norm = None
dynamic_learning_rate = None
learning_rate = 0.02
dev = eval = None
weights = config.value("weights")

IN_PYTORCH = {"embeddings": "weight", "kernel": "weight", "gamma": "weight", "beta": "bias", "output_layer": "output"}


def get_model(**_):
    model = LettersToPhones(dropout=0.0)
    model(tf.zeros([1, 1], tf.int32), tf.ones([1, 1], tf.bool))
    with numpy.load(weights) as stored:
        left = set(stored.files)
        for name, variable in variables_of(model).by_name.items():
            there = ".".join(IN_PYTORCH.get(part, part) for part in name.split("."))
            values = stored[there]
            variable.assign(values.T if name.endswith("kernel") else values)  # (out, in, width) there, (width, in, out) here
            left.remove(there)
    assert not left
    return model
