"""What was spent in the earlier starts of a training."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.comm import this_process
from hvdtrain.plugins.goodput.measured import MeasuredGoodput
from hvdtrain.plugins.goodput.spent import Spent, before_start
from hvdtrain.report.ends import WRITTEN
from hvdtrain.report.json_lines import DAMAGED_LINE_ERRORS
from hvdtrain.runtime import log
from hvdtrain.runtime.goodput import process_began
from hvdtrain.settings import Settings
from hvdtrain.training.session import Session


def open_goodput(settings: Settings, session: Session, began: float) -> MeasuredGoodput:
    """The measurement of this start, which goes on with the numbers of earlier ones on rank 0.

    Call it before this start writes any file but the log.

    Args:
        began: when the work of this start began, in a program's process.
    """
    if session.comm.rank != 0:
        return MeasuredGoodput(session.timer)
    launcher = this_process.launcher()
    progress = session.progress
    folder = settings.records
    saved = Spent.from_state(progress.spent)
    # A training that starts from scratch is another one, unless it was the launcher that restarted it.
    recorded = Spent.from_state(_last_recorded(folder)) if saved is not None or launcher.is_restart else None
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
    goodput = MeasuredGoodput(session.timer, before, began if before.jump else max(began, before.until))
    if settings.saving.save_interval_minutes == "auto":
        log.detail(f"save_interval_minutes: at first, {goodput.describe_interval()}")
    return goodput


def _last_recorded(folder: Path) -> Any:
    """The entry in the last readable line of starts.jsonl; None: there is none."""
    path = folder / "starts.jsonl"
    for line in reversed(path.read_bytes().splitlines() if path.exists() else []):
        with suppress(*DAMAGED_LINE_ERRORS, AttributeError):
            return json.loads(line).get("goodput")
    return None
