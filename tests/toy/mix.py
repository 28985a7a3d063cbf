"""A mix of two files for the toy configs, to train on and to evaluate."""


# ruff: noqa: F821  `config` and `corpus` are defined while hvdtrain runs this file
def part(name, first):
    """One of the files, with numbers of sequences from `first` on."""
    dims = {"data": {"dim": 4}, "classes": {"dim": 5, "sparse": True}, "id": {"dim": 2000, "sparse": True}}
    numbered = {"map_seq": lambda arrays: {**arrays, "id": arrays["id"] + first}, "map_outputs": dims}
    return {"class": "MapDataset", "dataset": f"{corpus}/{name}.hdf", **numbered}


train = {
    "class": "MixingDataset",
    "datasets": {"large": part("train", 0), "small": part("dev", 1000)},
    "weights": {"large": 0.6, "small": 0.4},
    "stop": 200,
    "seq_ordering": "laplace:.20",
}
dev = {"class": "MixingDataset", "datasets": {"large": part("even", 0), "small": part("two", 1000)}}
