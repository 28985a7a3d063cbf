"""Speech: folders of Kaldi and ESPnet, manifests of Lhotse, and features, augmentation and tokens while training.

`kaldi.py` and `cuts.py` are the datasets, of `columns.py`; `steps.py` has the steps of a MapDataset.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    datasets={"KaldiFolder": f"{__name__}.keys:KaldiFolderKeys", "LhotseDataset": f"{__name__}.keys:LhotseDatasetKeys"},
    steps={
        name: f"{__name__}.step_keys:{name}Keys" for name in ("LogMel", "SpecAugment", "SpeedPerturbation", "AddNoise", "Tokens")
    },
    needs={"combine": "the steps of a MapDataset", "lengths": "the index of cuts"},
)
