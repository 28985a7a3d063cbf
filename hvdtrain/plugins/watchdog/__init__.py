"""The watchdog, which ends a job that makes no progress; those of all ranks find out together which one hangs."""

from hvdtrain.config.plugins import Plugin

PLUGIN = Plugin(
    watchdogs={"watchdog": f"{__name__}.open:open_watchdog"},
    keys={"watchdog": f"{__name__}.keys:WatchdogKeys"},
)
