"""HDF files: the command dump writes a dataset into one, check examines and repacks them, and `HDFWriter` writes sequences."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    commands={
        "dump": ("convert a dataset into an HDF file", f"{__name__}.dump"),
        "check": ("check that HDF files are sound and how fast they read; repack slow ones", f"{__name__}.check"),
    },
    needs={"copies": "dump --cache-dir"},
)
