"""The first screen of a report: the state of each training, its best score, when it will end, and what is wrong with it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from math import nan
from statistics import fmean

from hvdtrain.plugins.report.plots import finite, seconds_of, sequences_per_second, split
from hvdtrain.plugins.report.runs import Run
from hvdtrain.plugins.report.slow_ranks import straggler
from hvdtrain.report import rows
from hvdtrain.report.starts import ranks_text
from hvdtrain.runtime.timer import duration_text

SILENT = 120.0
"""Seconds without progress that the page mentions."""

EARLY = ("stopped", "failed", "lost")
"""The states of a training that ended early."""

MIN_LOST = 0.1
"""The least share of the time that is worth a sentence."""

MIN_STALE = 5
"""The least epochs without a better score that are worth a sentence; they are also at least a fifth of all."""


def badge(run: Run) -> str:
    """The state of a training in a word or two."""
    return f"<span class='badge {run.state.name}'>{state_text(run)}</span>"


def state_text(run: Run) -> str:
    """The same as text."""
    state = run.state
    is_silent = state.name == "running" and state.silence >= SILENT
    return state.name + (f", no news for {_minutes(state.silence)}" if is_silent else "")


def band(run: Run) -> str:
    """A line on why a training ended early; '' for others."""
    state = run.state
    if state.name not in EARLY:
        return ""
    by = f" · {state.time}" + (f" · {state.by}" if state.by not in ("", "rank 0") else "") if state.time else ""
    shown = headline(run)
    message = reason(run)
    details = f"<details><summary>the whole message</summary><pre>{escape(message)}</pre></details>"
    folded = details if shown != message.strip() else ""
    return f"<div class='band {state.name}'><b>{state.name}</b> {escape(shown)}<span class=note>{escape(by)}</span>{folded}</div>"


def reason(run: Run) -> str:
    """Why a training ended early."""
    if run.state.name != "lost":
        return run.state.why
    return f"no sign of life for {_minutes(run.state.silence)}, and no record of its end: it was killed, or its host is gone"


LONGEST = 110
"""The most letters of a reason on the first screen."""


def headline(run: Run) -> str:
    """The most important line of the reason: what a rank found, if the message goes on to that."""
    first, *others = [line.strip() for line in reason(run).strip().splitlines()] or [""]
    line = others[0].partition(", sequences ")[0] if others and others[0].startswith("rank ") else first
    return line if len(line) <= LONGEST else f"{line[:LONGEST]}…"


def _minutes(seconds: float) -> str:
    for unit, size in (("days", 86400), ("h", 3600)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 60:.0f} min"


def concern(run: Run) -> str | None:
    """What is wrong with a training, in a sentence: that it diverged or gets no better, or where it loses most of its time."""
    last = run.last
    if last.get("diverged"):
        return f"diverged: {short(run.measure or '')} {float(last['scores'].get(run.measure, nan)):.4g} in epoch {last['epoch']}"
    share, text = max(filter(None, (_slow_rank(run), _data_wait(run), _lost_time(run))), default=(0.0, ""))
    if share >= MIN_LOST or (text and not _stale(run)):
        return text
    return _stale(run)


def _slow_rank(run: Run) -> tuple[float, str] | None:
    """The rank that held up the others most: the share of the time that it took longer, in a sentence."""
    late = [(epoch, slowest) for epoch in run.epochs if (slowest := straggler(epoch.get("seconds") or [])) is not None]
    if not late:
        return None
    [(rank, number)] = Counter(slowest.rank for _, slowest in late).most_common(1)
    of_rank = [slowest for _, slowest in late if slowest.rank == rank]
    share = sum(slowest.late for slowest in of_rank) / max(1e-9, sum(map(seconds_of, run.epochs)))
    epochs = f"{number} of {len(run.epochs)} epochs"
    return share, f"rank {rank} slowed {epochs} by {fmean(slowest.share for slowest in of_rank):.0%}"


def _data_wait(run: Run) -> tuple[float, str] | None:
    ranks = [rank for epoch in run.epochs for rank in epoch.get("seconds") or []]
    whole = sum(sum(rank.values()) for rank in ranks)
    share = sum(rank.get("data wait", 0.0) for rank in ranks) / whole if whole else 0.0
    return (share, f"{share:.0%} of the time went into waiting for data") if share >= MIN_LOST else None


LOST = {"restart": "restarts", "repeated": "steps done again", "saving": "saving", "rest": "the rest"}
"""What takes time besides steps and waiting for data, with its name."""

OTHER_NUMBERS = ("share", "saves", "starts", "failures")
"""Entries of the goodput that are no seconds."""


def _lost_time(run: Run) -> tuple[float, str] | None:
    """What took the largest share of the training's time, except for steps and waiting for data."""
    goodput: Mapping[str, float] = run.last.get("goodput") or {}
    whole = sum(value for name, value in goodput.items() if name not in OTHER_NUMBERS)
    name = max(LOST, key=lambda name: goodput.get(name, 0.0))
    share = goodput.get(name, 0.0) / whole if whole else 0.0
    return (share, f"{share:.0%} of the time went into {LOST[name]}") if share >= MIN_LOST else None


def _stale(run: Run) -> str | None:
    best = run.best(run.measure)
    since = run.last["epoch"] - best[0] if best else 0
    if best is None or since < max(MIN_STALE, len(run.epochs) / 5):
        return None
    return f"no better {short(run.measure or '')} for {since} epochs (best: epoch {best[0]})"


def short(name: str) -> str:
    """A score's name for people: 'dev ce'."""
    return " ".join(split(name)).strip()


def wanted_epochs(run: Run) -> int | None:
    """The number of epochs that a training is to have."""
    wanted = run.setting("num_epochs")
    return wanted if isinstance(wanted, int) and wanted else None


def epochs_done(run: Run) -> float:
    """The number of finished epochs, plus the share of the current one if steps are logged."""
    finished: int = run.last.get("epoch", 0)
    last = run.steps[-1] if run.steps else None
    return max(finished, last["epoch"] - 1 + float(last["progress"])) if last else finished


def seconds_left(run: Run) -> float | None:
    """The estimate of the seconds until a running training ends."""
    wanted = wanted_epochs(run)
    if run.state.name != "running" or wanted is None or not run.epochs:
        return None
    return rows.seconds_left([seconds_of(epoch) for epoch in run.epochs], wanted - epochs_done(run)) or 0.0


def num_ranks(run: Run) -> int:
    """The number of ranks of the last epoch."""
    if seconds := run.last.get("seconds"):
        return len(seconds)
    return len(run.start.get("hosts") or ()) if run.starts else 1


def improvement(run: Run, name: str) -> tuple[float, int] | None:
    """By how much the best value of a score differs from the best one before it, and the epoch of that one."""
    best = run.best(name)
    if best is None:
        return None
    before = Run(run.name, [epoch for epoch in run.epochs if epoch["epoch"] < best[0]], run.starts).best(name)
    return (best[1] - before[1], before[0]) if before else None


def tiles(run: Run) -> str:
    """The most important numbers of a training, in large type; first those that the first screen of a phone has room for."""
    tiles = []
    best = run.best(run.measure)
    if run.measure and best:
        change = improvement(run, run.measure)
        note = f"epoch {best[0]}" + (f", {signed(change[0])} against epoch {change[1]}" if change else "")
        tiles.append(tile(f"best {short(run.measure)}", f"{best[1]:.4g}", note, "" if run.state.is_bad else "best"))
    wanted = wanted_epochs(run)
    done = run.last.get("epoch", 0)
    share = min(1.0, epochs_done(run) / wanted) if wanted is not None else None
    remaining = seconds_left(run)
    bar = _bar(share) if share is not None else ""
    if remaining is not None:
        form = "%H:%M" if remaining < 72000 else "%a %H:%M"
        ends = time.strftime(form, time.localtime(time.time() - run.state.silence + remaining))
        tiles.append(tile("left", duration_text(remaining), f"ends {ends}; epoch {done + 1} of {wanted}", "", bar))
    else:
        tiles.append(tile("epochs", f"{done}", f"of {wanted}" if wanted is not None else "", "", bar))
    wrong = concern(run)
    tiles.append(tile("to look at", wrong or "nothing found", "", "wrong" if wrong else "quiet"))
    goodput: Mapping[str, float] = run.last.get("goodput") or {}
    of_epochs = sum(seconds_of(epoch) for epoch in run.epochs)
    parts = [f"{of_epochs / len(run.epochs):.3g} s per epoch"] if run.epochs else []
    parts += [f"{len(run.starts)} starts"] if len(run.starts) > 1 else []
    whole = sum(value for name, value in goodput.items() if name not in OTHER_NUMBERS)
    tiles.append(tile("time", duration_text(whole or of_epochs), ", ".join(parts)))
    rate = next((rate for epoch in reversed(run.epochs) if (rate := sequences_per_second(epoch)) is not None), None)
    if rate is not None:
        tiles.append(tile(f"speed on {ranks_text(num_ranks(run))}", f"{rate:,.4g}", "sequences/s"))
    computing = [epoch for epoch in run.epochs if finite(epoch.get("computing")) is not None]
    if computing:
        share = sum(epoch["computing"] * epoch["elapsed"] for epoch in computing) / sum(epoch["elapsed"] for epoch in computing)
        tiles.append(tile("computing", f"{share:.1%}", "of the training time", "", _bar(share)))
    if (useful := goodput.get("share")) is not None:
        tiles.append(tile("goodput", f"{useful:.1%}", "of the time, starts included", "", _bar(useful)))
    flops: Mapping[str, float] = run.last.get("flops") or {}
    if flops.keys() >= {"step", "peak", "share"}:
        note = f"of {flops['peak'] / 1e9:,.3g} GFLOP/s; {flops['step'] / 1e9:,.3g} GFLOP a step"
        tiles.append(tile("of the measured peak", f"{flops['share']:.1%}", note, "", _bar(flops["share"])))
    size = run.start.get("num_parameters")
    if isinstance(size, int):
        tiles.append(tile("parameters", _count(size), ""))
    return f"<div class=tiles>{''.join(tiles)}</div>"


def tile(name: str, value: str, note: str, look: str = "", more: str = "") -> str:
    """A number with what it is."""
    return (
        f"<div class='tile {look}'><span class=note>{escape(name)}</span><b>{escape(value)}</b>"
        f"<span class=note>{escape(note)}</span>{more}</div>"
    )


def _bar(share: float) -> str:
    return f"<i class=bar><i style='width:{share:.1%}'></i></i>"


def signed(number: float) -> str:
    """A difference with its sign.

    >>> signed(-0.01234), signed(2.0)
    ('−0.012', '+2')
    """
    return f"{number:+.2g}".replace("-", "−", 1)


def _count(number: int) -> str:
    """A number with a letter for thousands, millions or more."""
    for letter, unit in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return str(number)


def overview_of_several(runs: Sequence[Run]) -> str:
    """The same of several trainings: how many are in which state, the best one, those that run, and what is wrong."""
    counts = Counter[str](run.state.name for run in runs)
    order = ("running", "finished", "stopped", "ended", "failed", "lost")
    tiles = [tile("trainings", str(len(runs)), ", ".join(f"{counts[name]} {name}" for name in order if counts[name]))]
    measure = next((run.measure for run in runs if run.measure), None)
    with_best = [(run, best) for run in runs if (best := run.best(measure)) is not None]
    if measure is not None and with_best:
        sign = -1 if any(run.is_higher_better(measure) for run in runs) else 1
        run, best = min(with_best, key=lambda pair: sign * pair[1][1])
        usual = runs[baseline(runs)]
        base = usual.best(measure)
        change = f", {signed(best[1] - base[1])} against {usual.name}" if base is not None and run is not usual else ""
        note = f"{run.name}, epoch {best[0]}{change}"
        tiles.insert(0, tile(f"best {short(measure)}", f"{best[1]:.4g}", note, "" if run.state.is_bad else "best"))
    remaining = [(seconds, run) for run in runs if (seconds := seconds_left(run)) is not None]
    if remaining:
        seconds, run = max(remaining, key=lambda pair: pair[0])
        tiles.append(tile("left", duration_text(seconds), f"until {run.name} ends"))
    early = [run for run in runs if run.state.name in EARLY and reason(run)]
    lines = [f"<li>{badge(run)} {escape(run.name)}: {escape(headline(run))}</li>" for run in early]
    lines += [f"<li>{escape(run.name)}: {escape(text)}</li>" for run in runs if not run.state.is_bad and (text := concern(run))]
    shown, hidden = lines[:SHOWN], lines[SHOWN:]
    more = f"<details><summary>{len(hidden)} more</summary><ul>{''.join(hidden)}</ul></details>" if hidden else ""
    look = "failed" if any(run.state.is_bad for run in runs) else "stopped"
    wrong = f"<div class='band {look}'><ul>{''.join(shown)}</ul>{more}</div>" if shown else ""
    return f"<div class=tiles>{''.join(tiles)}</div>{wrong}"


def baseline(runs: Sequence[Run]) -> int:
    """The number of the training with which others are compared if the reader chooses none: the first that has a best epoch."""
    return next((number for number, run in enumerate(runs) if run.best(run.measure)), 0)


SHOWN = 4
"""The most sentences on the first screen about what is wrong."""
