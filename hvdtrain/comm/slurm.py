"""Slurm's lists of nodes and tasks."""

from __future__ import annotations

import re


def host_names(text: str) -> list[str]:
    """The hosts of SLURM_STEP_NODELIST and similar variables, as `scontrol show hostnames` lists them.

    >>> host_names("gpu[08-10,12],login")
    ['gpu08', 'gpu09', 'gpu10', 'gpu12', 'login']
    >>> host_names("rack[1-2]n[1,3]")
    ['rack1n1', 'rack1n3', 'rack2n1', 'rack2n3']
    """
    names = []
    for pattern in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        heads = [""]
        for plain, ranges in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", pattern):
            numbers = [number for piece in ranges.split(",") for number in _expand(piece)] if ranges else [""]
            heads = [head + plain + number for head in heads for number in numbers]
        names += heads
    return names


def _expand(piece: str) -> list[str]:
    """The numbers of a range: '08-10' is ['08', '09', '10'], and '7' is ['7']."""
    first, dash, last = piece.partition("-")
    if not dash:
        return [first]
    return [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]


def tasks_per_node(text: str) -> list[int]:
    """The number of tasks of each node, from SLURM_STEP_TASKS_PER_NODE; [] if it cannot be parsed.

    >>> tasks_per_node("4(x2),1")
    [4, 4, 1]
    """
    counts: list[int] = []
    for entry in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        if match is None:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
