"""The HTML page about one or several trainings: a single file that includes page.css and page.js and needs no network."""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import io
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import asdict, dataclass, replace
from functools import cache
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.data.files import size_text
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.report import overview, plots, project
from hvdtrain.plugins.report.plots import Figure, finite, split
from hvdtrain.plugins.report.runs import Run, read_runs
from hvdtrain.plugins.report.slow_ranks import straggler_line
from hvdtrain.plugins.report.state import State
from hvdtrain.report.ends import Status
from hvdtrain.report.starts import hosts_text, ranks_text
from hvdtrain.runtime.timer import duration_text
from hvdtrain.version import __version__

POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""The page may load only data.json from its server, if it has one, and may run only its two scripts, which are listed by
checksum. So text that was not escaped by mistake can run nothing."""


MANY_POINTS = 2500
"""The most points within epochs of a figure's curves of the same kind."""

MANY_RUNS = 30
"""With more trainings than this, the page has no chapters about each of them."""


@dataclass(frozen=True)
class Chapter:
    """A chapter of the page: figures, below other content.

    Attributes:
        name: identifies it in addresses.
        before: HTML above the figures.
        run: whose late ranks are listed below the figures.
        is_folded: whether the figures are drawn only when they are asked for.
    """

    name: str
    title: str
    figures: Sequence[Figure]
    before: str = ""
    run: Run | None = None
    is_folded: bool = False


def chapters_of(runs: list[Run]) -> list[Chapter]:
    """The chapters with figures."""
    chapters = [Chapter("scores", "Scores", plots.score_figures(runs))]
    if len(runs) > 1:
        chapters.append(Chapter("compared", "One by one", project.key_against_score(runs), project.small_multiples(runs)))
    chapters.append(Chapter("speed", "Speed", plots.speed_figures(runs)))
    if len(runs) == 1:
        chapters.append(Chapter("time", "Where the time went", plots.time_figures(runs[0]), run=runs[0]))
    else:
        chapters.append(Chapter("time", "Where the time went", plots.time_comparison(runs)))
        for number, run in enumerate(runs if len(runs) <= MANY_RUNS else []):
            figures = [replace(figure, name=f"{figure.name} of {run.name}") for figure in plots.time_figures(run)]
            title = f"Where the time of {run.name} went"
            chapters.append(Chapter(f"time-{number}", title, figures, run=run, is_folded=len(runs) > plots.FEW_RUNS))
    if len(runs) > plots.FEW_RUNS:
        limit = max(100, MANY_POINTS // len(runs))
        chapters = [replace(each, figures=[plots.thinned(figure, limit) for figure in each.figures]) for each in chapters]
    return [chapter for chapter in chapters if chapter.figures or chapter.before]


def content(runs: list[Run], title: str = "") -> dict[str, Any]:
    """The page's content: `sections` {id: HTML} and `figures`, as page.js expects them, and their checksum as `version`.

    Args:
        title: of a page about several trainings.
    """
    chapters = chapters_of(runs)
    title = title or ", ".join(run.name for run in runs)
    is_single = len(runs) == 1
    parts = {"epochs": _epochs(runs), "models": _models(runs), "settings": _settings(runs), "starts": _starts(runs)}
    titles = {"runs": "Trainings"} if not is_single else {}
    titles |= {chapter.name: chapter.title for chapter in chapters if is_single or chapter.run is None}
    headings = {"epochs": "Epochs", "models": "Model", "settings": "Config", "starts": "Starts"}
    titles |= {name: headings[name] for name, html in parts.items() if html}
    sections = {"summary": _header(runs, title) + (overview.tiles(runs[0]) if is_single else overview.overview_of_several(runs))}
    links = "".join(f"<a href='#{name}'>{escape(title)}</a>" for name, title in titles.items())
    sections["toc"] = f"<nav aria-label=contents>{links}</nav>"
    if not is_single:
        sections["trainings"] = project.runs_table(runs, [_dot(number) for number in range(len(runs))])
    for chapter in chapters:
        cards = "".join(_card(figure) for figure in chapter.figures)
        late = _straggler_list(chapter.run) if chapter.run is not None else ""
        grid = f"<div class=grid>{cards}</div>{late}"
        if chapter.is_folded:
            sections[f"{chapter.name}-"] = _folded(chapter.title, grid, look=f"folded id={chapter.name}")
        else:
            sections[f"{chapter.name}-"] = _section(chapter.title, chapter.before + grid, chapter.name)
    sections |= {f"{name}-": html for name, html in parts.items()}
    shown = {
        "sections": sections,
        "figures": [asdict(figure) for chapter in chapters for figure in chapter.figures],
        "runs": [{"name": run.name, "state": run.state.name} for run in runs],
        "base": overview.baseline(runs),
    }
    version = hashlib.sha256(_json(shown).encode()).hexdigest()[:16]
    is_running = any(run.state.name == "running" for run in runs)
    return {"title": title, "version": version, "running": is_running, **shown}


def page(runs: list[Run], title: str = "", *, live: bool = False) -> str:
    """The page as HTML.

    Args:
        title: of a page about several trainings.
        live: whether the page asks its server for new data (serve.py).

    Raises:
        ConfigError: plotly is not installed.
    """
    shown = content(runs, title)
    here = Path(__file__).parent
    script = page_script()
    packed, _ = plotly_script()
    sections = "\n".join(f"<section id={name}>{html}</section>" for name, html in shown["sections"].items())
    data = _json({name: value for name, value in shown.items() if name != "sections"})
    return f"""<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark"><meta http-equiv=Content-Security-Policy content="{policy()}">
<title>{escape(shown["title"])}</title><style>{(here / "page.css").read_text(encoding="utf-8")}</style></head>
<body{" data-live" if live else ""}><main>
{sections}
</main>
<footer class=note>{"" if live else f"as of {time.strftime('%Y-%m-%d %H:%M')} · "}hvdtrain {__version__}</footer>
<noscript><p class=note>The figures need JavaScript.</p></noscript>
<script type=application/json id=data>{data}</script>
<script type=text/plain id=plotly>{packed}</script>
<script>{script}</script>
</body></html>
"""


def write_page(folder: Path, status: Status) -> Path | None:
    """Write `report.html`, the page about a training, into its folder; None: it cannot be drawn, which was logged at the start.

    Args:
        status: how the training ends, which is not recorded yet.
    """
    if find_spec("plotly") is None:
        return None
    with redirect_stderr(io.StringIO()):  # warnings of damaged lines
        runs = [replace(run, state=State(status)) for run in read_runs([folder])]
        (folder / "report.html").write_text(page(runs), encoding="utf-8")
    return folder / "report.html"


def page_script() -> str:
    """The page's own script."""
    return (Path(__file__).parent / "page.js").read_text(encoding="utf-8")


def policy() -> str:
    """The page's content security policy. Raises: ConfigError, if plotly is not installed."""
    return POLICY.format(scripts=f"{checksum_of(page_script())} {plotly_script()[1]}")


def checksum_of(script: str) -> str:
    """A script's checksum, in the form of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


@cache
def plotly_script() -> tuple[str, str]:
    """The script of plotly as base64 of gzip (2 MB instead of 5), and its checksum for a policy.

    Raises:
        ConfigError: plotly is not installed.
    """
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ConfigError.of(
            "missing-package", f"hvdtrain report: expected the package plotly, got: {error} (pip install plotly)"
        ) from None
    script = get_plotlyjs()
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode(), checksum_of(script)


def _json(value: Any) -> str:
    """JSON that is safe inside a page's <script>: no text in it can end the script."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _section(title: str, html: str, name: str) -> str:
    return f"<h2 id={name}>{escape(title)}<a class=link href='#{name}' title='link to this chapter'>#</a></h2>{html}"


def _folded(title: str, html: str, *, look: str = "card", is_open: bool = False) -> str:
    return f"<details class={look}{' open' if is_open else ''}><summary>{escape(title)}</summary>{html}</details>"


def _card(figure: Figure) -> str:
    switch = "<button class=switch type=button aria-pressed=false>share</button>" if figure.bars else ""
    note = f"<span class=note>{escape(figure.note)}</span>" if figure.note else ""
    name = figure_id(figure)
    buttons = (
        f"<span class=buttons>{switch}<button type=button data-csv='{name}'>CSV</button>"
        f"<button type=button data-png='{name}'>PNG</button><a class=link href='#{name}' title='link to this figure'>#</a></span>"
    )
    choices = ""
    if figure.scatter is not None:
        for axis, options in (("key", figure.scatter.keys), ("score", figure.scatter.scores)):
            entries = "".join(f"<option>{escape(option)}</option>" for option in options)
            choices += f"<label class=note>{axis} <select data-choose={axis}>{entries}</select></label>"
    return (
        f"<figure class='card{' wide' if figure.wide else ''}' id='{name}'>"
        f"<figcaption><b>{escape(figure.title)}</b> {note}{choices}<button type=button class=beyond hidden></button>{buttons}"
        f"</figcaption><div class=legend></div>"
        f'<div class=plot data-figure="{escape(figure.name)}"></div></figure>'
    )


def figure_id(figure: Figure) -> str:
    """The name of a figure in addresses."""
    return "figure-" + re.sub(r"[^A-Za-z0-9_]+", "-", figure.name)


def _header(runs: list[Run], title: str) -> str:
    is_single = len(runs) == 1
    times = [start["time"] for start in runs[0].starts if start.get("time")] if is_single else []
    facts = [f"started {times[0]}"] + [f"last {time}" for time in times[1:][-1:]] if times else []
    hosts = _hosts(runs[0].start) if is_single else ""
    facts += [hosts] if hosts else []
    state = f" {overview.badge(runs[0])}" if is_single else ""
    controls = (
        "<div class=controls><span class=choice role=group aria-label='x axis'>"
        + "".join(f"<button type=button data-x={x}>{x.replace('seconds', 'time')}</button>" for x in ("epoch", "step", "seconds"))
        + "</span><button type=button id=log aria-pressed=false>log scale</button><span id=live></span></div>"
    )
    line = f"<p class=note>{escape(' · '.join(facts))}</p>" if facts else ""
    band = overview.band(runs[0]) if is_single else ""
    return f"<header><div><h1>{escape(title)}{state}</h1>{line}</div>{controls}</header>{band}"


def _dot(number: int) -> str:
    return f"<i class=dot style='background:var(--c{number % plots.COLORS})'></i>"


def _hosts(start: Mapping[str, Any]) -> str:
    """The ranks by host: '4 ranks: 2 on a (CPU), 2 on b (CPU)'."""
    hosts = [(host, device) for host, device in start.get("hosts") or ()]
    return f"{ranks_text(len(hosts))}: {hosts_text(hosts)}" if hosts else ""


def _straggler_list(run: Run) -> str:
    late_lines = [(epoch["epoch"], straggler_line(epoch.get("seconds") or [])) for epoch in run.epochs]
    lines = [f"<li>epoch {epoch}: {escape(late)}</li>" for epoch, late in late_lines if late]
    if overview.num_ranks(run) < 2:
        return ""
    if not lines:
        return "<p class=note>No rank held the others up: none was at least 15 % slower than the others.</p>"
    title = f"Ranks that held the others up ({len(lines)} epoch{'s' if len(lines) > 1 else ''})"
    return _folded(title, f"<ul>{''.join(lines)}</ul>", look="'card late'", is_open=len(lines) <= 5)


def _epochs(runs: list[Run]) -> str:
    tables = []
    for number, run in enumerate(runs if len(runs) <= MANY_RUNS else []):
        has_sent = any("sent" in epoch for epoch in run.epochs) and overview.num_ranks(run) > 1
        names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch["scores"]))
        best = {name: (run.best(name) or (None,))[0] for name in names if split(name)[0] != "train"}
        rows = []
        for epoch in run.epochs:
            row = [str(epoch["epoch"])]
            for name in names:
                text = _number(epoch["scores"].get(name), ".4g")
                row.append(f"<b class=good>{text}</b>" if best.get(name) == epoch["epoch"] else text)
            row += [_number(epoch.get("learning_rate"), ".4g"), duration_text(epoch.get("elapsed") or 0.0)]
            row += [_number(epoch.get("computing"), ".1%"), _number(epoch.get("steps"), "g")]
            if has_sent:
                row.append(size_text(epoch.get("sent") or 0))
            rows.append(row)
        heads = ["epoch", *map(overview.short, names), "learning rate", "training", "computing", "steps"]
        heads += ["sent by a rank"] if has_sent else []
        title = f"Epochs of {run.name}" if len(runs) > 1 else "All epochs"
        tools = f"<div class=tools><button type=button data-csv='epochs-{number}'>CSV</button></div>"
        table = f"<div class=scroll>{tools}<div id='epochs-{number}'>{_table(heads, rows)}</div></div>"
        if rows:
            tables.append(_folded(title, table, is_open=len(runs) == 1 and len(rows) <= 24))
    return _section("Epochs", "\n".join(tables), "epochs") if tables else ""


def _models(runs: list[Run]) -> str:
    """The layers of each run's model with their parameters; equal models are shown once."""
    tables = []
    for number, run in enumerate(runs):
        if run.summary is None or run.summary in [earlier.summary for earlier in runs[:number]]:
            continue
        rows = []
        for layer in run.summary["layers"]:
            sizes = ", ".join(f"{each['name'].rpartition('.')[2]} {_shape(each['shape'])}" for each in layer["parameters"])
            trained = layer["num_trainable"] / layer["num_parameters"] if layer["num_parameters"] else None
            cells = [f"<code>{escape(layer['name'] or 'model')}</code>", escape(layer["type"]), f"<code>{escape(sizes)}</code>"]
            count = f"{layer['num_parameters']:,}" if layer["num_parameters"] else ""
            rows.append([*cells, count, "" if trained is None else f"{trained:.0%}"])
        title = f"{run.summary['num_parameters']:,} parameters in {len(rows)} layers"
        title += f" of {run.name}" if len(runs) > 1 else ""
        table = _table(["layer", "type", "its own parameters", "parameters", "trained"], rows)
        tables.append(_folded(title, f"<div class=scroll>{table}</div>", is_open=len(runs) == 1 and len(rows) <= 24))
    return _section("Model", "\n".join(tables), "models") if tables else ""


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _number(value: Any, form: str) -> str:
    number = finite(value)
    return "" if value is None else escape(str(value)) if number is None else format(number, form)


def _settings(runs: list[Run]) -> str:
    """The keys in effect: those that differ between runs or starts, those that were set, all of them; and the configs' text."""
    tables = []
    of_runs = [run.settings for run in runs]
    if len(runs) > 1 and all(of_runs):
        tables.append(
            _keys("What differs between the runs", _differing(of_runs), [run.name for run in runs], of_runs, is_open=True)
        )
    for run in runs:
        of_starts = [start.get("settings") or {} for start in run.starts]
        title = "What changed between the starts" + (f" of {run.name}" if len(runs) > 1 else "")
        times = [start.get("time", "") for start in run.starts]
        tables.append(_keys(title, _differing(of_starts), times, of_starts, is_open=True))
    names = _names(of_runs)
    names_set = [name for name in names if any(_entry(settings, name)[1] not in ("", "default") for settings in of_runs)]
    heads = [run.name for run in runs] if len(runs) > 1 else ["value"]
    tables.append(_keys("Keys that were set", names_set, heads, of_runs, is_open=len(runs) == 1))
    tables.append(_keys("All keys in effect", names, heads, of_runs))
    shown = [html for html in (*tables, *_texts(runs)) if html]
    return _section("Config in effect", "\n".join(shown), "settings") if shown else ""


Settings = Mapping[str, Sequence[str]]
"""By key, its value as text and its origin."""


def _names(columns: Iterable[Settings]) -> list[str]:
    return list(dict.fromkeys(name for settings in columns for name in settings))


def _entry(settings: Settings, name: str) -> Sequence[str]:
    return settings.get(name, ("", ""))


def _differing(columns: Sequence[Settings]) -> list[str]:
    return [name for name in _names(columns) if len({_entry(settings, name)[0] for settings in columns}) > 1]


def _keys(title: str, names: list[str], heads: list[str], columns: Sequence[Settings], *, is_open: bool = False) -> str:
    """A collapsible table of keys, with a search field if it is long; '' without keys."""
    if not names:
        return ""
    rows = []
    for name in names:
        usual, _ = _entry(columns[0], name)
        row = [f"<code>{escape(name)}</code>"]
        for number, settings in enumerate(columns):
            value, origin = _entry(settings, name)
            look = " class=changed" if number and value != usual else ""
            where = f" <small class=note>{escape(origin)}</small>" if origin not in ("", "default") else ""
            row.append(f"<code{look}>{escape(value) or '—'}</code>{where}")
        rows.append(row)
    search = f"<input type=search placeholder='search {len(names)} keys' aria-label='search keys'>" if len(names) > 20 else ""
    table = f"{search}<div class=scroll>{_table(['key', *heads], rows)}</div>"
    return _folded(f"{title} ({len(names)})", table, look="'card keys'", is_open=is_open)


def _texts(runs: list[Run]) -> Iterable[str]:
    """The text of the first run's config files, and how those of the other runs differ from it."""
    first: Mapping[str, str] = {}
    for number, run in enumerate(runs):
        texts: Mapping[str, str] = run.start.get("texts") or {}
        for path, text in texts.items():
            name = Path(path).name
            before = next((text for place, text in first.items() if Path(place).name == name), None)
            if number and before == text:
                continue
            if number and before is not None:
                lines = difflib.unified_diff(before.splitlines(), text.splitlines(), runs[0].name, run.name, lineterm="")
                looks = {"+": "added", "-": "removed", "@": "note"}
                shown = "\n".join(f"<span class='{looks.get(line[:1], '')}'>{escape(line)}</span>" for line in lines)
                yield _folded(f"What changed in {name}: {run.name}", f"<pre>{shown}</pre>", is_open=True)
            else:
                title = f"{name} of {run.name}" if len(runs) > 1 else name
                yield _folded(title, f"<pre>{escape(text)}</pre>")
        first = first or texts


def _starts(runs: list[Run]) -> str:
    """When, where, and with which command and packages each training was started."""
    parts = []
    usual = runs[0].start.get("versions", {})
    for number, run in enumerate(runs):
        for start in reversed(run.starts):
            facts = {"from epoch": start.get("first_epoch", ""), "ranks": _hosts(start), "directory": start.get("directory", "")}
            rows = "".join(f"<dt>{name}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items() if value)
            command = f"<dt>command</dt><dd><code>{escape(str(start.get('command', '')))}</code></dd>"
            chips = "".join(
                f"<span class='chip{' changed' if usual.get(name) != version else ''}'>{escape(f'{name} {version}')}</span>"
                for name, version in (start.get("versions") or {}).items()
            )
            title = f"{_dot(number)}{escape(run.name)} · " if len(runs) > 1 else ""
            parts.append(
                f"<div class=card><b>{title}{escape(str(start.get('time', '')))}</b><dl>{rows}{command}</dl><p>{chips}</p></div>"
            )
    return _section("Starts and versions", f"<div class=grid>{''.join(parts)}</div>", "starts") if parts else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the cells of `rows` are HTML."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
