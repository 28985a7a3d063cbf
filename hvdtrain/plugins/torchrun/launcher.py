"""torchrun where it may restart ranks. It does so after any failure, so an error is recorded for the next attempt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from hvdtrain.comm.launchers import Launcher, Torchrun, number_in
from hvdtrain.errors import Outcome, TrainingError
from hvdtrain.plugins.torchrun import failures
from hvdtrain.plugins.torchrun.failures import Failure


class RestartingTorchrun(Torchrun):
    """That of torch.distributed with --max-restarts."""

    depth = 21  # it is a torchrun, too

    @classmethod
    def detect(cls, environ: Mapping[str, str]) -> Launcher | None:
        return super().detect(environ) if failures.max_restarts(environ) else None

    @property
    def restarts(self) -> Literal["never", "all ranks", "lost ranks"]:
        return "all ranks"

    @property
    def is_restart(self) -> bool:
        return number_in(self._environ, "TORCHELASTIC_RESTART_COUNT", 0) > 0

    def on_start(self) -> int | None:
        """On several hosts, the failure has to be shared first: `refuse_to_repeat` does so once the ranks are connected."""
        failure = failures.read(self._environ)
        if failure is None or self.place.size != self.place.local_size:
            return None
        failures.print_refusal(self._environ, failure)
        return failure.status

    def refuse_to_repeat(self) -> None:
        failure = failures.read(self._environ)
        if failure is not None:
            raise TrainingError(failure.refusal)

    def on_failure(self, outcome: Outcome, message: str) -> str:
        if outcome.repeatable:
            rank = f"rank {self.place.rank} of {self.place.size}"
            failure = Failure(outcome.status, f"{rank}: {failures.cause_in(message)}")
            failures.record(self._environ, failure)
        return super().on_failure(outcome, message)
