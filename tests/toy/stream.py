"""What config.py trains on, as iterables of unknown length: in another order in every epoch, or in that of the file."""

# ruff: noqa: F821  `config`, `corpus` and `train` are defined while hvdtrain runs this file
import numpy

from hvdtrain.data.hdf.dataset import open_hdf


def in_order(path):
    data = open_hdf([path])
    for number in range(data.num_sequences):
        yield data.tags([number])[0], data.sequence(number)


def shuffled(path, *, epoch):
    data = open_hdf([path])
    for number in numpy.random.RandomState(epoch).permutation(data.num_sequences).tolist():
        yield data.tags([number])[0], data.sequence(number)


streamed = config.value("streamed", "shuffled")
if streamed == "in_order":
    train = {"class": in_order, "path": train["files"]}
elif streamed == "shuffled":
    train = {"class": shuffled, "path": train["files"], "seq_ordering": "laplace:.10"}
else:
    train = {**train, "seq_ordering": "default"}
lengths_dir = f"{corpus}/lengths"
