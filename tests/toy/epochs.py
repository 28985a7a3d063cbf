"""After config.py: keys that change with the epoch."""

# ruff: noqa: F821  `config`, `corpus` and `train` are defined while hvdtrain runs this file
import numpy

import hvdtrain

changing = config.value("changing", "all")


def widen(arrays, **_):
    return {**arrays, "data": numpy.concatenate([arrays["data"]] * 2, axis=1)}


def keys_of_epoch(*, epoch, **_):
    if changing == "by_rank":
        return {"learning_rate": 0.1 + hvdtrain.rank()}
    if changing == "wider":
        dims = {"data": {"dim": 8}, "classes": {"dim": 5, "sparse": True}, "id": {"dim": 231, "sparse": True}}
        wide = {"class": "MapDataset", "dataset": train, "map_seq": widen, "map_outputs": dims}
        return {"train": wide} if epoch == 2 else {}
    if changing != "all":
        return {changing: 1} if epoch == 2 else None
    return {
        1: {},
        2: {"max_seqs": 6, "learning_rate": 0.005, "train": {**train, "files": f"{corpus}/even.hdf"}},
        3: {"train": {**train, "partition_epoch": 3}, "chunking": {"data": 5, "classes": 5, "id": 1}},
        4: {"accum_grad_multiple_step": 2, "shuffle_batches": True, "dev": {"files": f"{corpus}/two.hdf"}},
    }[epoch]
