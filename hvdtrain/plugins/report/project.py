"""Several trainings on one page: finding them below a folder, the table of them, and the figures that compare them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from hvdtrain.errors import DataError
from hvdtrain.plugins.report import plots
from hvdtrain.plugins.report.overview import badge, num_ranks, short, state_text
from hvdtrain.plugins.report.plots import Figure, Scatter, finite, split
from hvdtrain.plugins.report.runs import Run, names_of, read_runs
from hvdtrain.report.ends import ENDS
from hvdtrain.runtime.records import SUFFIX
from hvdtrain.runtime.timer import duration_text

SKIPPED = ("overfit", "tensorboard", "wandb", "mlruns", "__pycache__")
"""Folders in which no training is looked for."""

MOST_KEYS = 12
"""The most keys that differ between the trainings and have columns in the table."""

LONGEST_VALUE = 40
"""The most letters of a key's value in the table."""


def is_training(folder: Path) -> bool:
    """Whether a training has written into a folder."""
    return any((folder / name).exists() for name in ("scores.jsonl", "starts.jsonl", ENDS))


def find_trainings(folder: Path) -> list[Path]:
    """The folders of trainings: this one, or else those below it, in natural order. Links are not followed."""
    if is_training(folder):
        return [folder, *filter(is_training, sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_dir()))]
    trainings = []
    for place, folders, _ in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in SKIPPED]
        trainings += [Path(place)] if is_training(Path(place)) else []
    return sorted(trainings, key=lambda path: _natural(str(path)))


@dataclass(frozen=True)
class Project:
    """The trainings of one page.

    Attributes:
        runs: those that can be read.
        title: of the page; empty: that of the training.
        problems: why others cannot be read.
    """

    runs: list[Run]
    title: str = ""
    problems: Sequence[str] = ()


def read_project(places: Sequence[Path], *, running: bool = False) -> Project:
    """Read the trainings in these folders and, if a folder is not one itself, below them.

    Args:
        running: as of `read_runs`.

    Raises:
        DataError: there is none, or the only one, or one that was named, cannot be read.
    """
    folders = list(dict.fromkeys(folder for place in places for folder in find_trainings(place))) or list(places)
    is_below = len(places) == 1 and folders != list(places)
    names = [str(folder.relative_to(places[0])) for folder in folders] if is_below else names_of(folders)
    runs = []
    problems = []
    for folder, name in zip(folders, names, strict=True):
        try:
            runs += read_runs([folder], [name], running=running)
        except DataError as error:
            if folder in places:
                raise
            problems.append(str(error))
    if not runs:
        raise DataError(problems[0])
    return Project(runs, places[0].resolve().name if is_below else "", problems)


def _natural(text: str) -> list[tuple[int, str]]:
    """A key by which 'run10' comes after 'run9'."""
    return [(int(piece), "") if piece.isdigit() else (-1, piece) for piece in re.split(r"(\d+)", text)]


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """The keys whose values differ between the trainings, numbers with many values first; not the model's place."""
    recorded = [run for run in runs if run.settings]
    names = dict.fromkeys(name for run in recorded for name in run.settings)
    values = {name: {_value(run, name) for run in recorded} for name in names}
    differing = [name for name in names if len(values[name]) > 1 and name not in ("model", "log")]
    return sorted(differing, key=lambda name: (any(finite(value) is None for value in values[name]), -len(values[name])))


def _value(run: Run, name: str) -> str:
    return str(run.settings.get(name, ("", ""))[0])


def measures_of(runs: Sequence[Run]) -> list[str]:
    """The scores with a best epoch, those that determine it first."""
    measures = list(dict.fromkeys(run.measure for run in runs if run.measure))
    others = sorted({name for run in runs for epoch in run.epochs for name in epoch["scores"]} - set(measures))
    return measures + [name for name in others if split(name)[0] != "train"]


def runs_table(runs: Sequence[Run], dots: Sequence[str]) -> str:
    """The table of trainings, which page.js sorts, filters, and completes with the differences from a baseline.

    Args:
        dots: the mark of each run's color as HTML.
    """
    names = measures_of(runs)
    keys = differing_keys(runs)[:MOST_KEYS]
    is_higher = {name: any(run.is_higher_better(name) for run in runs) for name in names}
    best = {name: [run.best(name) for run in runs] for name in names}
    of_all = {
        name: (max if is_higher[name] else min)((pair[1] for pair in pairs if pair), default=None) for name, pairs in best.items()
    }
    of_scores = [(f"best {short(name)}", " data-number" + (" data-higher" if is_higher[name] else "")) for name in names]
    heads = [("training", ""), ("state", ""), *of_scores[:1], *([("course", " class=fixed")] if names else []), *of_scores[1:]]
    heads += [(title, " data-number") for title in ("epochs", "time", "sequences/s", "ranks")]
    heads += [(key, " class=key") for key in keys]
    top = "".join(
        f"<th{attributes}>{escape(title)}</th>"
        if "fixed" in attributes
        else f"<th{attributes}><button>{escape(title)}</button></th>"
        for title, attributes in heads
    )
    rows = []
    for number, run in enumerate(runs):
        label = f"<label><input type=checkbox checked data-show={number}>{dots[number]}{escape(run.name)}</label>"
        base = f"<button class=base data-base={number} title='compare the others with this one'>baseline</button>"
        cells = [_cell(f"{label} {base}", run.name), _cell(badge(run), state_text(run))]
        score_cells = []
        for name in names:
            pair = best[name][number]
            text = f"{pair[1]:.4g} <small class=note>epoch {pair[0]}</small> <small class=delta></small>" if pair else ""
            is_best = pair is not None and pair[1] == of_all[name] and not run.state.is_bad
            score_cells.append(_cell(f"<b class=good>{text}</b>" if is_best else text, pair[1] if pair else None))
        cells += score_cells[:1] + ([_cell(_sparkline(run, names[0]), None)] if names else []) + score_cells[1:]
        seconds = sum(plots.seconds_of(epoch) for epoch in run.epochs)
        rate = plots.sequences_per_second(run.last)
        done = run.last.get("epoch", 0)
        cells += [_cell(str(done), done), _cell(duration_text(seconds), seconds)]
        cells += [_cell(f"{rate:,.4g}" if rate else "", rate), _cell(str(num_ranks(run)), num_ranks(run))]
        for key in keys:
            value = _value(run, key)
            shown = value if len(value) <= LONGEST_VALUE else f"{value[:LONGEST_VALUE]}…"
            is_changed = " class=changed" if value != _value(runs[0], key) else ""
            cells.append(_cell(f"<code{is_changed} title='{escape(value)}'>{escape(shown) or '—'}</code>", value))
        rows.append(f"<tr data-run={number}>{''.join(cells)}</tr>")
    tools = (
        "<div class=tools><input type=search placeholder='filter trainings' aria-label='filter trainings'>"
        "<button data-all=1>show all</button><button data-all=0>hide all</button><button data-csv=runs>CSV</button></div>"
    )
    return (
        f"<div class='card runs' id=runs>{tools}<div class=scroll><table><thead><tr>{top}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table></div></div>"
    )


def _cell(html: str, value: str | float | None) -> str:
    """A cell with the value by which its column is sorted."""
    return f'<td data-v="{"" if value is None else escape(str(value))}">{html}</td>'


WIDTH, HEIGHT = 110, 26


def _sparkline(run: Run, name: str) -> str:
    _, values = run.scores(name)
    lines = _polylines(values, [value for value in values if finite(value) is not None], WIDTH, HEIGHT, 3)
    return f"<svg class=spark viewBox='0 0 {WIDTH} {HEIGHT}' width={WIDTH} height={HEIGHT}>{lines}</svg>"


def _polylines(values: Sequence[float], scale: Sequence[float], width: int, height: int, margin: int, longest: int = 0) -> str:
    """A line through the finite values, between the lowest and the highest of `scale`, and a mark at the end; `longest` values
    fill the width (0: these)."""
    if not scale:
        return ""
    low, high = min(scale), max(scale)
    across = (width - 2 * margin) / max(1, (longest or len(values)) - 1)
    down = (height - 2 * margin) / ((high - low) or 1.0)
    stretches: list[list[str]] = [[]]
    last = ""
    for number, value in enumerate(values):
        if finite(value) is None:
            stretches.append([])
            continue
        y = margin + (high - min(max(value, low), high)) * down
        stretches[-1].append(f"{margin + number * across:.1f},{y:.1f}")
        last = stretches[-1][-1]
    lines = "".join(f"<polyline points='{' '.join(stretch)}'/>" for stretch in stretches if stretch)
    x, _, y_text = last.partition(",")
    return f"{lines}<circle cx={x} cy={y_text} r=2.2 />" if last else ""


PANEL_WIDTH, PANEL_HEIGHT = 220, 110


def small_multiples(runs: Sequence[Run]) -> str:
    """A small picture for each training: the score that determines its best epoch, with the other trainings' in grey."""
    name = next(iter(measures_of(runs)), None)
    courses = [run.scores(name)[1] if name is not None else [] for run in runs]
    scale = _robust(courses)
    if name is None or not scale:
        return ""
    lengths = sorted(map(len, courses))
    are_alike = lengths[-1] <= 3 * lengths[len(lengths) // 2]
    longest = lengths[-1] if are_alike else 0

    def drawn(number: int) -> str:
        return _polylines(courses[number], scale, PANEL_WIDTH, PANEL_HEIGHT, 6, longest)

    others = "".join(f"<g class=other data-run={number}>{drawn(number)}</g>" for number in range(len(runs)))
    panels = []
    for number, run in enumerate(runs):
        best = run.best(name)
        beyond = sum(1 for value in courses[number] if finite(value) is not None and not scale[0] <= value <= scale[-1])
        notes = [f"{best[1]:.4g} in epoch {best[0]}"] if best else ["no finite value"]
        notes += [f"▲ {beyond} beyond" if beyond else ""]
        panels.append(
            f"<figure data-run={number} style='--own:var(--c{number % plots.COLORS})'><figcaption><b>{escape(run.name)}</b> "
            f"<span class=note>{' · '.join(note for note in notes if note)}</span></figcaption>"
            f"<svg viewBox='0 0 {PANEL_WIDTH} {PANEL_HEIGHT}' preserveAspectRatio=none><use href='#others'/>"
            f"<g class=own>{drawn(number)}</g></svg></figure>"
        )
    across = "" if are_alike else "; each from its first to its last epoch"
    return (
        f"<p class=note>{escape(short(name))} of each epoch, on the same scale from {scale[0]:.4g} to {scale[-1]:.4g}; "
        f"the other trainings in grey{across}</p><svg width=0 height=0 class=defs><defs><g id=others>{others}</g></defs></svg>"
        f"<div class=multiples>{''.join(panels)}</div>"
    )


def _robust(courses: Sequence[Sequence[float]]) -> list[float]:
    """The lowest and the highest value to show: of the highest ones, the median training's, so that one that diverges does not
    flatten the others."""
    finite_ones = [[value for value in course if finite(value) is not None] for course in courses]
    finite_ones = [course for course in finite_ones if course]
    if not finite_ones:
        return []
    low = min(map(min, finite_ones))
    highest = sorted(map(max, finite_ones))
    usual = highest[len(highest) // 2]
    if highest[-1] - low <= 3 * (usual - low):
        return [low, highest[-1]]
    lowest = [value for value in map(min, finite_ones) if value - low < 20 * (usual - low)]
    return [low, max(usual + 0.5 * (usual - low), *lowest)]


def key_against_score(runs: Sequence[Run]) -> list[Figure]:
    """The figure that shows scores over the values of a key, both of which the page lets one choose; none if all keys agree."""
    keys = differing_keys(runs)
    names = measures_of(runs)
    if not keys or not names:
        return []
    values = {key: [_value(run, key)[:LONGEST_VALUE] for run in runs] for key in keys}
    scores = {short(name): [pair[1] if (pair := run.best(name)) else None for run in runs] for name in names}
    seconds = [sum(map(plots.seconds_of, run.epochs)) / len(run.epochs) if run.epochs else None for run in runs]
    scores["time of an epoch in seconds"] = seconds
    scatter = Scatter([run.name for run in runs], values, scores)
    return [Figure("key against score", "A key against a score", "of the best epoch", scatter=scatter, wide=True)]
