"""The page that trackers keep with a run."""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from hvdtrain.plugins.report.runs import read_runs
from hvdtrain.plugins.report.state import State
from hvdtrain.report.ends import Status

PLOT_PACKAGE = "plotly"
"""The package that draws the figures."""


def write_page(folder: Path, status: Status) -> Path | None:
    """Write `report.html`, the page about a training, into its folder; None: it cannot be drawn, which was logged at the start.

    Args:
        status: how the training ends, which is not recorded yet.
    """
    if find_spec(PLOT_PACKAGE) is None:
        return None
    from hvdtrain.plugins.report import page  # here, since it needs plotly

    with redirect_stderr(io.StringIO()):  # warnings of damaged lines
        runs = [replace(run, state=State(status)) for run in read_runs([folder])]
        (folder / "report.html").write_text(page.page(runs), encoding="utf-8")
    return folder / "report.html"
