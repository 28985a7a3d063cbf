"""hvdtrain's own launcher, for the keys `ngpu` and `dist_rank`, and for programs (plugins/programs/spawn.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

from hvdtrain.comm.launchers import SECONDS_FOR_THE_CAUSE, Check, Launcher, launcher_of
from hvdtrain.errors import Outcome
from hvdtrain.plugins.local_ranks import reports


class Ngpu(Launcher):
    """The launcher of this host. It may itself run under another launcher, to which errors are passed on."""

    name = "hvdtrain"
    variables = (reports.PLACE,)
    depth = 50
    peer_status = reports.PEER_FAILED
    hung_status = reports.HUNG

    @classmethod
    def start(cls, settings: Any, arguments: Sequence[str], folder: str) -> int | None:
        from hvdtrain.plugins.local_ranks.start import start  # here, as every start of the program imports this file

        return start(settings, arguments, folder)

    @cached_property
    def _outer(self) -> Launcher:
        outer = launcher_of({name: value for name, value in self._environ.items() if not name.startswith("HVDTRAIN_")})
        return type(outer)(self._environ, self.place)

    @property
    def restarts(self) -> Literal["never", "all ranks", "lost ranks"]:
        return self._outer.restarts

    @property
    def is_restart(self) -> bool:
        return bool(self.failures) or self._outer.is_restart

    @property
    def began(self) -> float | None:
        return reports.times_in(self._environ)[0] if reports.TIMES in self._environ else None

    @property
    def failures(self) -> Sequence[float]:
        return reports.times_in(self._environ)[1:] if reports.TIMES in self._environ else ()

    @property
    def parent(self) -> int | None:
        return int(self._environ[reports.PARENT]) if reports.PARENT in self._environ else self._outer.parent

    def refuse_to_repeat(self) -> None:
        self._outer.refuse_to_repeat()

    def leave_checks(self, checks: Sequence[Check]) -> None:
        if reports.ENDED in self._environ:
            reports.leave_checks(self._environ, self.place.rank, checks)

    def on_success(self) -> None:
        if reports.ENDED in self._environ:
            reports.report_file(self._environ[reports.ENDED], self.place.rank).touch()

    def on_failure(self, outcome: Outcome, message: str) -> str:
        if outcome.repeatable:
            self._outer.on_failure(outcome, message)
        if outcome.scope == "a peer" and reports.ENDED in self._environ:
            reports.wait_for_cause(self._environ, SECONDS_FOR_THE_CAUSE)
            return ""
        return super().on_failure(outcome, message)
