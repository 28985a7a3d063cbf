"""Python objects that a config names in a string: `package.module:name` or `folder/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.config.check import did_you_mean
from hvdtrain.errors import ConfigError


def is_reference(value: object) -> bool:
    """Whether a value is a reference.

    >>> is_reference("my_corpus:Words"), is_reference("demos/g2p/words.py:Words"), is_reference("a.hdf,b.hdf")
    (True, True, False)
    """
    if not isinstance(value, str) or value.count(":") != 1:
        return False
    module, name = value.split(":")
    return name.isidentifier() and (module.endswith(".py") or all(part.isidentifier() for part in module.split(".")))


def resolve(reference: str) -> Any:
    """Import the module or file and return the object. Raises: ImportError, whose message names the reference."""
    module_name, name = reference.split(":")
    try:
        if module_name.endswith(".py"):
            path = Path(module_name)
            if not path.exists():
                raise ImportError(f"no such file {module_name}")
            specification = importlib.util.spec_from_file_location(path.stem, path)
            if specification is None or specification.loader is None:
                raise ImportError(f"{module_name} cannot be loaded as Python")
            module = importlib.util.module_from_spec(specification)
            sys.modules.setdefault(path.stem, module)
            specification.loader.exec_module(module)
        else:
            module = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(f"{reference}: {type(error).__name__}: {error}") from error
    if not hasattr(module, name):
        raise ImportError(f"{reference}: expected a name {name!r} in {module_name}, got none")
    return getattr(module, name)


def as_function(value: Any, name: str) -> Any:
    """The function that a key holds, or that it names as 'module:name'. Raises: ConfigError."""
    if not isinstance(value, str):
        return value
    if not is_reference(value):
        raise ConfigError([f"{name}: expected a function or its name as 'module:name', got {value!r}"])
    try:
        return resolve(value)
    except ImportError as error:
        raise ConfigError([f"{name}: expected a function that can be imported, got {error}"]) from error


@dataclass(frozen=True)
class Made:
    """An object that a key asks for.

    Attributes:
        label: the name by which messages call it: that in the config, or its class's.
        kind: its class, or the object itself.
        make: returns the object.
    """

    label: str
    kind: Any
    make: Callable[[], Any]


NONE_BY_NAME: Mapping[str, str] = {}


def objects_of(
    key: str, value: Any, methods: Collection[str], prefix: str, by_name: Mapping[str, str] = NONE_BY_NAME
) -> tuple[list[Made], list[str]]:
    """The objects that a key asks for, and the problems.

    Args:
        value: None, an entry, or a list of entries: an object, a class, a class's name in `by_name` or as 'module:Class', or a
            dict with one of these as `class` and the arguments of the class.
        methods: an object has to have at least one of them.
        prefix: a method whose name begins with this and is none of `methods` is a mistake.
        by_name: 'module:Class' by name.
    """
    several = isinstance(value, (list, tuple))
    made: list[Made] = []
    problems: list[str] = []
    for number, entry in enumerate(value if several else () if value is None else (value,)):
        try:
            made.append(_object(entry, methods, prefix, by_name))
        except (ConfigError, ImportError) as error:
            message = (
                error.problems[0] if isinstance(error, ConfigError) else f"expected a class that can be imported, got {error}"
            )
            problems.append(f"{key}[{number}]: {message}" if several else f"{key}: {message}")
    return made, problems


def _object(entry: Any, methods: Collection[str], prefix: str, by_name: Mapping[str, str]) -> Made:
    """One entry. Raises: ConfigError, with the problem; ImportError."""
    options = {}
    if isinstance(entry, dict):
        if "class" not in entry:
            raise ConfigError([f"expected an entry `class`, got {entry!r}"])
        options = {name: option for name, option in entry.items() if name != "class"}
        entry = entry["class"]
    kind = entry
    label = entry if isinstance(entry, str) else getattr(entry, "__name__", type(entry).__name__)
    if isinstance(entry, str):
        reference = by_name.get(entry, entry)
        if not is_reference(reference):
            names = ", ".join(["an object", "a class", *map(repr, by_name)])
            raise ConfigError([f"expected {names} or 'module:Class', got {entry!r}{did_you_mean(entry, by_name)}"])
        kind = resolve(reference)
    there = [name for name in dir(kind) if callable(getattr(kind, name, None))]
    unknown = [name for name in there if name.startswith(prefix) and name not in methods]
    if unknown or not set(there) & set(methods):
        got = f"{unknown[0]}{did_you_mean(unknown[0], methods)}" if unknown else f"none of them in {label}"
        raise ConfigError([f"expected methods among {', '.join(methods)}, got {got}"])
    if not isinstance(kind, type):
        if options:
            raise ConfigError([f"expected arguments beside a class, got {', '.join(options)} beside an object of {label}"])
        return Made(label, kind, lambda: kind)
    try:
        inspect.signature(kind).bind(**options)
    except TypeError as error:
        names = ", ".join(inspect.signature(kind).parameters) or "none"
        raise ConfigError([f"expected the arguments of {label} ({names}), got: {error}"]) from None
    except ValueError:
        pass  # a class in C tells nothing of its arguments
    return Made(label, kind, partial(kind, **options))
