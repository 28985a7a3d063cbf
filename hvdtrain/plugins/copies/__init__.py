"""Copies of data files on a local disk of every host: the key `cache_dir`. Files at URLs are only read from such copies."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(copiers={"cache_dir": f"{__name__}.copier:CACHE_DIR"}, keys={"copies": f"{__name__}.keys:CopyKeys"})
