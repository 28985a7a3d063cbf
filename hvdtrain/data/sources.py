"""Checks the datasets of a config: dicts, file names, or a user's classes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import fields
from functools import partial
from os import PathLike, fspath
from typing import Any, NoReturn

from hvdtrain.config.absent import absent
from hvdtrain.config.check import build, closest, did_you_mean, unknown_options
from hvdtrain.config.keys import declared_keys
from hvdtrain.config.references import as_function, is_reference, resolve
from hvdtrain.data.dataset import Dataset
from hvdtrain.data.foreign import describe, is_iterable, is_map_style, needs_epoch
from hvdtrain.data.formats.objects import Objects
from hvdtrain.data.keys import DatasetKeys, DatasetSpec
from hvdtrain.data.kinds import KINDS, SOURCES, adapted, adapted_classes, iterable_source
from hvdtrain.data.opening import OpeningContext, is_cut_set, open_kind
from hvdtrain.data.plan.order_keys import OrderKeys, non_default
from hvdtrain.errors import ConfigError, DataError, Problem, problem


def is_function(value: Any) -> bool:
    """Whether a value of a config is a function that returns a dataset, not a dataset or a function that yields an epoch."""
    return callable(value) and not isinstance(value, type) and not is_dataset(value) and not needs_epoch(partial(value))


def check_dataset(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[DatasetSpec | None, list[Problem]]:
    """Check a dataset of a config, and those inside it, without opening a file or calling a function.

    Args:
        name: the config key, for messages.
        value: a dict with 'class', HDF file names (a list, or a string with commas), a dataset object, or a function that returns
            one of these.
        defaults: order keys that the dict may override.

    Returns:
        The dataset, or None and the problems. The dataset of a function is only known after a call of the function.
    """
    if is_cut_set(value):
        value = {"class": "LhotseDataset", "cuts": value}
    value, problems = adapted(name, value, defaults)
    if problems and not isinstance(value, dict):
        return None, problems
    spec, more = _check_adapted(name, value, defaults)
    return None if problems else spec, [*problems, *more]


def _check_adapted(name: str, value: Any, defaults: Mapping[str, Any]) -> tuple[DatasetSpec | None, list[Problem]]:
    if is_function(value):
        order, problems = build(OrderKeys, dict(defaults), f"{name}.", {})
        return (None if order is None else DatasetSpec(name, _open_too_early, order, is_known=False)), problems
    if not isinstance(value, dict):
        value, problems = _as_dict(name, value)
        if problems:
            return None, problems
    options = {option: content for option, content in value.items() if option != "class"}
    kind = value.get("class", "HDFDataset")
    kind = SOURCES.entries.get(kind, kind) if isinstance(kind, str) else kind
    if isinstance(kind, str) and kind in KINDS:
        return _check_kind(name, kind, options, defaults)
    return _check_class(name, kind, options, defaults)


def _as_dict(name: str, value: Any) -> tuple[dict[str, Any], list[Problem]]:
    """The dict equivalent to a dataset given in another form; the problems."""
    if isinstance(value, Iterator):
        return {}, problem(
            "wrong-type",
            f"{name}: expected data that can be read again in every epoch, got a {type(value).__name__} (give the function that "
            f'returns it: {name} = function, or {{"class": function, ...}})',
        )
    if is_dataset(value):
        return {"class": lambda: value}, []
    if isinstance(value, PathLike):
        value = [value]
    elif isinstance(value, str) and not is_reference(value):
        value = [file.strip() for file in value.split(",")]
        if not all(value):
            return {}, problem(
                "missing",
                f"{name}: expected the names of HDF files, separated by commas, got an empty one in {', '.join(value)!r}",
            )
    if isinstance(value, (list, tuple)):
        if not value:
            return {}, problem("missing", f"{name}: expected at least one sequence or file, got an empty {type(value).__name__}")
        return {"class": "HDFDataset", "files": list(map(fspath, value))}, []
    if callable(value) or isinstance(value, str):
        return {"class": value}, []
    return {}, problem(
        "wrong-type",
        f"{name}: expected a dataset dict, HDF files, or an object that can be iterated over or has __len__ and __getitem__, "
        f"got {describe(value)}",
    )


WITHOUT_ITEMS = (
    " (an iterable itself is a dataset, without a dict; collate is for items with __len__ and __getitem__. Of batches that are "
    "ready, make single items)"
)


def _check_class(
    name: str, kind: Any, options: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[DatasetSpec | None, list[Problem]]:
    """Check the dict of a class or function of the config, or of one in `SOURCES`."""
    order_values = _pop_order(options, [])
    kind, collating, collate_problems = _pop_collate(name, kind, options)
    has_fixed_order = isinstance(kind, str) and kind == SOURCES.entries.get("ReturnnDataset")
    order, problems = build(OrderKeys, order_values if has_fixed_order else {**defaults, **order_values}, f"{name}.", {})
    problems += collate_problems
    if has_fixed_order and order is not None:
        problems += [
            Problem.of(
                "conflict",
                f"{name}.{option}: expected no order keys around RETURNN's dataset, got {value!r} (put it into the inner dict)",
            )
            for option, value in non_default(order).items()
        ]
    if not (callable(kind) or is_reference(kind)):
        kind_names = [*KINDS, *SOURCES, *adapted_classes()]
        similar = closest(kind, kind_names) if isinstance(kind, str) else None
        hint = (absent(kind) if isinstance(kind, str) else "") or (
            f" (did you mean {similar}? see docs/datasets.md)"
            if similar
            else WITHOUT_ITEMS
            if hasattr(kind, "__iter__") and not isinstance(kind, str)
            else ""
        )
        problems += problem(
            "unknown-value",
            f"{name}.class: expected one of {', '.join([*KINDS, *SOURCES])}, a class, a function, or the name of one as "
            f"'module:name' or 'file.py:name', got {kind!r}{hint}",
        )
    if isinstance(kind, str) and kind in SOURCES.entries.values():
        problems += _argument_problems(name, kind, options)
    if problems or order is None:
        return None, problems
    maker = partial(_bind, name, kind, options)

    def open_it(context: OpeningContext | None = None) -> Any:
        dataset = _call(name, kind, maker())
        return dataset if collating is None else collating(dataset)

    return DatasetSpec(name, open_it, order, maker=maker), []


def _pop_collate(name: str, kind: Any, options: dict[str, Any]) -> tuple[Any, Callable[[Any], Objects] | None, list[Problem]]:
    """Remove `collate`, and the entries that belong to it, from the dict of a class, unless the class takes `collate` itself.

    Returns the class, what makes `Objects` of the items, if there is a `collate`, and the problems.
    """
    if "collate" not in options or (isinstance(kind, str) and kind in SOURCES.entries.values()):
        return kind, None, []
    names: set[str] = set()
    with suppress(ImportError, TypeError, ValueError):  # TypeError and ValueError: a class in C
        maker = resolve(kind) if isinstance(kind, str) and is_reference(kind) else kind
        parameters = inspect.signature(maker).parameters if callable(maker) else {}
        names = {name for name in ("collate", "lengths", "num_workers") if name in parameters}
        if "collate" in names or any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
            return kind, None, []
    collate = options.pop("collate")
    lengths = None if "lengths" in names else options.pop("lengths", None)
    workers = 0 if "num_workers" in names else options.pop("num_workers", 0)
    problems: list[Problem] = []
    if not callable(collate) and not is_reference(collate):
        problems += problem("wrong-type", f"{name}.collate: expected a function, or its name as 'module:name', got {collate!r}")
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 0:
        problems += problem("wrong-type", f"{name}.num_workers: expected a number of processes, got {workers!r}")

    def objects_of(items: Any) -> Objects:
        if not is_map_style(items):
            raise DataError(f"{name}.collate: expected items with __len__ and __getitem__, got {describe(items)}")
        return Objects(items, as_function(collate, f"{name}.collate"), lengths, workers)

    return (lambda: items) if is_map_style(items := kind) else kind, objects_of, problems


def _open_too_early(context: Any = None) -> NoReturn:
    raise RuntimeError("a dataset was opened before the config's function that returns it was called (with_datasets)")


def is_dataset(value: Any) -> bool:
    """Whether a value of a config is a dataset itself, not a description of one such as a dict or a list of files."""
    if isinstance(value, (list, tuple)) and all(isinstance(member, (str, PathLike)) for member in value):
        return False
    return is_map_style(value) or isinstance(value, Dataset) or is_iterable(value)


def class_name(value: Mapping[str, Any]) -> str | None:
    """The class of a dataset dict, if it is a text. Items in its place may compare themselves with one number by number."""
    return kind if isinstance(kind := value.get("class"), str) else None


def _check_kind(
    name: str, kind_name: str, options: dict[str, Any], defaults: Mapping[str, Any]
) -> tuple[DatasetSpec | None, list[Problem]]:
    """Check the dict of a class in `KINDS`."""
    section = KINDS[kind_name]
    options_of_class = [declared_key.name for declared_key in declared_keys(section)]
    order_values = _pop_order(options, options_of_class)
    cache_byte_size = options.pop("cache_byte_size", None)
    if isinstance(options.get("files"), PathLike):
        options["files"] = [options["files"]]
    if isinstance(options.get("files"), (list, tuple)):
        names = [getattr(file, "filename", file) for file in options["files"]]  # of a CachedFile
        options["files"] = [fspath(name) if isinstance(name, PathLike) else name for name in names]
    keys: DatasetKeys | None
    keys, problems = build(section, options, f"{name}.", {})
    problems += _cache_problems(name, cache_byte_size)
    problems += unknown_options(f"{name}.", options, section, kind_name, _ORDER_NAMES)
    if keys is not None:
        problems += [problem.within(f"{name}.") for problem in keys.problems()]
    inside: dict[str, DatasetSpec] = {}
    for child, (path, value) in inner_datasets(options).items():
        spec, more = check_dataset(f"{name}.{path}", value, {})
        problems += more
        if spec is not None:
            inside[child] = spec
    is_known = all(spec.is_known for spec in inside.values())
    if keys is not None and not problems and is_known:
        for child, spec in inside.items():
            problems += _order_problems(name, spec, order_values if child == keys.ordered_by else None)
        if keys.ordered_by is not None:
            order_values = {**non_default(inside[keys.ordered_by].order), **order_values}
    order, more = build(OrderKeys, {**defaults, **order_values}, f"{name}.", {})
    problems += more
    if problems or order is None or keys is None:
        if kind_name in ORDERED_OTHERWISE:
            hint = f"for the batches of RETURNN's {kind_name}, put the dict into {{'class': 'ReturnnDataset', 'dataset': ...}}"
            problems = [problem.with_hint(hint) if problem.rule in HAS_OTHER_KEYS else problem for problem in problems]
        return None, problems

    def open_it(context: OpeningContext | None = None) -> Dataset:
        return open_kind(name, keys, inside, context or OpeningContext())

    files = keys.data_files(), keys.files_to_copy()
    return DatasetSpec(name, open_it, order, *files, tuple(inside.values()), cache_byte_size, is_known=is_known), []


def _cache_problems(name: str, size: Any) -> list[Problem]:
    if size and (hint := absent("cache_size")):
        return problem("unknown-key", f"{name}.cache_byte_size: expected 0, got {size}{hint}")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
        return problem("wrong-type", f"{name}.cache_byte_size: expected a number of bytes, got {size!r}")
    if size and "." in name:
        return problem(
            "conflict",
            f"{name}.cache_byte_size: expected 0 inside another dataset, got {size} (set cache_size, or cache_byte_size in the "
            f"dict {name.split('.')[0]}, which datasets inside another one share)",
        )
    return []


def inner_datasets(options: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """The datasets inside a dataset dict: by name, the path of the config key, and the value."""
    result: dict[str, tuple[str, Any]] = {}
    if "dataset" in options:
        result["dataset"] = ("dataset", options["dataset"])
    several = options.get("datasets")
    if isinstance(several, (list, tuple)):
        several = dict(enumerate(several))
    if isinstance(several, dict):
        result.update({str(child): (f"datasets.{child}", value) for child, value in several.items()})
    return result


ORDERED_OTHERWISE = ("MetaDataset", "CombinedDataset", "ConcatDataset")
"""Kinds that RETURNN has, too, with orders that ours do not have: of each member by itself, or by a list."""

HAS_OTHER_KEYS = ("conflict", "unknown-key", "wrong-format")
"""The rules that RETURNN's further keys and values break."""

_ORDER_NAMES = [field.name for field in fields(OrderKeys)]


def _pop_order(options: dict[str, Any], options_of_class: list[str]) -> dict[str, Any]:
    """Remove the order keys from the options and return them; a class's own keys of the same name stay."""
    return {option: options.pop(option) for option in _ORDER_NAMES if option in options and option not in options_of_class}


def _order_problems(name: str, inside: DatasetSpec, outside: Mapping[str, Any] | None) -> list[Problem]:
    """Problems with order keys of a dataset inside another one: only the outermost dataset is ordered.

    Args:
        outside: the order keys of the outer dataset, if it takes its order from this one; else None.
    """
    problems = []
    for option, value in non_default(inside.order).items():
        if outside is None:
            problems += problem(
                "conflict", f"{inside.name}.{option}: expected in the outer dict, as {name}.{option}, got {value!r} here"
            )
        elif option in outside and outside[option] != value:
            problems += problem(
                "conflict", f"{inside.name}.{option}: expected {outside[option]!r} as {name}.{option}, or nothing, got {value!r}"
            )
    return problems


def _argument_problems(name: str, kind: str, options: Mapping[str, Any]) -> list[Problem]:
    class_name = kind.rpartition(":")[2]
    parameters = inspect.signature(resolve(kind)).parameters
    problems = []
    for option in options:
        if option not in parameters:
            problems += problem(
                "unknown-key", f"{name}.{option}: unknown key of {class_name}" + did_you_mean(str(option), list(parameters))
            )
    for parameter in parameters.values():
        if parameter.default is inspect.Parameter.empty and parameter.name not in options:
            problems += problem("missing", f"{name}.{parameter.name}: expected a value, got none for {class_name}")
    return problems


def _bind(name: str, kind: Any, options: dict[str, Any]) -> partial[Any]:
    """The user's class or function, bound to the other entries of the dict as arguments. Raises: DataError."""
    try:
        return partial(resolve(kind) if isinstance(kind, str) else kind, **options)
    except ImportError as error:
        raise DataError(f"{name}.class: expected something that can be imported, got {error}") from error


def _call(name: str, kind: Any, maker: partial[Any]) -> Any:
    """Call the user's class or function. Raises: ConfigError, if it does not take these arguments."""
    try:
        if needs_epoch(maker):
            inspect.signature(maker.func).bind(**maker.keywords, epoch=1)
            return iterable_source(name, maker)
        return maker()
    except TypeError as error:
        hints = [did_you_mean(option, _ORDER_NAMES) for option in maker.keywords if f"argument '{option}'" in str(error)]
        passed_on = f" (the dict's entries are passed to {kind} as arguments)"
        raise ConfigError.of("raised", f"{name}: {error}{''.join(hints) or passed_on}") from error
