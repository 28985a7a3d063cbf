"""Reads the progress from a checkpoint, and checks it: the file may be damaged, or written by another program."""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from hvdtrain.checkpoint.progress import EpochProgress, Progress
from hvdtrain.errors import DamagedCheckpoint
from hvdtrain.runtime.scores import Scores
from hvdtrain.schedule.history import EpochRecord, EvaluationRecord

ENTRIES: Mapping[str, Any] = {
    "epoch": int | None,
    "step": int | None,
    "history": list[EpochRecord] | None,
    "evaluations": list[EvaluationRecord] | None,
    "within": EpochProgress | None,
    "report": dict[str, Any] | None,
    "data": dict[str, list[dict[str, Any]]] | None,
    "size": int,
    "distribution": str,
    "own": list[str],
    "reducer": list[dict[str, Any]],
    "alike": list[int],
    "save_id": str,
    "keys": dict[str, str] | None,
}
"""The types of the entries, each of which may be missing: RETURNN's checkpoints have only an epoch and a step."""

_hints = cache(get_type_hints)

IDENTITY: Mapping[str, Any] = {
    "name": str,
    "bounds": list[int],
    "files": list[list[Any]],
    "lengths": dict[str, list[int]],
    "tags": list[list[int]],
    "values": list[list[int]],
    "samples": dict[str, list[list[float]]] | None,
}
"""The types of the entries of an `Identity` (`plugins/same_data/identity.py`)."""


def read_progress(state: Mapping[str, Any], file: Path) -> Progress:
    """The progress in a checkpoint's file.

    Raises:
        DamagedCheckpoint: an entry has the wrong type, or an impossible value.
    """
    type_problem = _first_problem(_type_problem(state[name], hint, name) for name, hint in ENTRIES.items() if name in state)
    if (problem := type_problem or _value_problem(state)) is not None:
        raise DamagedCheckpoint(f"{file}: expected {problem}")
    return Progress.from_state(state)


def _value_problem(state: Mapping[str, Any]) -> str | None:
    """The problem with an impossible value, once all types are right; None: there is none."""
    epoch = state.get("epoch") or 0
    step = state.get("step") or 0
    size = state.get("size", 1)
    for name, number, least in (("epoch", epoch, 0), ("step", step, 0), ("size", size, 1)):
        if number < least:
            return f"{name} of at least {least}, got {number}"
    if "size" in state and len(state.get("reducer", [0] * size)) != size:
        return f"the reducer's state of {size} ranks, got {len(state['reducer'])}"
    if (within := state.get("within")) is not None:
        done = step - within["first_step"]
        if within["epoch"] != epoch:
            return f"within.epoch {epoch}, as in its entry epoch, got {within['epoch']}"
        if done < 0 or within["first_step"] < 0:
            return f"within.first_step between 0 and step {step}, got {within['first_step']}"
        position = within.get("position", 0)
        apart = state.get("distribution") == "random_seed_offset"
        if position < done or (apart and position > done):  # every step is a batch of at least one rank
            return f"within.position of {'' if apart else 'at least '}{done}, as many steps of the epoch are done, got {position}"
        if within.get("elapsed", 0.0) < 0:
            return f"within.elapsed of at least 0, got {within['elapsed']}"
    for name, identities in (state.get("data") or {}).items():
        for number, identity in enumerate(identities):
            for entry, hint in IDENTITY.items():
                entry_name = f"data.{name}[{number}].{entry}"
                if (problem := _type_problem(identity.get(entry), hint, entry_name)) is not None:
                    return problem
    return None


def _type_problem(value: Any, hint: Any, name: str) -> str | None:
    """The problem with a value's type, such as 'within.epoch of type int, got 'x''; None: the type is right."""
    origin = get_origin(hint)
    arguments = get_args(hint)
    wrong = f"{name} of type {_type_text(hint)}, got {_shorten(value)}"
    if hint is Any:
        return None
    if hint in (int, float):  # also accepts numpy's integers
        number = Integral if hint is int else Real
        return None if isinstance(value, number) and not isinstance(value, bool) else wrong
    if origin in (Union, types.UnionType):
        problems = [_type_problem(value, kind, name) for kind in arguments]
        if None in problems:
            return None
        return problems[0] if value is not None and isinstance(value, (dict, list)) else wrong
    if origin is list:
        if not isinstance(value, (list, tuple)):
            return wrong
        return _first_problem(_type_problem(member, arguments[0], f"{name}[{number}]") for number, member in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict) or not all(isinstance(entry, arguments[0]) for entry in value):
            return wrong
        return _first_problem(_type_problem(member, arguments[1], f"{name}.{entry}") for entry, member in value.items())
    if hint is Scores:
        return _type_problem(value, dict[str, list[list[float]]], name) or _scores_problem(value, name)
    if is_dataclass(hint):
        return _class_problem(value, hint, name)
    return None if isinstance(value, types.NoneType if hint is None else hint) else wrong


def _class_problem(value: Any, kind: Any, name: str) -> str | None:
    """The same for a dict with the fields of a dataclass."""
    if not isinstance(value, dict):
        return f"{name} of type dict, got {_shorten(value)}"
    hints = _hints(kind)
    needed = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    if missing := [entry for entry in needed if entry not in value]:
        return f"{name}.{missing[0]}, got none"
    if unknown := [entry for entry in value if entry not in hints]:
        return f"{name} with the entries {', '.join(hints)}, got {_shorten(unknown[0])} (was it written by a later release?)"
    return _first_problem(_type_problem(member, hints[entry], f"{name}.{entry}") for entry, member in value.items())


def _first_problem(problems: Iterable[str | None]) -> str | None:
    return next(filter(None, problems), None)


def _scores_problem(scores: Mapping[str, list[list[float]]], name: str) -> str | None:
    """The problem with the sums and counts of scores; None: there is none."""
    for score, lists in scores.items():
        if len(lists) not in (2, 3) or (len(lists) == 3 and len(lists[2]) != 1):
            return f"{name}.{score} with a list of sums and one of counts, got {_shorten(lists)}"
    return None


def _type_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint).replace("typing.", "")


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
