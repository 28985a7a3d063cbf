"""Rewrites a config before its keys are checked: RETURNN's names, values and functions become hvdtrain's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from hvdtrain.config.check import closest, is_no_key
from hvdtrain.config.overrides import OVERRIDING
from hvdtrain.config.source import Source
from hvdtrain.config.translation import Translation
from hvdtrain.errors import Problem, problem
from hvdtrain.plugins.returnn import names
from hvdtrain.plugins.returnn.imports import WatchedImports
from hvdtrain.plugins.returnn.networks import uses_network, with_network
from hvdtrain.plugins.returnn.values import convert_values, ignored_by_returnn


class Watched(WatchedImports):
    """One config, of which the imports are watched, and which is then translated."""

    def translate(self, source: Source, keys: Collection[str], booleans: Collection[str]) -> Source:
        honoured = names.KEYS_OF_NETWORKS if uses_network(source.values) else frozenset()
        if honoured:
            source = with_network(source, self)
        elif self.has_returnn:
            source = _with_wrapped_functions(source, self)
        aliases = names.ALIASES | (names.EPOCH_OF_MODEL if _has_epoch_of_model(source, has_network=bool(honoured)) else {})
        origins = _our_names(source.origins, aliases)
        values = _our_names(source.values, aliases)
        if source.is_foreign and callable(values.get("startup_callback")):
            values["startup_callback"] = _with_config(values["startup_callback"])
        values, remarks = convert_values(values, origins, booleans, for_returnn=source.is_foreign)
        in_dict: list[Problem] = []
        if isinstance(values.get("torch_distributed"), dict):
            values["torch_distributed"], in_dict = _torch_distributed(values["torch_distributed"])
        ignored = ignored_by_returnn(values) if source.is_foreign else ()
        values = {name: value for name, value in values.items() if name not in ignored or name not in keys}
        translated = replace(source, values=values, origins=origins)
        misspelt = _misspelling_warnings(translated, keys) if source.is_foreign else {}
        without = {name: value for name, value in source.values.items() if name not in honoured and name not in aliases}
        unused = [*names.without_effect(without), *ignored]
        notes = source.notes + ((f"RETURNN reads from a config, and hvdtrain does not: {', '.join(unused)}",) if unused else ())
        notes += tuple(_differences(source, values)) if source.is_foreign else ()
        return replace(
            translated,
            problems=(
                *source.problems,
                *_unsupported_problems(translated, {*ignored, *honoured}),
                *_duplicate_problems(source, aliases),
                *in_dict,
            ),
            foreign_names=names.READ_BY_RETURNN.union(names.BY_VALUES, names.UNSUPPORTED, misspelt),
            warnings=(*source.warnings, *misspelt.values(), *remarks),
            notes=notes,
        )


def _differences(source: Source, values: Mapping[str, Any]) -> Iterator[str]:
    """What the config asks for that RETURNN's engine for PyTorch does otherwise, or does not do."""
    has_normalized = any("use_normalized_loss" in text for text in source.texts.values())
    if has_normalized and values.get("accum_grad_multiple_step") not in (None, 1):
        yield "accum_grad_multiple_step: a normalized loss is the mean over all batches of an update, in RETURNN a sum of means"
    for name in ("max_pad_size", "shuffle_batches"):
        if values.get(name) and not uses_network(source.values):
            yield f"{name}: RETURNN's engine for PyTorch does not read it"
    train = values.get("train")
    if isinstance(train, Mapping) and train.get("class") == "MetaDataset":
        control = train.get("seq_order_control_dataset")
        members = train.get("datasets")
        member = members.get(control) if isinstance(members, Mapping) else None
        by_itself = train.get("seq_ordering", values.get("batching"))
        if isinstance(member, Mapping) and by_itself not in (None, "default", member.get("seq_ordering")):
            yield f"train: ordered by {by_itself!r}, in RETURNN by the seq_ordering of {control!r} alone"


def _our_names(values: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    return {aliases.get(name, name): value for name, value in values.items()}


def _has_epoch_of_model(source: Source, *, has_network: bool) -> bool:
    """Whether RETURNN reads `epoch` as that of the model: in eval, and in a network's forward, unless `load` is a file."""
    task = source.values.get("task")
    return source.is_foreign and not source.values.get("load") and (task == "eval" or (task == "forward" and has_network))


def _with_config(function: Callable[..., Any]) -> Callable[..., Any]:
    def startup_callback(**more: Any) -> Any:
        from returnn.config import get_global_config  # here, as a config for RETURNN has imported it

        return function(config=get_global_config(), **more)

    return startup_callback


def _with_wrapped_functions(source: Source, imports: WatchedImports) -> Source:
    backend = source.values.get("backend", "torch")
    if backend != "torch":
        problems = problem("unknown-value", f"backend: expected 'torch' in a config that imports returnn, got {backend!r}")
        return replace(source, is_foreign=True, problems=(*source.problems, *problems))
    from hvdtrain.plugins.returnn.steps import wrap_functions  # here, as it imports RETURNN

    return replace(wrap_functions(source, imports), is_foreign=True)


def _torch_distributed(entries: Mapping[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """The entries of the dict that hvdtrain has, and problems with those that only RETURNN has."""
    options = entries.get("options")
    is_without_effect = isinstance(options, dict) and all(name in names.OF_THE_WRAPPER for name in options)
    return {name: value for name, value in entries.items() if name not in names.TORCH_DISTRIBUTED}, [
        Problem.of("unsupported", f"torch_distributed.{name}: RETURNN's entry is not needed here ({reason})")
        for name, reason in names.TORCH_DISTRIBUTED.items()
        if name in entries and not (name == "options" and is_without_effect)
    ]


def _unsupported_problems(source: Source, ignored: Collection[str]) -> Iterator[Problem]:
    """Problems with keys of RETURNN that would change the training, except those that RETURNN itself ignores."""
    for name, value in source.values.items():
        if name in names.UNSUPPORTED and name not in ignored and not names.is_no_op(name, value):
            where = source.origins[name]
            why = names.UNSUPPORTED[name]
            yield from problem("unsupported", f"{name}: a key of RETURNN that is not supported, in {where} ({why})")


def _duplicate_problems(source: Source, aliases: Mapping[str, str]) -> Iterator[Problem]:
    for alias, name in aliases.items():
        if alias in source.values and name in source.values:
            yield from problem("conflict", f"{alias}: expected either {alias} or {name}, which mean the same, got both")


def _misspelling_warnings(source: Source, keys: Collection[str]) -> dict[str, str]:
    """Warnings about names in a config for RETURNN that look like misspelt keys, by name. RETURNN would ignore them."""
    names_read = {*keys, *names.ALIASES, *names.UNSUPPORTED, *names.READ_BY_RETURNN}
    lines = {}
    for name, value in source.values.items():
        if name in names_read or is_no_key(name, value) or source.origins[name] in OVERRIDING:
            continue
        if match := closest(name, keys):
            lines[name] = f"{name} in {source.origins[name]}: neither RETURNN nor hvdtrain reads it (did you mean {match}?)"
    return lines


RETURNN = Translation(names.ALIASES, names.explain, Watched)
