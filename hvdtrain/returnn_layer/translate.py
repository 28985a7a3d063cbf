"""The step that rewrites a config before its keys are checked: RETURNN's names, values and functions become hvdtrain's."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from hvdtrain.config.check import closest, is_no_key
from hvdtrain.config.source import OVERRIDING, Source
from hvdtrain.errors import Problem, problem
from hvdtrain.returnn_layer.imports import WatchedImports
from hvdtrain.returnn_layer.names import (
    ALIASES,
    BY_VALUES,
    OF_THE_WRAPPER,
    READ_BY_RETURNN,
    TORCH_DISTRIBUTED,
    UNSUPPORTED,
    is_no_op,
    without_effect,
)
from hvdtrain.returnn_layer.values import ignored_by_returnn, understood

Value = TypeVar("Value")


def translated_names(values: Mapping[str, Value]) -> dict[str, Value]:
    """The values by hvdtrain's names of their keys."""
    return {ALIASES.get(name, name): value for name, value in values.items()}


def translate(source: Source, imports: WatchedImports, keys: Collection[str], booleans: Collection[str]) -> Source:
    """The config in hvdtrain's words, and what has to be said about RETURNN's.

    Args:
        imports: of the config.
        keys: the names of hvdtrain's keys.
        booleans: those that are true or false.
    """
    if imports.has_returnn:
        source = _with_wrapped_functions(source, imports)
    # What the command line says under one of a key's names wins over what a file says under the other.
    by_origin = sorted(source.values, key=lambda name: source.origins[name] in OVERRIDING)
    origins = translated_names({name: source.origins[name] for name in by_origin})
    values = translated_names({name: source.values[name] for name in by_origin})
    values, remarks = understood(values, origins, booleans, for_returnn=source.is_foreign)
    in_dict: list[Problem] = []
    if isinstance(values.get("torch_distributed"), dict):
        values["torch_distributed"], in_dict = _torch_distributed(values["torch_distributed"])
    ignored = ignored_by_returnn(values) if source.is_foreign else ()
    translated = replace(source, values=values, origins=origins)
    misspelt = _misspelt(translated, keys) if source.is_foreign else {}
    told = [*without_effect(source.values), *ignored]
    return replace(
        translated,
        problems=(*source.problems, *_refused(translated, ignored), *_duplicates(source), *in_dict),
        foreign_names=READ_BY_RETURNN.union(BY_VALUES, UNSUPPORTED, misspelt),
        warnings=(*misspelt.values(), *remarks),
        notes=(f"RETURNN reads from a config, and hvdtrain does not: {', '.join(told)}",) if told else (),
    )


def _with_wrapped_functions(source: Source, imports: WatchedImports) -> Source:
    backend = source.values.get("backend", "torch")
    if backend != "torch":
        found = problem("unknown-value", f"backend: expected 'torch' in a config that imports returnn, got {backend!r}")
        return replace(source, is_foreign=True, problems=(*source.problems, *found))
    from hvdtrain.returnn_layer.steps import adapted  # here, as it imports RETURNN

    return replace(adapted(source, imports), is_foreign=True)


def _torch_distributed(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The dict's entries that are hvdtrain's, and the problems with RETURNN's."""
    options = entries.get("options")
    is_without_effect = isinstance(options, dict) and all(name in OF_THE_WRAPPER for name in options)
    kept = {name: value for name, value in entries.items() if name not in TORCH_DISTRIBUTED}
    return kept, [
        Problem.of("unsupported", f"torch_distributed.{name}: RETURNN's entry is not needed here ({reason})")
        for name, reason in TORCH_DISTRIBUTED.items()
        if name in entries and not (name == "options" and is_without_effect)
    ]


def _refused(source: Source, ignored: Collection[str]) -> Iterator[Problem]:
    """Problems with keys of RETURNN that would change the training, apart from those that RETURNN itself ignores."""
    for name, value in source.values.items():
        if name in UNSUPPORTED and name not in ignored and not is_no_op(name, value):
            where = source.origins[name]
            yield from problem("unsupported", f"{name}: a key of RETURNN that is not supported, in {where} ({UNSUPPORTED[name]})")


def _duplicates(source: Source) -> Iterator[Problem]:
    """Problems with keys that have a value under both of their names."""
    for other, name in ALIASES.items():
        both = other in source.values and name in source.values
        if both and not {source.origins[other], source.origins[name]}.intersection(OVERRIDING):
            yield from problem("conflict", f"{other}: expected either {other} or {name}, which mean the same, got both")


def _misspelt(source: Source, keys: Collection[str]) -> dict[str, str]:
    """By name in a file for RETURNN that looks like a misspelt key, the message: RETURNN trains without it."""
    known = {*keys, *ALIASES, *UNSUPPORTED, *READ_BY_RETURNN}
    found = {}
    for name, value in source.values.items():
        if name in known or is_no_key(name, value) or source.origins[name] in OVERRIDING:
            continue
        if match := closest(name, keys):
            found[name] = f"{name} in {source.origins[name]}: neither RETURNN nor hvdtrain reads it (did you mean {match}?)"
    return found
