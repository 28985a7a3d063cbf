"""Sequences are cut into chunks (`chunking`), with their context (`context_window`)."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(chunkers={"chunks": f"{__name__}.fixed:CHUNKER"}, keys={"chunks": f"{__name__}.keys:ChunkKeys"})
