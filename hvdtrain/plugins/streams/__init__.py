"""Data that is read from beginning to end: generators, and other iterables.

`streamed.py` finds lengths and plans; `reading.py` is what its process reads, `iterable.py` for iterables.
"""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(sources={"IterableDataset": f"{__name__}.iterable:IterableDataset"}, needs={"lengths": "what an epoch has"})
