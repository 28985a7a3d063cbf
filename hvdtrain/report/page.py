"""An HTML page about one or several trainings, in a single file without external resources."""

from __future__ import annotations

import html
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from hvdtrain.report import plots
from hvdtrain.report.epoch import held_up
from hvdtrain.report.runs import Run
from hvdtrain.runtime.scores import text
from hvdtrain.runtime.timer import clock_text

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2730; max-width: 1320px; margin: 2rem auto; padding: 0 1.5rem }
h1 { font-size: 1.6rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-bottom: 1px solid #d8dee3 }
.figures { display: flex; flex-wrap: wrap; gap: 1rem } figure { margin: 0 } .figures svg { max-width: 100%; height: auto }
table { border-collapse: collapse; font-size: 13px } td, th { padding: .2rem .7rem; text-align: left; vertical-align: top }
td:first-child { white-space: nowrap }
tr:nth-child(even) { background: #f3f6f8 } td.number { text-align: right; font-variant-numeric: tabular-nums }
code { font: 12px/1.4 ui-monospace, monospace; overflow-wrap: anywhere } .late { color: #b02a37 } .note { color: #5c6b77 }
"""


def figures_of(runs: list[Run]) -> dict[str, dict[str, Figure]]:
    """All figures, by chapter and then by name."""
    chapters: dict[str, dict[str, Figure]] = {
        "Scores": plots.score_figures(runs),
        "Learning rate and computing time": {
            "learning rate": plots.learning_rate_figure(runs),
            "computing time": plots.computing_figure(runs),
        },
    }
    for run in runs:
        suffix = f" of {run.name}" if len(runs) > 1 else ""
        figures = {f"time{suffix}": plots.time_figure(run)}
        if len(run.epochs[-1]["seconds"]) > 1:
            figures[f"ranks{suffix}"] = plots.rank_figure(run)
        if any(epoch["padding"] for epoch in run.epochs):
            figures[f"padding{suffix}"] = plots.padding_figure(run)
        chapters[f"Time and batches{suffix}"] = figures
    return chapters


def page(runs: list[Run], chapters: Mapping[str, Mapping[str, Figure]]) -> str:
    """The page as HTML, with its figures as inline SVG."""
    title = ", ".join(run.name for run in runs)
    parts = [f"<h1>{html.escape(title)}</h1>", _overview(runs)]
    for chapter, figures in chapters.items():
        drawn = "\n".join(f"<figure>{_svg(figure, name)}</figure>" for name, figure in figures.items())
        parts.append(f"<h2>{html.escape(chapter)}</h2>\n<div class=figures>{drawn}</div>")
    for run in runs:
        suffix = f" of {html.escape(run.name)}" if len(runs) > 1 else ""
        parts.append(f"<h2>Ranks that held others up{suffix}</h2>\n{_late(run)}")
        parts.append(f"<h2>Epochs{suffix}</h2>\n{_epochs(run)}")
    parts += [f"<h2>Settings</h2>\n{_settings(runs)}", f"<h2>Starts and versions</h2>\n{_starts(runs)}"]
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{STYLE}</style>"
    return f"<!doctype html>\n<html lang=en><head>{head}</head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"


def write_pictures(folder: Path, chapters: Mapping[str, Mapping[str, Figure]]) -> list[Path]:
    """Write every figure as a PNG file and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for figures in chapters.values():
        for name, figure in figures.items():
            files.append(folder / f"{name.replace(' ', '-').replace('/', '-')}.png")
            figure.savefig(files[-1], dpi=150)
    return files


def _overview(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        last = run.epochs[-1]
        seconds = sum(
            epoch.get("seconds_before", 0.0) + sum(epoch["seconds"][0].values()) if epoch["seconds"] else epoch["elapsed"]
            for epoch in run.epochs
        )
        scores = text({name.replace("_loss_", " "): float(value) for name, value in last["scores"].items()})
        cells = [run.name, last["epoch"], len(last["seconds"]), clock_text(seconds), f"{last['computing']:.1%}", scores]
        rows.append(cells)
    return _table(["run", "epochs", "ranks", "time", "computing time of the last epoch", "scores of the last epoch"], rows)


def _epochs(run: Run) -> str:
    names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch["scores"]))
    rows = []
    for epoch in run.epochs:
        scores = [f"{float(epoch['scores'][name]):.4g}" if name in epoch["scores"] else "" for name in names]
        training = [clock_text(epoch["elapsed"]), f"{epoch['computing']:.1%}", f"{epoch['learning_rate']:.4g}"]
        rows.append([epoch["epoch"], epoch["steps"], *training, *scores])
    return _table(["epoch", "steps", "training", "computing", "rate", *(name.replace("_loss_", " ") for name in names)], rows)


def _late(run: Run) -> str:
    late_ranks = [(epoch["epoch"], held_up(epoch["seconds"])) for epoch in run.epochs]
    lines = [f"<li class=late>epoch {epoch}: {html.escape(late)}</li>" for epoch, late in late_ranks if late]
    if len(run.epochs[-1]["seconds"]) < 2:
        return "<p class=note>Trained on a single rank.</p>"
    return f"<ul>{''.join(lines)}</ul>" if lines else "<p class=note>None: no rank was at least 15% slower than the others.</p>"


def _settings(runs: list[Run]) -> str:
    """The keys that at least one run sets to something other than the default."""
    known = [run.starts[-1]["settings"] if run.starts else {} for run in runs]
    names = list(dict.fromkeys(name for settings in known for name in settings))
    rows: list[list[Any]] = []
    for name in names:
        cells = [settings.get(name, ("", "")) for settings in known]
        if any(origin not in ("", "default") for _, origin in cells):
            rows.append([name, *(f"{value}  [{origin}]" if origin else "" for value, origin in cells)])
    return (
        _table(["key", *(run.name for run in runs)], rows, code=True)
        + "<p class=note>All other keys have their default values.</p>"
    )


def _starts(runs: list[Run]) -> str:
    rows = []
    for run in runs:
        for start in run.starts:
            hosts = [f"{host} ({device})" for host, device in start["hosts"]]
            where = ", ".join(f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts))
            versions = ", ".join(f"{name} {number}" for name, number in start["versions"].items())
            first, size = start["first_epoch"], start["num_parameters"]
            rows.append([run.name, start["time"], first, where, size, versions, start["command"]])
    return _table(["run", "time", "from epoch", "ranks", "parameters", "versions", "command"], rows)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]], code: bool = False) -> str:
    def cell(value: Any) -> str:
        written = html.escape(str(value))
        number = written.replace(".", "").replace("%", "").replace(":", "").isdigit()
        return f"<td{' class=number' if number else ''}>{f'<code>{written}</code>' if code else written}</td>"

    top = "".join(f"<th>{html.escape(head)}</th>" for head in heads)
    body = "\n".join(f"<tr>{''.join(cell(value) for value in row)}</tr>" for row in rows)
    return f"<table><tr>{top}</tr>\n{body}</table>"


def _svg(figure: Figure, name: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    drawn = buffer.getvalue()
    return drawn[drawn.index("<svg") :].replace("<svg ", f'<svg role="img" aria-label="{html.escape(name)}" ', 1)
