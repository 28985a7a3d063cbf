"""The result in words: a table of how far the runs agree, and for those that differ, where and why."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap

from hvdtrain.prove.causes import Case, causes, checked
from hvdtrain.prove.compare import Agreement, digits, means
from hvdtrain.prove.record import Record

WIDTH = 120
"""Columns of a long line."""


def table_lines(first: Record, name: str, cases: Sequence[Case], dropout: bool) -> list[str]:
    """How far each run agrees with the first.

    Args:
        first, name: the first run.
        dropout: whether it was left as it is.
    """
    largest = max(first.size, *(case.one.size for case in cases))
    head = f"{len(first.losses)} steps of {_span(first.num_sequences)} sequences, {len(first.rates)} updates"
    lines = [f"{head}: the first batches of {largest} ranks{'' if dropout else '; dropout is switched off'}", ""]
    rows = [[f"compared with {name}", "losses", "gradients", "weights", ""]]
    for case in cases:
        found = case.comparison
        words = [each.words for each in (found.losses, found.gradients, found.weights)]
        rows.append([case.name, *words, "agree" if found.agree else "differ"])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    aside = dict.fromkeys(name for case in cases for name in case.comparison.set_aside)
    if aside:
        lines += ["", f"not compared, as their gradients are rounding errors that the optimizer enlarges: {', '.join(aside)}"]
    return [*lines, ""]


def difference_lines(case: Case) -> list[str]:
    """Where a run differs."""
    found = case.comparison
    lines = [f"{case.name}: beyond the tolerance of {case.tolerance:g}"]
    if found.losses.first is not None:
        step, name = found.losses.first.number, found.losses.first.name
        values = [means(record.losses[step - 1]).get(name) for record in (case.one, case.other)]
        shown = " instead of ".join("nothing" if value is None else f"{value:.7g}" for value in values)
        lines.append(f"  losses     first in step {step}, {name}: {shown}")
    lines += _parameter_lines("gradients", found.gradients)
    lines += _parameter_lines("weights", found.weights)
    return [*lines, ""]


def cause_lines(cases: Sequence[Case]) -> list[str]:
    """Why runs differ. A cause that not all of them have names those that have it."""
    names: dict[tuple[str, str], list[str]] = {}
    for case in cases:
        for cause in causes(case):
            names.setdefault(("cause", cause), []).append(case.name)
        of_exchange = checked(case)
        if of_exchange is not None:
            names.setdefault(("checked", of_exchange), []).append(case.name)
    lines = []
    for (kind, what), having in sorted(names.items(), key=lambda item: item[0][0] == "checked"):
        text = what if len(having) == len(cases) or kind == "checked" else f"{', '.join(having)}: {what}"
        lines += wrap(f"{kind}: {text}", WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return [*lines, ""]


def _parameter_lines(what: str, agreement: Agreement) -> list[str]:
    first, largest = agreement.first, agreement.largest
    if first is None or largest is None:
        return []
    where = f"update {first.number}" if first.number else "the beginning"
    when = "after" if what == "weights" and first.number else "in"
    line = f"  {what:9}  first {when} {where}, {first.name}: {_share(first.distance)}"
    if (largest.number, largest.name) != (first.number, first.name):
        line += f"; most in update {largest.number}, {largest.name}: {_share(largest.distance)}"
    return [line]


def _share(distance: float) -> str:
    """A relative distance in words.

    >>> _share(0.031)
    '0.031 of its norm (1 digit)'
    """
    return f"{distance:.2g} of its norm ({digits(distance)})"


def _span(counts: Sequence[int]) -> str:
    return f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
