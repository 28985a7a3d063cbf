"""A sweep over keys: a job array with a run for each combination of values, each with a separate model folder."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hvdtrain.errors import Problem, problem

MAX_FOLDER_NAME = 200
"""The largest number of characters of a folder's name."""


def split_values(text: str) -> list[str]:
    """Split values at commas, except within brackets or quotes.

    >>> split_values("0.001,0.003"), split_values("[1,2],[3]"), split_values("{'class':'adam','eps':1},sgd")
    (['0.001', '0.003'], ['[1,2]', '[3]'], ["{'class':'adam','eps':1}", 'sgd'])
    """
    values = [""]
    depth = 0
    quote = ""
    for letter in text:
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        depth += (letter in "([{") - (letter in ")]}") if not quote else 0
        if letter == "," and depth == 0 and not quote:
            values.append("")
        else:
            values[-1] += letter
    return values


def parse_sweep(texts: Sequence[str], overrides: Mapping[str, str]) -> tuple[list[dict[str, str]], list[Problem]]:
    """The runs of a sweep as dicts of values by key, and problems.

    Args:
        texts: 'KEY=VALUE,VALUE', of which all combinations are run.
        overrides: the overrides of all runs.

    >>> parse_sweep(["learning_rate=0.1,0.2", "max_seqs=8"], {})
    ([{'learning_rate': '0.1', 'max_seqs': '8'}, {'learning_rate': '0.2', 'max_seqs': '8'}], [])
    """
    by_key: dict[str, list[str]] = {}
    problems = []
    for text in texts:
        key, assigned, listed = text.removeprefix("++").partition("=")
        values = split_values(listed)
        if not assigned or not re.fullmatch(r"[A-Za-z_][\w.]*", key) or not all(value.strip() for value in values):
            problems += problem("wrong-format", f"--sweep: expected KEY=VALUE,VALUE, got {text!r}")
        elif key in ("model", "task"):
            problems += problem(
                "unknown-key", f"--sweep: expected a key that training reads, got {key} (each run gets a separate model folder)"
            )
        elif key in by_key or key in overrides:
            spelling = "--sweep" if key in by_key else f"++{key}"
            problems += problem("duplicate", f"--sweep: expected each key once, got {key} in {spelling} as well")
        elif len(set(values)) < len(values):
            problems += problem("duplicate", f"--sweep: expected different values, got {text!r}")
        else:
            by_key[key] = values
    return [dict(zip(by_key, chosen, strict=True)) for chosen in itertools.product(*by_key.values())], problems


def run_model(model: str, run: Mapping[str, str]) -> str:
    """The `model` of a run, in a subfolder that is named after the run's values.

    >>> run_model("exp/g2p/model", {"learning_rate": "0.1", "optimizer": "{'class':'sgd'}"})
    'exp/g2p/learning_rate=0.1,optimizer=class_sgd/model'
    """
    plain = {key: re.sub(r"[^\w.+-]+", "_", value).strip("_") for key, value in run.items()}
    name = ",".join(f"{key}={value}" for key, value in plain.items())
    return str(Path(model).parent / name / Path(model).name)


def folder_problems(models: Sequence[str]) -> list[Problem]:
    """Problems with the folders of runs: two runs in the same folder would continue each other's training."""
    names = [Path(model).parent.name for model in models]
    twice = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    problems = [
        Problem.of("duplicate", f"--sweep: expected values that give different folder names, got {name!r} twice")
        for name in twice
    ]
    long = [name for name in names if len(name) > MAX_FOLDER_NAME]
    return problems + [
        Problem.of("out-of-range", f"--sweep: expected folder names of at most {MAX_FOLDER_NAME} characters, got {name!r}")
        for name in long[:1]
    ]


def case_lines(variable: str, first: int, runs: Sequence[Sequence[str]]) -> list[str]:
    """Lines of shell that set the array $sweep to the arguments of this job's run.

    Args:
        variable: the environment variable with the job's number in its array.
        first: the first number.
    """
    lines = [f'case "${{{variable}:-}}" in  # the run of the sweep']
    lines += [f"    {number}) sweep=({shlex.join(run)}) ;;" for number, run in enumerate(runs, start=first)]
    last = first + len(runs) - 1
    lines += [
        f"    *) echo \"{variable}: expected a number from {first} to {last}, got '${{{variable}:-}}'\" >&2; exit 2 ;;",
        "esac",
    ]
    return lines
