"""What was spent in the earlier starts of a training, for the goodput."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.comm import this_process
from hvdtrain.report.ends import WRITTEN
from hvdtrain.report.starts import last_start
from hvdtrain.runtime import log
from hvdtrain.runtime.goodput import Goodput, Spent, before_start, process_began, steady_time
from hvdtrain.runtime.interrupt import Stopped
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session


def job_began(settings: Settings) -> float:
    """When the job began: its restarts by a launcher belong to it."""
    launcher = this_process.launcher()
    if launcher.began is not None:
        return launcher.began
    return process_began(launcher.parent) if settings.process.is_own else steady_time()


@contextmanager
def count_steps(goodput: Goodput) -> Iterator[None]:
    """The start is over: the `with` block trains. Logs the goodput at its end, but not after an error."""
    goodput.go_on()
    try:
        yield
    except Stopped:
        log.row(3, goodput.spent().line())
        raise
    log.row(3, goodput.spent().line())


def open_goodput(settings: Settings, session: Session, began: float) -> Goodput:
    """The measurement of this start, which goes on with the numbers of earlier ones on rank 0.

    Call it before this start writes any file but the log.

    Args:
        began: when the work of this start began, in a program's process.
    """
    if session.comm.rank != 0:
        return Goodput(session.timer)
    launcher = this_process.launcher()
    progress = session.progress
    folder = settings.records
    saved = Spent.from_state(progress.spent)
    # A training that starts from scratch is another one, unless it was the launcher that restarted it.
    recorded = Spent.from_state(last_start(folder).get("goodput")) if saved is not None or launcher.is_restart else None
    files = [folder / name for name in WRITTEN] + ([progress.file] if progress.file is not None else [])
    last_sign = max((file.stat().st_mtime for file in files if file.exists()), default=0.0)
    before = before_start(saved, recorded, launcher.failures, last_sign)
    if settings.process.is_own:
        began = process_began()
    if before.jump:
        log.detail(f"goodput: the clock was set by {before.jump:+.0f} s: the time before this start's begin does not count")
    elif launcher.is_restart and before.starts:
        began = before.until
    elif launcher.began is not None:
        began = launcher.began
    goodput = Goodput(session.timer, before, began if before.jump else max(began, before.until))
    if settings.saving.save_interval_minutes == "auto":
        log.detail(f"save_interval_minutes: at first, {goodput.describe_interval()}")
    return goodput
