"""Compression of messages to fewer than 16 bits: PowerSGD for gradients, and few bits for changes of parameters."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(compressions={name: f"{__name__}.table:{name.upper()}" for name in ("powersgd", "int8", "int4", "int2")})
