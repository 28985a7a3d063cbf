"""Datasets that change others: MapDataset applies a function or steps to every sequence, MetaDataset joins data keys by tag."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(datasets={name: f"{__name__}.keys:{name}Keys" for name in ("MetaDataset", "MapDataset")})
