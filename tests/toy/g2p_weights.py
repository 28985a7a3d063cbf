"""A second config after configs/g2p.py: plain SGD without dropout; the initial weights are written to the file `weights`."""

# ruff: noqa: F821  names that are not defined here are in configs/g2p.py
import numpy

optimizer = {"class": "sgd"}
gradient_clip_global_norm = None
dynamic_learning_rate = None
learning_rate = 0.02
dev = eval = None
weights = config.value("weights")


def get_model(**_):
    model = LettersToPhones(dropout=0.0)
    if hvdtrain.rank() == 0:
        numpy.savez(weights, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})
    return model
