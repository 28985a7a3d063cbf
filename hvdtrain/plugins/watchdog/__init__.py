"""The watchdog, which ends a job that makes no progress; those of all ranks find out together which one hangs."""

from dataclasses import dataclass

from hvdtrain.config.keys import Section, key, positive
from hvdtrain.config.plugins import Plugin


@dataclass(frozen=True, kw_only=True)
class WatchdogKeys(Section):
    """Ending a job that hangs."""

    watchdog_timeout: float | None = key(
        None,
        "end the job when a rank makes no progress for this many seconds; None: for 20 times the longest step, evaluation step "
        "or saving so far, at least 60 s; at least 300 s after the first one, and 1800 s where none is known yet (while the "
        "job starts or ends, and in callbacks, at least 1800 s in any case)",
        positive,
    )


PLUGIN = Plugin(
    watchdogs={"watchdog": f"{__name__}.open:open_watchdog"},
    keys={"watchdog": WatchdogKeys},
)
