"""Datasets that are made of others: several one after the other or mixed, thousands of files, those that MapDataset changes
sequence by sequence, and those whose data keys MetaDataset joins by tag.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    datasets={
        name: f"{__name__}.keys:{name}Keys"
        for name in ("FilesDataset", "CombinedDataset", "ConcatDataset", "MixingDataset", "MetaDataset", "MapDataset")
    }
)
