"""The keys of traces."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key, positive


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
