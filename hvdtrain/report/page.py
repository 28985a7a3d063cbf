"""The HTML page about one or several trainings: a single file that includes page.css and page.js and needs no network."""

from __future__ import annotations

import base64
import difflib
import gzip
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from hvdtrain.data.files import size_text
from hvdtrain.errors import ConfigError
from hvdtrain.report import plots
from hvdtrain.report.epoch import straggler_line
from hvdtrain.report.plots import Figure, finite, split
from hvdtrain.report.runs import Run
from hvdtrain.runtime.timer import duration_text

POLICY = (
    "default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'"
)
"""The page may load only data.json from its server, if it has one, and may run only its two scripts, which are listed by
checksum. So text that was not escaped by mistake can run nothing."""


def chapters_of(runs: list[Run]) -> list[tuple[str, list[Figure], Run | None]]:
    """The chapters: a title, the figures, and the run whose late ranks are listed below them."""
    chapters: list[tuple[str, list[Figure], Run | None]]
    chapters = [("Scores", plots.score_figures(runs), None), ("Speed", plots.speed_figures(runs), None)]
    if len(runs) == 1:
        chapters.append(("Where the time went", plots.time_figures(runs[0]), runs[0]))
    else:
        chapters.append(("Where the time went", plots.time_comparison(runs), None))
        for run in runs:
            figures = [replace(figure, name=f"{figure.name} of {run.name}") for figure in plots.time_figures(run)]
            chapters.append((f"Where the time of {run.name} went", figures, run))
    return [chapter for chapter in chapters if chapter[1]]


def content(runs: list[Run]) -> dict[str, Any]:
    """The page's content: `sections` {id: HTML} and `figures`, as page.js expects them, and their checksum as `version`."""
    chapters = chapters_of(runs)
    sections = {"summary": _header(runs) + (_tiles(runs[0]) if len(runs) == 1 else _comparison(runs))}
    for number, (title, figures, run) in enumerate(chapters):
        cards = "".join(_card(figure) for figure in figures)
        sections[f"chapter{number}"] = _section(title, f"<div class=grid>{cards}</div>")
        sections[f"late{number}"] = _straggler_list(run) if run is not None else ""
    sections |= {"epochs": _epochs(runs), "models": _models(runs), "settings": _settings(runs), "starts": _starts(runs)}
    shown = {"sections": sections, "figures": [asdict(figure) for _, figures, _ in chapters for figure in figures]}
    version = hashlib.sha256(_json(shown).encode()).hexdigest()[:16]
    return {"title": ", ".join(run.name for run in runs), "version": version, **shown}


def page(runs: list[Run], *, live: bool = False) -> str:
    """The page as HTML.

    Args:
        live: whether the page asks its server for new data (serve.py).

    Raises:
        ConfigError: plotly is not installed.
    """
    shown = content(runs)
    here = Path(__file__).parent
    script = (here / "page.js").read_text(encoding="utf-8")
    packed, checksum = plotly_script()
    policy = POLICY.format(scripts=f"{checksum_of(script)} {checksum}")
    sections = "\n".join(f"<section id={name}>{html}</section>" for name, html in shown["sections"].items())
    data = _json({name: value for name, value in shown.items() if name != "sections"})
    return f"""<!doctype html>
<html lang=en><head><meta charset=utf-8><meta name=viewport content="width=device-width, initial-scale=1">
<meta name=color-scheme content="light dark"><meta http-equiv=Content-Security-Policy content="{policy}">
<title>{escape(shown["title"])}</title><style>{(here / "page.css").read_text(encoding="utf-8")}</style></head>
<body{" data-live" if live else ""}><main>
{sections}
</main>
<noscript><p class=note>The figures need JavaScript.</p></noscript>
<script type=application/json id=data>{data}</script>
<script type=text/plain id=plotly>{packed}</script>
<script>{script}</script>
</body></html>
"""


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


def _section(title: str, html: str) -> str:
    return f"<h2>{escape(title)}</h2>{html}"


def _card(figure: Figure) -> str:
    switch = "<button class=switch type=button aria-pressed=false>share</button>" if figure.bars else ""
    note = f"<span class=note>{escape(figure.note)}</span>" if figure.note else ""
    return (
        f"<figure class='card{' wide' if figure.wide else ''}'>"
        f"<figcaption><b>{escape(figure.title)}</b> {note}{switch}</figcaption>"
        f'<div class=plot data-figure="{escape(figure.name)}"></div></figure>'
    )


def _header(runs: list[Run]) -> str:
    names = " ".join(
        f"<span class=run>{_dot(number) if len(runs) > 1 else ''}{escape(run.name)}</span>" for number, run in enumerate(runs)
    )
    start = runs[0].starts[-1] if len(runs) == 1 and runs[0].starts else {}
    facts = [f"started {start['time']}"] if start.get("time") else []
    hosts = _hosts(start)
    facts += [hosts] if hosts else []
    controls = (
        "<div class=controls><span class=choice role=group aria-label='x axis'>"
        + "".join(f"<button type=button data-x={x}>{x.replace('seconds', 'time')}</button>" for x in ("epoch", "step", "seconds"))
        + "</span><button type=button id=log aria-pressed=false>log scale</button><span id=live></span></div>"
    )
    return f"<header><div><h1>{names}</h1><p class=note>{escape(' · '.join(facts))}</p></div>{controls}</header>"


def _dot(number: int) -> str:
    return f"<i class=dot style='background:var(--c{number % 8})'></i>"


def _hosts(start: Mapping[str, Any]) -> str:
    """The ranks by host: '4 ranks: 2 on a (CPU), 2 on b (CPU)'."""
    hosts = [f"{host} ({device})" for host, device in start.get("hosts") or ()]
    where = [f"{hosts.count(host)} on {host}" for host in dict.fromkeys(hosts)]
    return f"{len(hosts)} rank{'s' if len(hosts) > 1 else ''}: {', '.join(where)}" if hosts else ""


def _tiles(run: Run) -> str:
    """The most important numbers, in large type."""
    tiles = []
    best = run.best(run.measure) if run.measure else None
    if run.measure and best:
        tiles.append(_tile(f"best {_short(run.measure)}", f"{best[1]:.4g}", f"epoch {best[0]}", "best"))
    wanted, done = run.setting("num_epochs"), run.epochs[-1]["epoch"] if run.epochs else 0
    share = min(1.0, _done(run) / wanted) if isinstance(wanted, int) and wanted else None
    bar = f"<i class=bar><i style='width:{share:.1%}'></i></i>" if share is not None else ""
    tiles.append(_tile("epochs", f"{done}", f"of {wanted}" if share is not None else "", "", bar))
    seconds = sum(plots.seconds_of(epoch) for epoch in run.epochs)
    tiles.append(_tile("time", duration_text(seconds), f"{seconds / len(run.epochs):.3g} s per epoch" if run.epochs else ""))
    for figure in plots.speed_figures([run]):
        values = [value for curve in figure.panels[0].curves[-1:] for value in curve.y if value is not None]
        if figure.name == "speed":
            name = f"speed on {_ranks(run)} rank{'s' * (_ranks(run) != 1)}"
            tiles.append(_tile(name, f"{values[-1]:,.4g}", "sequences/s"))
    computing = [epoch for epoch in run.epochs if finite(epoch.get("computing")) is not None]
    if computing:
        share = sum(epoch["computing"] * epoch["elapsed"] for epoch in computing) / sum(epoch["elapsed"] for epoch in computing)
        bar = f"<i class=bar><i style='width:{share:.1%}'></i></i>"
        tiles.append(_tile("computing", f"{share:.1%}", "of the training time", "", bar))
    size = run.starts[-1].get("num_parameters") if run.starts else None
    if isinstance(size, int):
        tiles.append(_tile("parameters", _count(size), ""))
    return f"<div class=tiles>{''.join(tiles)}</div>"


def _tile(name: str, value: str, note: str, look: str = "", more: str = "") -> str:
    return (
        f"<div class='tile {look}'><span class=note>{escape(name)}</span><b>{escape(value)}</b>"
        f"<span class=note>{escape(note)}</span>{more}</div>"
    )


def _count(number: int) -> str:
    """A number with a letter for thousands, millions or more."""
    for letter, unit in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def _done(run: Run) -> float:
    """The number of finished epochs, plus the share of the current one if steps are logged."""
    finished = run.epochs[-1]["epoch"] if run.epochs else 0
    last = run.steps[-1] if run.steps else None
    return max(finished, last["epoch"] - 1 + float(last["progress"])) if last else finished


def _ranks(run: Run) -> int:
    if run.epochs and run.epochs[-1].get("seconds"):
        return len(run.epochs[-1]["seconds"])
    return len(run.starts[-1].get("hosts") or ()) if run.starts else 1


def _comparison(runs: list[Run]) -> str:
    """A table with a row per run."""
    measures = list(dict.fromkeys(run.measure for run in runs if run.measure))
    names = measures + sorted({name for run in runs for epoch in run.epochs for name in epoch["scores"]} - set(measures))
    names = [name for name in names if split(name)[0] != "train"]
    best = {name: [run.best(name) for run in runs] for name in names}
    of_all = {
        name: (max if any(run.is_higher_better(name) for run in runs) else min)(
            (pair[1] for pair in values if pair), default=None
        )
        for name, values in best.items()
    }
    rows = []
    for number, run in enumerate(runs):
        seconds = sum(plots.seconds_of(epoch) for epoch in run.epochs)
        rate = plots.sequences_per_second(run.epochs[-1]) if run.epochs else None
        cells = [f"{_dot(number)}{escape(run.name)}", str(run.epochs[-1]["epoch"] if run.epochs else 0), str(_ranks(run))]
        cells += [duration_text(seconds), f"{rate:,.4g}" if rate else ""]
        for name in names:
            found = best[name][number]
            text = f"{found[1]:.4g} <small class=note>epoch {found[0]}</small>" if found else ""
            cells.append(f"<b class=good>{text}</b>" if found and found[1] == of_all[name] and len(runs) > 1 else text)
        rows.append(cells)
    heads = ["run", "epochs", "ranks", "time", "sequences/s", *(f"best {_short(name)}" for name in names)]
    return f"<div class='card scroll'>{_table(heads, rows)}</div>"


def _short(name: str) -> str:
    return " ".join(split(name)).strip()


def _straggler_list(run: Run) -> str:
    """A list of the epochs in which a rank held up the others."""
    found = [(epoch["epoch"], straggler_line(epoch.get("seconds") or [])) for epoch in run.epochs]
    lines = [f"<li>epoch {epoch}: {escape(late)}</li>" for epoch, late in found if late]
    if _ranks(run) < 2:
        return ""
    if not lines:
        return "<p class=note>No rank held the others up: none was at least 15 % slower than the others.</p>"
    return (
        f"<details class='card late'{' open' if len(lines) <= 5 else ''}><summary>Ranks that held the others up ({len(lines)} "
        + (f"epoch{'s' if len(lines) > 1 else ''})</summary><ul>{''.join(lines)}</ul></details>")
    )


def _epochs(runs: list[Run]) -> str:
    """A table of all epochs of each run."""
    tables = []
    for run in runs:
        names = list(dict.fromkeys(name for epoch in run.epochs for name in epoch["scores"]))
        best = {name: (run.best(name) or (None,))[0] for name in names if split(name)[0] != "train"}
        rows = []
        for epoch in run.epochs:
            row = [str(epoch["epoch"]), _number(epoch.get("steps"), "g"), duration_text(epoch.get("elapsed") or 0.0)]
            row += [_number(epoch.get("computing"), ".1%"), _number(epoch.get("learning_rate"), ".4g")]
            if any("sent" in epoch for epoch in run.epochs) and _ranks(run) > 1:
                row.append(size_text(epoch.get("sent") or 0))
            for name in names:
                text = _number(epoch["scores"].get(name), ".4g")
                row.append(f"<b class=good>{text}</b>" if best.get(name) == epoch["epoch"] else text)
            rows.append(row)
        heads = ["epoch", "steps", "training", "computing", "learning rate"]
        heads += ["sent by a rank"] if any("sent" in epoch for epoch in run.epochs) and _ranks(run) > 1 else []
        title = f"Epochs of {run.name}" if len(runs) > 1 else "All epochs"
        table = _table([*heads, *map(_short, names)], rows)
        is_open = " open" if len(runs) == 1 and len(rows) <= 24 else ""
        if rows:
            tables.append(
                f"<details class=card{is_open}><summary>{escape(title)}</summary><div class=scroll>{table}</div></details>"
            )
    return _section("Epochs", "\n".join(tables)) if tables else ""


def _models(runs: list[Run]) -> str:
    """The layers of each run's model with their parameters; equal models are shown once."""
    parts = []
    for number, run in enumerate(runs):
        if run.summary is None or run.summary in [earlier.summary for earlier in runs[:number]]:
            continue
        rows = []
        for layer in run.summary["layers"]:
            sizes = ", ".join(f"{one['name'].rpartition('.')[2]} {_shape(one['shape'])}" for one in layer["parameters"])
            trained = layer["num_trainable"] / layer["num_parameters"] if layer["num_parameters"] else None
            cells = [
                f"<code>{escape(layer['name'] or 'model')}</code>",
                escape(layer["type"]),
                f"<code>{escape(sizes)}</code>",
            ]
            count = f"{layer['num_parameters']:,}" if layer["num_parameters"] else ""
            rows.append([*cells, count, "" if trained is None else f"{trained:.0%}"])
        title = f"{run.summary['num_parameters']:,} parameters in {len(rows)} layers"
        title += f" of {run.name}" if len(runs) > 1 else ""
        table = _table(["layer", "type", "its own parameters", "parameters", "trained"], rows)
        is_open = " open" if len(runs) == 1 and len(rows) <= 24 else ""
        parts.append(f"<details class=card{is_open}><summary>{escape(title)}</summary><div class=scroll>{table}</div></details>")
    return _section("Model", "\n".join(parts)) if parts else ""


def _shape(shape: Sequence[int]) -> str:
    return "×".join(map(str, shape)) or "scalar"


def _number(value: Any, form: str) -> str:
    number = finite(value)
    return "" if value is None else escape(str(value)) if number is None else format(number, form)


def _settings(runs: list[Run]) -> str:
    """The keys in effect: those that differ between runs or starts, those that were set, all of them; and the configs' text."""
    parts = []
    known = [run.starts[-1].get("settings") or {} if run.starts else {} for run in runs]
    if len(runs) > 1 and all(known):
        differing = [name for name in _names(known) if len({_value(settings, name) for settings in known}) > 1]
        parts.append(_keys("What differs between the runs", differing, [run.name for run in runs], known, is_open=True))
    for run in runs:
        earlier = [start.get("settings") or {} for start in run.starts]
        changed = [name for name in _names(earlier) if len({_value(settings, name) for settings in earlier}) > 1]
        if changed:
            title = "What changed between the starts" + (f" of {run.name}" if len(runs) > 1 else "")
            parts.append(_keys(title, changed, [start.get("time", "") for start in run.starts], earlier, is_open=True))
    names = _names(known)
    given = [name for name in names if any(_origin(settings, name) not in ("", "default") for settings in known)]
    heads = [run.name for run in runs] if len(runs) > 1 else ["value"]
    parts.append(_keys("Keys that were set", given, heads, known, is_open=len(runs) == 1))
    parts.append(_keys("All keys in effect", names, heads, known))
    parts += _texts(runs)
    return _section("Config in effect", "\n".join(part for part in parts if part)) if any(parts) else ""


Settings = Mapping[str, Sequence[str]]
"""By key, its value as text and its origin."""


def _names(known: Iterable[Settings]) -> list[str]:
    return list(dict.fromkeys(name for settings in known for name in settings))


def _value(settings: Settings, name: str) -> str:
    return settings.get(name, ("", ""))[0]


def _origin(settings: Settings, name: str) -> str:
    return settings.get(name, ("", ""))[1]


def _keys(title: str, names: list[str], heads: list[str], known: Sequence[Settings], *, is_open: bool = False) -> str:
    """A collapsible table of keys, with a search field if it is long; '' without keys."""
    if not names:
        return ""
    rows = []
    for name in names:
        usual = _value(known[0], name)
        row = [f"<code>{escape(name)}</code>"]
        for number, settings in enumerate(known):
            value, origin = _value(settings, name), _origin(settings, name)
            look = " class=changed" if number and value != usual else ""
            where = f" <small class=note>{escape(origin)}</small>" if origin not in ("", "default") else ""
            row.append(f"<code{look}>{escape(value) or '—'}</code>{where}")
        rows.append(row)
    search = f"<input type=search placeholder='search {len(names)} keys' aria-label='search keys'>" if len(names) > 20 else ""
    return (
        f"<details class='card keys'{' open' if is_open else ''}><summary>{escape(title)} ({len(names)})</summary>{search}"
        f"<div class=scroll>{_table(['key', *heads], rows)}</div></details>"
    )


def _texts(runs: list[Run]) -> Iterable[str]:
    """The text of the first run's config files, and how those of the other runs differ from it."""
    first: Mapping[str, str] = {}
    for number, run in enumerate(runs):
        texts: Mapping[str, str] = run.starts[-1].get("texts") or {} if run.starts else {}
        for path, text in texts.items():
            name = Path(path).name
            before = next((other for place, other in first.items() if Path(place).name == name), None)
            title = f"{name} of {run.name}" if len(runs) > 1 else name
            if number and before == text:
                continue
            if number and before is not None:
                lines = difflib.unified_diff(before.splitlines(), text.splitlines(), runs[0].name, run.name, lineterm="")
                looks = {"+": "added", "-": "removed", "@": "note"}
                shown = "\n".join(f"<span class='{looks.get(line[:1], '')}'>{escape(line)}</span>" for line in lines)
                what = f"What changed in {name}: {run.name}"
                yield f"<details class=card open><summary>{escape(what)}</summary><pre>{shown}</pre></details>"
            else:
                yield f"<details class=card><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
        first = first or texts


def _starts(runs: list[Run]) -> str:
    """When, where, and with which command and packages each training was started."""
    parts = []
    usual = runs[0].starts[-1].get("versions", {}) if runs[0].starts else {}
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
    return _section("Starts and versions", f"<div class=grid>{''.join(parts)}</div>") if parts else ""


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table; the cells of `rows` are HTML."""
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
