"""Traces of a training: which sequences every step trains on, and a profile of some steps."""

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key, positive
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class TraceKeys(Section):
    """Finding mistakes."""

    trace_sequences: str | None = key(
        None,
        "record which sequences every step trains on: a prefix for the names of the files, one per rank and start "
        "(docs/resuming.md)",
    )
    profile_steps: int | None = key(
        None,
        "profile N steps of every rank, after the first few, with the framework's profiler, and write traces for Perfetto into "
        "profile/ next to the model, with Horovod's timeline (docs/performance.md)",
        positive,
    )


PLUGIN = Plugin(
    recorders={"sequences": f"{__name__}.records:record_sequences", "profile": f"{__name__}.profile:profile_steps"},
    keys={"trace": TraceKeys},
)
