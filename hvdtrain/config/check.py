"""Checks the values of a config, and builds the sections and the objects that they name. Collects all problems before reporting
any."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from hvdtrain.config.absent import absent
from hvdtrain.config.convert import Mismatch, convert, words_of
from hvdtrain.config.keys import REQUIRED, Key, declared_keys, spellings
from hvdtrain.config.overrides import OVERRIDING
from hvdtrain.config.plugins import synonym
from hvdtrain.config.references import is_reference, resolve
from hvdtrain.config.source import Source
from hvdtrain.errors import ConfigError, Problem, problem

S = TypeVar("S")

NONE_BY_NAME: Mapping[str, str] = {}


def build(section: type[S], values: dict[str, Any], where: str, origins: dict[str, str]) -> tuple[S | None, list[Problem]]:
    """Build a section from the values.

    Args:
        where: prefix of key names in messages: '' at the top level, 'train.' in the dict `train`.
        origins: by key, where its value comes from, for messages.

    Returns:
        The section and no problems, or None and the problems.
    """
    problems = []
    filled: dict[str, Any] = {}
    for key in declared_keys(section):
        spelled = spellings(key, values)
        if not spelled:
            if key.default is REQUIRED:
                wanted = "a value" if key.type is Any else words_of(key.type)
                problems += problem("missing", f"{where}{key.name}: expected {wanted} ({key.doc}), got nothing")
        for name, value in spelled.items():
            try:
                filled[key.field] = convert(value, key)
            except Mismatch as mismatch:
                got = mismatch.got or f"{_short_repr(value)} in {origins.get(name.partition('.')[0], 'the config')}"
                hint = f" ({key.instead})" if key.instead and not key.needs and mismatch.rule == "wrong-type" else absent(value)
                problems += problem(mismatch.rule, f"{where}{name}: expected {mismatch}, got {got}{hint}")
    return (None, problems) if problems else (section(**filled), [])


def describe(key: Key) -> str:
    """A key's type, rule and default in words, for `--help` and the reference page."""
    words = words_of(key.type)
    if key.rule is not None:
        words = key.rule.words if key.rule.is_choice else f"{words}; {key.rule.words}"
    if key.needs:
        words = f"{words}; backend {' or '.join(map(repr, key.needs))} only"
    return f"{words}; required" if key.required else f"{words}; default {_short_repr(key.default)}"


def unsupported_keys(sections: Iterable[Any], backend: str) -> list[Problem]:
    """Problems with keys that are set but that the config's framework does not support.

    Args:
        sections: the sections with their values.
        backend: name of the framework.
    """
    problems = []
    for section in sections:
        for key in declared_keys(type(section)):
            if key.needs and backend not in key.needs and getattr(section, key.field) != key.default:
                needs = " or ".join(map(repr, key.needs))
                hint = f" ({key.instead})" if key.instead else ""
                problems += problem("needs-backend", f"{key.name}: expected backend = {needs}, got {backend!r}{hint}")
    return problems


def unknown_keys(
    source: Source, known_names: Iterable[str], inside: Mapping[str, str] = NONE_BY_NAME
) -> tuple[list[Problem], tuple[str, ...]]:
    """Problems with names that are not keys: misspelt keys, unused overrides, and other trainers' names of keys, where nothing in
    the config reads them; and warnings about those that look like keys and that the config does read.

    Every other name belongs to the config's author and is not checked.

    Args:
        known_names: the declared keys.
        inside: full names of the keys that are entries of dicts, such as 'train.seq_ordering'.
    """
    problems = list[Problem]()
    warnings = list[str]()
    keys = list(known_names)
    for name, value in source.values.items():
        if name in keys or name in source.foreign_names or is_no_key(name, value):
            continue
        origin = source.origins[name]
        if hint := absent(name):
            problems += problem("unknown-key", f"{name}: unknown key in {origin}{hint}")
        elif (match := closest(name, keys)) and source.is_read(name):
            warnings.append(f"{name} in {origin}: not a key, but the config reads it itself (did you mean {match}?)")
        elif match:
            problems += problem("unknown-key", f"{name}: unknown key in {origin} (did you mean {match}?)")
        elif origin in OVERRIDING and (name in source.unused or _is_only_prose(source, name)):
            hint = f"did you mean {inside[name]}?" if name in inside else "it is not a key, and the config does not mention it"
            hint = f"did you mean {meant}?" if (meant := synonym(name)) is not None else hint
            problems += problem("unknown-key", f"{name}: unknown key in {origin} ({hint})")
        elif source.is_read(name):
            continue
        elif not source.is_foreign and not callable(value) and (meant := synonym(name)) is not None and source.is_only_set(name):
            problems += problem(
                "unknown-key",
                f"{name}: unknown key in {origin} (here, it is {meant}; another name for something of your own, which "
                "nothing here reads)",
            )
        elif origin in OVERRIDING and source.texts:
            warnings.append(f"{name} in {origin}: no file of the config reads it, though one has the word")
    return problems, tuple(warnings)


def _is_only_prose(source: Source, name: str) -> bool:
    """Whether an override has another trainer's name of a key, which a config's comments may mention, but no code."""
    is_quoted = any(re.search(rf"[\"']{re.escape(name)}[\"']", text) for text in source.texts.values())
    return synonym(name) is not None and not is_quoted and not source.is_read(name)


def unread_line(source: Source, known_names: Iterable[str]) -> tuple[str, ...]:
    """The line that lists the constants of the config that nothing reads; none, if there are none.

    Args:
        known_names: as of `unknown_keys`.
    """
    keys = {*known_names, *source.foreign_names}
    files = [Path(file).name for file in source.texts]  # an override may be read by code that a config runs with `exec`
    names = [
        name
        for name, value in source.values.items()
        if name not in keys
        and not name.startswith("_")
        and isinstance(value, CONSTANTS)
        and source.origins.get(name) in files
        and source.is_only_set(name)
    ]
    in_code = not source.is_foreign and source.texts and not any(file.endswith(".json") for file in source.texts)
    return (f"nothing reads these names of the config: {', '.join(names)}",) if names and in_code else ()


CONSTANTS = (bool, int, float, str, list, tuple, dict)


def is_no_key(name: str, value: Any) -> bool:
    """Whether a name is clearly not meant as a key: it is private, or names a module or a class."""
    return name.startswith("_") or isinstance(value, (ModuleType, type))


def unknown_options(
    where: str, options: Mapping[str, Any], section: type, kind: str, more_names: Iterable[str] = ()
) -> list[Problem]:
    """Problems with options that a section does not declare.

    Args:
        where: prefix of option names in messages, such as 'train.'.
        kind: what these options belong to, for the message.
        more_names: further names that are allowed.
    """
    option_names = [*(key.name for key in declared_keys(section)), *more_names]
    problems = []
    for option in options:
        if option not in option_names:
            hint = absent(f"horovod_{option}") or absent(f"{where}{option}") or did_you_mean(str(option), option_names)
            problems += problem("unknown-key", f"{where}{option}: unknown key of {kind}{hint}")
    return problems


CLOSE = 0.85
"""An unknown name at least this similar to a key (difflib's ratio) counts as a misspelling of it."""


def closest(name: str, keys: Iterable[str]) -> str | None:
    """The key that `name` is probably a misspelling of, or None.

    >>> closest("learinng_rate", ["learning_rates", "learning_rate"]), closest("trian", ["train"]), closest("hidden", ["train"])
    ('learning_rate', 'train', None)
    """
    long = len(name)
    alike = [key for key in keys if 2 * min(long, len(key)) >= CLOSE * (long + len(key))]  # difflib would ask for each, slowly
    close = get_close_matches(name, alike, n=1, cutoff=CLOSE)
    if close:
        return close[0]
    letters = sorted(name)
    return next((key for key in alike if len(key) == long and sorted(key) == letters), None)  # in another order


def did_you_mean(name: str, keys: Iterable[str]) -> str:
    """A hint for the end of a message about a name that is not a key.

    >>> did_you_mean("learning_rat", ["learning_rate"]), did_you_mean("hidden", ["learning_rate"])
    (' (did you mean learning_rate?)', '')
    """
    match = closest(name, keys)
    return f" (did you mean {match}?)" if match else ""


def _short_repr(value: Any) -> str:
    """The repr of a value for a message, on one line and shortened to 80 characters."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class Factory:
    """An object that a key asks for.

    Attributes:
        label: its name in messages: the one in the config, or its class's.
        kind: its class, or the object itself.
        make: returns the object.
    """

    label: str
    kind: Any
    make: Callable[[], Any]


def build_objects(
    key: str,
    value: Any,
    methods: Collection[str],
    prefix: str,
    by_name: Mapping[str, str] = NONE_BY_NAME,
    passed_over: Collection[str] = (),
) -> tuple[list[Factory], list[Problem]]:
    """The objects that a key asks for, and the problems.

    Args:
        value: None, an entry, or a list of entries: an object, a class, a class's name in `by_name` or as 'module:Class', or a
            dict with one of these as `class` and the arguments of the class.
        methods: an object must have at least one of them.
        prefix: a method whose name begins with this and is not in `methods` is a mistake.
        by_name: 'module:Class' by name.
        passed_over: entries that are no objects.
    """
    several = isinstance(value, (list, tuple))
    factories: list[Factory] = []
    problems: list[Problem] = []
    for number, entry in enumerate(value if several else () if value is None else (value,)):
        where = f"{key}[{number}]" if several else key
        if isinstance(entry, str) and entry in passed_over:
            continue
        try:
            names = by_name if isinstance(entry, dict) else {**by_name, **dict.fromkeys(passed_over, "")}
            factories.append(_factory(entry, methods, prefix, names))
        except ConfigError as error:
            problems += [problem.within(f"{where}: ") for problem in error.problems]
        except ImportError as error:
            problems += problem("cannot-import", f"{where}: expected a class that can be imported, got {error}")
    return factories, problems


def _factory(entry: Any, methods: Collection[str], prefix: str, by_name: Mapping[str, str]) -> Factory:
    """One entry. Raises: ConfigError, with the problem; ImportError."""
    options = {}
    if isinstance(entry, dict):
        if "class" not in entry:
            raise ConfigError.of("missing", f"expected an entry `class`, got {entry!r}")
        options = {name: option for name, option in entry.items() if name != "class"}
        entry = entry["class"]
    kind = entry
    label = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
    if isinstance(entry, str):
        reference = by_name.get(entry, entry)
        if not is_reference(reference):
            names = ", ".join(["an object", "a class", *map(repr, by_name)])
            hint = did_you_mean(entry, by_name)
            raise ConfigError.of("unknown-value", f"expected {names} or 'module:Class', got {entry!r}{hint}")
        kind = resolve(reference)
    # Other attributes are not read: those of NumPy's arrays may raise errors.
    of_interest = [name for name in dir(kind) if name.startswith(prefix) or name in methods]
    present = [name for name in of_interest if callable(getattr(kind, name, None))]
    unknown = [name for name in present if name not in methods]
    if unknown or not present:
        got = f"{unknown[0]}{did_you_mean(unknown[0], methods)}" if unknown else f"none of them in {label}"
        raise ConfigError.of("wrong-type", f"expected methods among {', '.join(methods)}, got {got}")
    if not isinstance(kind, type):
        if options:
            names = ", ".join(options)
            raise ConfigError.of("conflict", f"expected arguments with a class only, got {names} with an object of {label}")
        return Factory(label, kind, lambda: kind)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        names = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ConfigError.of("wrong-signature", f"expected the arguments of {label} ({names}), got: {error}") from None
    except ValueError:
        pass  # a class written in C has no signature to check against
    return Factory(label, kind, partial(kind, **options))
