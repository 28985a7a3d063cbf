"""horovodrun with its elastic driver: the surviving ranks continue as new programs (elastic.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from hvdtrain.comm import this_process
from hvdtrain.comm.launchers import Horovodrun, Launcher
from hvdtrain.errors import TO_BE_CONTINUED, LaunchError, Outcome
from hvdtrain.plugins.horovod import elastic


class ElasticHorovodrun(Horovodrun):
    """That of Horovod with its elastic driver."""

    depth = 31  # it is a horovodrun, too
    outlives = 120.0  # time for the driver and Gloo to let a rank that waits for a hanging one continue without it

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Launcher | None:
        return super().detect(environ) if environ.get("HOROVOD_ELASTIC") == "1" else None

    @classmethod
    def start(cls, settings: Any, arguments: Sequence[str], folder: str) -> int | None:
        """Nothing: the driver has started this process, if it is a rank."""
        if isinstance(this_process.launcher(), cls):
            check_elastic(settings.run.backend)
        return None

    @property
    def restarts(self) -> Literal["never", "all ranks", "lost ranks"]:
        return "lost ranks"

    def on_start(self) -> int | None:
        elastic.watch_hosts(self._environ)
        return None

    def on_training(self) -> None:
        elastic.stop_for_other_hosts(self._environ)

    def on_failure(self, outcome: Outcome, message: str) -> str:
        if outcome.scope == "a peer":
            return f" ({elastic.start_again(self._environ, after_stop=False)})"
        if outcome.repeatable:
            elastic.report_error(self._environ)
        return ""

    def on_stop(self, outcome: Outcome, message: str) -> None:
        """After a stop for a change of hosts, the ranks continue as new programs."""
        if outcome.status == TO_BE_CONTINUED:
            elastic.start_again(self._environ, after_stop=True)
        else:
            self.on_failure(outcome, message)


def check_elastic(backend: str) -> None:
    """Raises: LaunchError, if the framework's ranks cannot continue under Horovod's elastic driver."""
    from hvdtrain.learner.frameworks import FRAMEWORKS, backends_with  # here, as every command imports this file

    if "elastic Horovod" not in FRAMEWORKS[backend].features:
        raise LaunchError(
            f"horovodrun --min-np: expected backend {backends_with('elastic Horovod')}, got {backend!r}, whose ranks start too "
            "late for Horovod to reconnect them reliably (leave out --min-np and --host-discovery-script; the same command "
            "continues after a failure)"
        ).on_all_ranks()
