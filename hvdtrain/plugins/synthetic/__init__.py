"""Synthetic datasets: meaningless numbers, and the 12-AX memory task."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(datasets={name: f"{__name__}.keys:{name}Keys" for name in ("Task12AXDataset", "DummyDataset")})
