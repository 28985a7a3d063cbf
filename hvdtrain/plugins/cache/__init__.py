"""Sequences stay in memory once they are read (`cache_size`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(caches={"memory": f"{__name__}.budget:caches_of"}, keys={"cache": f"{__name__}.keys:CacheKeys"})
