"""Reads a config: Python or JSON files, and the overrides of the command line, which take precedence."""

from __future__ import annotations

import copy
import json
import os
import re
import symtable
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.config.absent import absent
from hvdtrain.config.access import ConfigAccess
from hvdtrain.config.convert import text_value
from hvdtrain.config.missing import import_failure
from hvdtrain.config.overrides import COMMAND_LINE, Code, line_in, lines_that_read, override, set_nested
from hvdtrain.errors import ConfigError, Problem

MODULE_NAME = "__hvdtrain_config__"
OUR_FILES = (str(Path(__file__).parent.parent),)
"""How the names of this package's own files begin."""


@dataclass(frozen=True)
class Source:
    """All names with their values and origins: a file's name or the command line."""

    values: dict[str, Any]
    origins: dict[str, str]
    unused: tuple[str, ...]
    """Overrides whose name does not occur in the text of the config."""
    imported: frozenset[str] = frozenset()
    """Overrides of constants that the config imports."""
    problems: tuple[Problem, ...] = ()
    """Problems with overrides of entries of values that are not dicts."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """The text of each config file, by its path."""
    is_foreign: bool = False
    """Whether the config was written for another program, whose rules for `extern_data` differ."""
    foreign_names: frozenset[str] = frozenset()
    """Names that are neither keys nor mistakes: another program reads or ignores them."""
    warnings: tuple[str, ...] = ()
    """For the log: values that are changed or ignored, and names that look like mistakes."""
    notes: tuple[str, ...] = ()
    """For the log: keys that have no effect here."""

    def is_only_set(self, name: str) -> bool:
        """Whether a name that has a value is nowhere else in the config files. (One that a file imports may be used there.)"""
        return sum(_words(text)[name] for text in self.texts.values()) == 1 or not self.texts

    def is_read(self, name: str) -> bool:
        """Whether the code of a config file reads this global name, or `config.value(NAME, ...)`, or it is an override of a
        constant that it imports."""
        if name in self.imported:
            return True
        return self.asks_for(name) or any(name in _names_read(text) for text in self.texts.values())

    def asks_for(self, name: str) -> bool:
        """Whether the code of a config file has `config.value(NAME, ...)`, or `config.typed_dict[NAME]`."""
        return any(name in _names_asked_for(text) for text in self.texts.values())


@cache
def _words(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text))


@cache
def _names_asked_for(text: str) -> frozenset[str]:
    """What a text has in quotes in `config.value(NAME, ...)` and the like."""
    return frozenset(re.findall(r"\bconfig\.\w+(?:\.get)?[(\[]\s*[\"']([^\"']+)[\"']", text))


@cache
def _names_read(text: str) -> frozenset[str]:
    """The global names that the code of a config reads, in all of its scopes: none, if it is JSON."""
    try:
        scopes = [symtable.symtable(text, "config", "exec")]
    except SyntaxError:
        return frozenset()
    top = scopes[0]
    names = set[str]()
    for scope in scopes:
        scopes += scope.get_children()
        symbols = (symbol for symbol in scope.get_symbols() if symbol.is_referenced())
        names |= {symbol.get_name() for symbol in symbols if scope is top or symbol.is_global()}
    return frozenset(names)


@dataclass(frozen=True)
class PythonFile:
    """A config file that has run.

    Attributes:
        names: what its functions see.
        had: the overrides that it had while it ran.
    """

    name: str
    code: Code
    names: dict[str, Any]
    had: set[str]


Builtins = Callable[[dict[str, Any]], dict[str, Any]]
"""Returns the builtins for a config file, given its namespace."""


Config = Path | Mapping[str, Any]
"""A config file, or its keys and values."""


def load(
    configs: Sequence[Config],
    overrides: Mapping[str, Any],
    types: Mapping[str, Any],
    builtins: Builtins | None = None,
    origin: str = COMMAND_LINE,
    spellings: Sequence[Sequence[str]] = (),
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> Source:
    """Run or parse the config files in order, then apply the overrides.

    Later files take precedence over earlier ones, and overrides over all files, whatever the spelling of a key. A Python file
    sees overrides without a dot while it runs, as globals and through `config.value(...)`. Its functions see what a declared key,
    a constant of the file, or a dict with an entry that is overridden comes to be; so do those of the modules from which the file
    imports a constant that is overridden.

    Args:
        overrides: `++key value` as text; the key `train.seq_ordering` sets an entry of the dict `train`.
        types: types of the declared keys, which determine how text is parsed.
        builtins: None: Python's.
        origin: of the overrides, which are text only if they come from the command line.
        spellings: the names of each key; an entry of a dict is spelled with a dot.
        around: in the context of which the files run, also where a process reads them again.

    Raises:
        ConfigError: a file is missing, cannot be parsed or raises an exception.
    """
    from hvdtrain.config.children import let_children_import  # here: multiprocessing would make `--help` slower

    configs = [Path(config) if isinstance(config, str) else config for config in configs]  # a program may pass texts
    if any(isinstance(config, Path) for config in configs):
        as_now = copy.deepcopy(builtins)  # it notes what the config imports
        let_children_import(MODULE_NAME, load, configs, overrides, types, as_now, origin, spellings, around)
    with around():
        return _load(configs, overrides, types, builtins, origin, spellings)


def _load(
    configs: Sequence[Config],
    overrides: Mapping[str, Any],
    types: Mapping[str, Any],
    builtins: Builtins | None,
    origin: str,
    spellings: Sequence[Sequence[str]],
) -> Source:
    """As `load`."""
    spellings = [names for names in spellings if len(names) > 1]
    parse: Callable[[Any, Any], Any] = text_value if origin == COMMAND_LINE else lambda value, expected: value
    top = {name: parse(value, types.get(name, Any)) for name, value in overrides.items() if "." not in name}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    texts: dict[str, str] = {}
    files: list[PythonFile] = []
    imported: set[str] = set()
    for path in configs:
        if not isinstance(path, Path):
            values = {**_without_spellings(values, _given(path, spellings)), **path}
            origins.update(dict.fromkeys(path, "the dict of keys"))
            continue
        text = texts[str(path)] = _read(path)
        if path.suffix == ".json" or text.lstrip().startswith("{"):
            loaded = _parse_json(path, text)
        else:
            modules_before = set(sys.modules)
            loaded, names, code = _run_python(path, text, values, top, builtins)
            had = {name for name in top if name in names and names[name] == top[name]}
            imported |= override(names, code, top, modules_before, types)
            seen = [name for name in top if name in types and not callable(names.get(name))]
            names.update({name: top[name] for name in seen})  # others may be called, or computed from an override
            for earlier in files:
                later = {name: value for name, value in loaded.items() if name in earlier.code.constants and name not in top}
                earlier.names.update(later)
            files.append(PythonFile(path.name, code, names, had))
        values = {**_without_spellings(values, _given(loaded, spellings)), **loaded}
        origins.update(dict.fromkeys(loaded, path.name))
    mentioned = {*values, *(word for text in texts.values() for word in _words(text))}
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        forgotten = _given({name: top.get(name)}, spellings)
        values = _without_spellings(values, forgotten)
        nested = {outer: value for outer, value in nested.items() if not any(outer in names_of_key for names_of_key in forgotten)}
        if "." in name:
            nested[name] = value
        else:
            values[name] = top[name]
            origins[name] = origin
    problems = []
    before = dict(values)
    for name, value in nested.items():
        problems += set_nested(values, origins, name, value, parse, origin)
    for name in {name.partition(".")[0] for name in nested} & values.keys():
        for file in files:
            if file.names.get(name) is before[name]:  # not that of another file
                file.names[name] = values[name]
    unused = tuple(name for name in top if name not in types and name not in mentioned)
    source = Source(values, origins, unused, frozenset(imported), tuple(problems), texts)
    computed = [_computed_before(source, files, name, name.partition(".")[0] in types) for name in overrides]
    return replace(source, warnings=tuple(filter(None, computed)))


def _computed_before(source: Source, files: Sequence[PythonFile], name: str, is_key: bool) -> str | None:
    """The warning that a file had computed with its own constant before an override took its place, if it did.

    Args:
        name: of an override, or of an entry of a dict.

    Raises:
        ConfigError: nothing else reads the name, so the override would have no effect.
    """
    first, dot, _ = name.partition(".")
    if not any(first in file.code.constants for file in files):
        return None
    is_read = is_key or source.asks_for(first) or first in source.imported
    before: list[str] = []
    for file in files:
        at_once, later = lines_that_read(file.code.tree, first)
        is_read = is_read or later
        if at_once and name not in file.had and first in file.code.constants:
            before.append(f"{file.name}, line {', '.join(map(str, at_once))}")
        else:
            is_read = is_read or bool(at_once)
    if not before or (dot and is_key):  # dev = {**train} is not meant to be what ++train.files makes of train
        return None
    hint = f"functions that run later see the override{'' if dot else f', and so does config.value({name!r}, default)'}"
    if is_read:
        return f"++{name}: {' and '.join(before)}: computed before, with the constant of the file ({hint})"
    raise ConfigError.of(
        "wrong-type",
        f"++{name}: expected a constant that functions of the config read, got one that the file itself computes with: "
        f"{' and '.join(before)} ({hint})",
    )


def _given(values: Mapping[str, Any], spellings: Sequence[Sequence[str]]) -> list[set[str]]:
    """For each key that the values give, its spellings that they do not use.

    Args:
        values: an entry of a dict, or one within it, may also be given by its name with dots.
    """

    def has(name: str) -> bool:
        outer, dot, entry = name.partition(".")
        inside = values.get(outer)
        is_named = any(spelling == name or spelling.startswith(f"{name}.") for spelling in values)
        return is_named or bool(dot and isinstance(inside, dict) and inside.get(entry) is not None)

    return [missing for names in spellings if len(missing := {name for name in names if not has(name)}) < len(names)]


def _without_spellings(values: Mapping[str, Any], forgotten: Iterable[set[str]]) -> dict[str, Any]:
    """The values without these names, some of which are entries of dicts."""
    kept_values = dict(values)
    for name in (name for names in forgotten for name in names):
        outer, dot, entry = name.partition(".")
        if dot and isinstance(kept_values.get(outer), dict):
            kept_values[outer] = {name: value for name, value in kept_values[outer].items() if name != entry}
        elif not dot:
            kept_values.pop(name, None)
    return kept_values


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin files with a mark
        if not text and not path.is_file():
            raise ConfigError.of(
                "unreadable",
                f"{path}: expected a config file, got a pipe that is empty: it can be read once, and each rank reads it, and the "
                "launcher of ++ngpu, too (write it to a file)",
            )
        return text
    except OSError as error:
        present = [file.name for file in path.parent.glob("*")] if isinstance(error, FileNotFoundError) else []
        close = get_close_matches(path.name, present, n=1, cutoff=0.8)
        hint = f" (did you mean {path.parent / close[0]}?)" if close else ""
        key = f" (python -m hvdtrain CONFIG trains, --help lists the commands; for the key {path.name}, write ++{path.name})"
        hint = hint or absent(path.name) or ("" if path.suffix else key)
        raise ConfigError.of("unreadable", f"{path}: expected a config file, got: {error.strerror}{hint}") from None
    except UnicodeDecodeError:
        raise ConfigError.of("unreadable", f"{path}: expected a Python or JSON file, got bytes that are not UTF-8") from None


def _parse_json(path: Path, text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError.of("unreadable", f"{path.name}, line {error.lineno}: expected JSON, got: {error.msg}") from None
    if not isinstance(parsed, dict):
        raise ConfigError.of("unreadable", f"{path.name}: expected a JSON object of keys, got a {type(parsed).__name__}")
    return parsed


def _run_python(
    path: Path, text: str, before: Mapping[str, Any], overrides: Mapping[str, Any], builtins: Builtins | None
) -> tuple[dict[str, Any], dict[str, Any], Code]:
    """Run the file as a module, so that its classes and functions behave as in any other module.

    Args:
        before: the values of earlier files.

    Returns:
        The values of the file, the names that its functions see, and what its text says.
    """
    visible = {**before, **overrides}
    module = ModuleType(MODULE_NAME)
    module.__file__ = os.path.abspath(path)  # of a link, not of what it leads to: the config may name its model by it
    sys.modules[MODULE_NAME] = module
    for folder in dict.fromkeys((os.path.dirname(module.__file__), str(path.resolve().parent))):
        if folder not in sys.path:
            sys.path.append(folder)
    names = module.__dict__
    names.update(visible)
    access = ConfigAccess(names)
    names["config"] = access
    if builtins is not None:
        names["__builtins__"] = builtins(names)
    try:
        code = Code.parse(text, str(path))
        exec(compile(code.tree, str(path), "exec", dont_inherit=True), names)  # not with the __future__ imports of this file
    except ConfigError:
        raise
    except SystemExit as error:
        raise ConfigError.of(
            "raised",
            f"{path.name}{line_in(path, error)}: expected a config that goes on to its end, got sys.exit({error.code!r}) (an "
            "argument parser would read hvdtrain's own arguments: config.value('key', default) reads ++key)",
        ) from error
    except Exception as error:
        line = line_in(path, error)
        error_text = f"{type(error).__name__}: {error}"
        if isinstance(error, ImportError):
            error_text = import_failure(error, OUR_FILES).replace(f", imported by {path}{line}", "")  # with which it begins
        elif isinstance(error, SyntaxError) and error.filename == str(path):
            error_text = f"{type(error).__name__}: {error.msg}: {(error.text or '').strip()}".removesuffix(": ")
        again = isinstance(error, FileExistsError)
        hint = " (each rank reads the config, at each start: os.makedirs(..., exist_ok=True))" if again else ""
        raise ConfigError.of("raised", f"{path.name}{line}: {error_text}{hint}") from error
    loaded = {
        name: value
        for name, value in names.items()
        if not name.startswith("__") and not (name == "config" and value is access) and visible.get(name, names) is not value
    }
    return loaded, names, code
