"""Object storage and web servers, through fsspec: data files to copy, and a mirror of checkpoints."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    storages={"fsspec": f"{__name__}.files:FSSPEC"},
    mirrors={"fsspec": f"{__name__}.mirror:Mirror"},
    needs={"copies": "data files at URLs"},
)
