"""Traces of a training: which sequences every step trains on, and a profile of some steps."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    recorders={"sequences": f"{__name__}.records:record_sequences", "profile": f"{__name__}.profile:profile_steps"},
    keys={"trace": f"{__name__}.keys:TraceKeys"},
)
