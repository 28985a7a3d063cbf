"""Training data in Kaldi folders, for the toy configs before it."""

# ruff: noqa: F821  `config` is defined while hvdtrain runs this file
from pathlib import Path

folder = Path(config.value("folder"))


def part(name):
    files = {"data": ("feats.scp", "kaldi_ark"), "classes": ("ali.scp", "kaldi_ark"), "id": ("number", "text_int")}
    return {"class": "KaldiFolder", "folder": str(folder / name), "features": None, "units": None, "data_keys": files}


train = part("train") | {"seq_ordering": "default"}
if config.bool("mixed", False):
    train = {"class": "MixingDataset", "datasets": {"whole": part("whole"), "damaged": part("damaged")}, "seq_ordering": "random"}
    train["weights"] = {"whole": 0.5, "damaged": 0.5}
dev = part("dev")
lengths_dir = None
