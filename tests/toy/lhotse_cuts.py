"""Training data in a lazy manifest of Lhotse, for the toy configs before it."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
from pathlib import Path

import numpy

folder = Path(config.value("folder"))
lengths_dir = str(folder / "kept")


def with_classes(arrays, *, index):
    """The data keys of the toy configs."""
    classes = (numpy.arange(len(arrays["data"])) + index) % 5
    return {"data": arrays["data"], "classes": classes.astype("int32"), "id": numpy.array([index], "int32")}


def lengths(of_cuts):
    return {"data": of_cuts["data"], "classes": of_cuts["data"], "id": numpy.ones_like(of_cuts["data"])}


train = {
    "class": "MapDataset",
    "dataset": {"class": "LhotseDataset", "cuts": str(folder / "cuts.jsonl.gz"), "units": None},
    "map_seq": with_classes,
    "map_lengths": lengths,
    "map_outputs": {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True}, "id": {"dim": 1000, "sparse": True}},
    "seq_ordering": "random",
}
