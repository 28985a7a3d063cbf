"""Reads a config: Python or JSON files, and the overrides of the command line, which take precedence.

The end of the file resolves Python objects that a config names in a string: `package.module:name` or `folder/file.py:name`.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import copy
import gc
import importlib
import importlib.util
import json
import os
import re
import symtable
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn

from hvdtrain.config.absent import absent
from hvdtrain.config.convert import text_value
from hvdtrain.config.missing import import_failure
from hvdtrain.config.synonyms import SYNONYMS
from hvdtrain.errors import ConfigError, Problem, problem

COMMAND_LINE = "the command line"
CALL = "the call"
OVERRIDING = (COMMAND_LINE, CALL)
"""Origins of overrides: text from the command line, Python objects from a program that calls hvdtrain."""
MODULE_NAME = "__hvdtrain_config__"
OUR_FILES = (str(Path(__file__).parent.parent),)
"""How the names of this package's own files begin."""


OPTIONS = (
    "-h", "--help", "--dry-run", "--find-batch-size", "--summary", "--find-learning-rate", "--overfit-batches", "--print-config",
    "--changed", "--color", "--version",
)  # fmt: skip
"""Options of the program itself, besides keys."""


def parse_command_line(arguments: list[str]) -> tuple[list[Path], dict[str, str]]:
    """Parse config files followed by `++key value` pairs, or `++key=value`; a single config may be anywhere. Raises: ConfigError.

    >>> parse_command_line(["config.py", "++max_seqs", "128", "++train.seq_ordering=random"])
    ([PosixPath('config.py')], {'max_seqs': '128', 'train.seq_ordering': 'random'})
    """
    files = []
    rest = without_local_rank(arguments)
    while rest and not rest[0].startswith(("+", "-")) and not _is_assignment(rest[0]):
        files.append(Path(rest.pop(0)))
    problems = []
    overrides = {}
    while rest:
        word = rest.pop(0)
        name, assigned, value = word.partition("=")
        if not files and not word.startswith(("+", "-")) and Path(word).is_file():
            files.append(Path(word))
            continue
        if not name.startswith("++") or len(name) == 2:
            value = value if assigned or not rest or rest[0].startswith(("+", "-")) else rest.pop(0)
            meant = name.lstrip("-+").replace("-", "_")
            option = get_close_matches(word, OPTIONS, n=1, cutoff=0.8)
            hint = f"did you mean {_as_key(meant, value)}?" if meant else "python -m hvdtrain --help"
            hint = f"did you mean {option[0]}?" if option and option[0][:3] == word[:3] else hint
            hint = "configs are written first" if Path(word).is_file() else hint
            problems += problem("wrong-format", f"command line: expected ++KEY VALUE, got {word!r} ({hint})")
            continue
        if not assigned:
            if not rest or _is_key(rest[0]):
                problems += problem(
                    "missing", f"command line: expected a value after {name}, got {'the next key' if rest else 'nothing'}"
                )
                continue
            value = rest.pop(0)
        overrides[name[2:]] = value.removeprefix("+") if value.startswith("+-") else value
    if not files:
        problems[:0] = problem("missing", "command line: expected a config file first, got none (python -m hvdtrain --help)")
    if problems:
        raise ConfigError(problems)
    return files, overrides


def _as_key(name: str, value: str) -> str:
    """How to set a key on the command line, given its name, or another trainer's.

    >>> _as_key("lr", "3"), _as_key("hidden", ""), _as_key("weight_decay", "0.1")
    ('++learning_rate 3', '++hidden VALUE', "in the config: optimizer = {'class': ..., 'weight_decay': ...}")
    """
    key = SYNONYMS.get(name, name)
    return f"++{key} {value or 'VALUE'}" if key.isidentifier() or key == name else f"in the config: {key}"


def _is_assignment(word: str) -> bool:
    """Whether a word is meant as KEY=VALUE, not as a file."""
    return "=" in word and not Path(word).exists()


def split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split a command's own arguments from the `++key value` pairs among them.

    >>> split_overrides(["config.py", "++max_seqs", "128", "--json"])
    (['config.py', '--json'], ['++max_seqs', '128'])
    """
    own: list[str] = []
    overrides: list[str] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        (overrides if word.startswith("++") else own).append(word)
        if word.startswith("++") and "=" not in word and rest and not _is_key(rest[0]):
            overrides.append(rest.pop(0))
    return own, overrides


def _is_key(word: str) -> bool:
    """Whether a word begins the next pair instead of being a value."""
    return word.startswith("++") and not word.startswith("+++")


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors explain how to write keys of a config.

    Attributes:
        instead: of other programs' options of the same purpose, ours.
        otherwise: how such a program's other options are written; None: this command has nothing to do with one.
    """

    instead: Mapping[str, str] = MappingProxyType({})
    otherwise: str | None = None

    def error(self, message: str) -> NoReturn:
        """Print the error, with the right spelling of an argument that looks like a key, and end the program."""
        _, _, unknown = message.partition("unrecognized arguments: ")
        word, *more = unknown.split()[:2] or [""]
        name, assigned, value = word.lstrip("-+").partition("=")
        name = name.replace("-", "_")
        options = [option for action in self._actions for option in action.option_strings]
        close = get_close_matches(word, options, n=1, cutoff=0.8)
        value = value if assigned or not more else more[0]
        if word in self.instead:
            message += f" (did you mean {self.instead[word]}?)"
        elif close:
            message += f" (did you mean {close[0]}?)"
        elif name.isidentifier() and "++" in (self.usage or ""):
            message += f" (a key of a config is written {_as_key(name, value)}"
            message += ")" if self.otherwise is None else f", {self.otherwise.format(word.partition('=')[0], value or 'VALUE')})"
        super().error(message)


STATUSES = """\
exit status
  0    done
  1    a crash: a traceback was printed
  2    a mistake in the command, the config or the data, which the message names
  130  interrupted with Ctrl-C"""
"""For commands that have no others."""


def command_parser(name: str, description: str, epilog: str, usage: str | None = None) -> CommandParser:
    """A parser for the options of the command `python -m hvdtrain NAME`. Line breaks in the texts are kept.

    Args:
        usage: None: generated from the options.
    """
    return CommandParser(
        prog=f"python -m hvdtrain {name}",
        usage=usage,
        description=description,
        epilog=epilog if "exit status" in epilog else f"{epilog}\n\n{STATUSES}".strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


LOCAL_RANK = re.compile(r"--local[-_]rank=\d+")
"""The argument that torch.distributed.launch adds without --use_env. The environment has the same information."""


def without_local_rank(arguments: list[str]) -> list[str]:
    """The arguments without the one that torch.distributed.launch adds.

    >>> without_local_rank(["--local-rank=1", "config.py"])
    ['config.py']
    """
    return [argument for argument in arguments if not LOCAL_RANK.fullmatch(argument)]


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
        found = [match for text in self.texts.values() for match in re.findall(rf"\b{re.escape(name)}\b", text)]
        return len(found) == 1 or not self.texts

    def is_read(self, name: str) -> bool:
        """Whether the code of a config file reads this global name, or `config.value(NAME, ...)`, or it is an override of a
        constant that it imports."""
        if name in self.imported:
            return True
        return self.asks_for(name) or any(_reads(text, name) for text in self.texts.values())

    def asks_for(self, name: str) -> bool:
        """Whether the code of a config file has `config.value(NAME, ...)`."""
        asked = rf"\bconfig\.\w+\(\s*[\"']{re.escape(name)}[\"']"
        return any(re.search(asked, text) for text in self.texts.values())


def _reads(text: str, name: str) -> bool:
    try:
        scopes = [symtable.symtable(text, "config", "exec")]
    except SyntaxError:  # a JSON file
        return False
    top = scopes[0]
    while scopes:
        scope = scopes.pop()
        scopes += scope.get_children()
        if name in scope.get_identifiers():
            symbol = scope.lookup(name)
            if symbol.is_referenced() and (scope is top or symbol.is_global()):
                return True
    return False


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

    Raises:
        ConfigError: a file is missing, cannot be parsed or raises an exception.
    """
    from hvdtrain.config.children import let_children_import  # here: multiprocessing would make `--help` slower

    configs = [Path(config) if isinstance(config, str) else config for config in configs]  # a program may pass texts
    if any(isinstance(config, Path) for config in configs):
        as_now = copy.deepcopy(builtins)  # it notes what the config imports
        let_children_import(MODULE_NAME, load, configs, overrides, types, as_now, origin, spellings)
    spellings = [names for names in spellings if len(names) > 1]
    parse: Callable[[Any, Any], Any] = text_value if origin == COMMAND_LINE else lambda value, expected: value
    top = {name: parse(value, types.get(name, Any)) for name, value in overrides.items() if "." not in name}
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    texts: dict[str, str] = {}
    modules: list[dict[str, Any]] = []
    constants: list[set[str]] = []  # of each of them
    trees: dict[str, ast.Module] = {}
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
            known = set(sys.modules)
            loaded, names, tree = _run_python(path, text, values, top, builtins)
            imported |= _override(names, tree, top, known, types)
            trees[path.name] = tree
            seen = [name for name in top if name in types and not callable(names.get(name))]
            names.update({name: top[name] for name in seen})  # others may be called, or computed from an override
            for earlier, of_earlier in zip(modules, constants, strict=True):
                earlier.update({name: value for name, value in loaded.items() if name in of_earlier and name not in top})
            modules.append(names)
            constants.append(_constants(tree))
        values = {**_without_spellings(values, _given(loaded, spellings)), **loaded}
        origins.update(dict.fromkeys(loaded, path.name))
    mentioned = {*values, *re.findall(r"\w+", "\n".join(texts.values()))}
    nested: dict[str, Any] = {}
    for name, value in overrides.items():
        forgotten = _given({name: top.get(name)}, spellings)
        values = _without_spellings(values, forgotten)
        nested = {other: value for other, value in nested.items() if not any(other in others for others in forgotten)}
        if "." in name:
            nested[name] = value
        else:
            values[name], origins[name] = top[name], origin
    problems, before = [], dict(values)
    for name, value in nested.items():
        problems += _set_nested(values, origins, name, value, parse, origin)
    for name in {name.partition(".")[0] for name in nested} & values.keys():
        for names in modules:
            if names.get(name) is before[name]:  # not that of another file
                names[name] = values[name]
    unused = tuple(name for name in top if name not in types and name not in mentioned)
    source = Source(values, origins, unused, frozenset(imported), tuple(problems), texts)
    computed = [_computed_before(source, trees, name) for name in top if name not in types]
    return replace(source, warnings=tuple(filter(None, computed)))


def _given(values: Mapping[str, Any], spellings: Sequence[Sequence[str]]) -> list[set[str]]:
    """For each key that the values give, its spellings that they do not use.

    Args:
        values: an entry of a dict, or one within it, may also be given by its name with dots.
    """

    def has(name: str) -> bool:
        outer, dot, entry = name.partition(".")
        inside = values.get(outer)
        is_named = any(given == name or given.startswith(f"{name}.") for given in values)
        return is_named or bool(dot and isinstance(inside, dict) and inside.get(entry) is not None)

    return [others for names in spellings if len(others := {name for name in names if not has(name)}) < len(names)]


def _without_spellings(values: Mapping[str, Any], forgotten: Iterable[set[str]]) -> dict[str, Any]:
    """The values without these names, some of which are entries of dicts."""
    left = dict(values)
    for name in (name for names in forgotten for name in names):
        outer, dot, entry = name.partition(".")
        if dot and isinstance(left.get(outer), dict):
            left[outer] = {name: value for name, value in left[outer].items() if name != entry}
        elif not dot:
            left.pop(name, None)
    return left


LARGE = frozenset(("torch", "torch._dynamo", "tensorflow", "keras"))
"""Packages whose import creates hundreds of thousands of objects."""

SELDOM = (100_000, 10, 10)
"""Thresholds with which Python's garbage collector hardly runs while a package is imported."""


class LargeImports(MetaPathFinder):
    """Hides the objects of large packages, which live until the process ends, from the garbage collector.

    It would traverse all of them again and again: while they are created, in each full collection (during which the other ranks
    wait for this one), and when the process ends. Without that, importing PyTorch and exiting takes 1.3 s of a core instead of
    1.9, TensorFlow 2.7 s instead of 4.5. Nothing else about the packages and their imports changes.
    """

    @classmethod
    def install(cls) -> None:
        """For the rest of the process, which should belong to hvdtrain: garbage that exists at such an import stays."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that Python finds, with a loader that tunes the garbage collector during the import."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname in LARGE else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        loader.exec_module = partial(self._execute, loader)  # an attribute of this loader only, which loads nothing else
        return spec

    @staticmethod
    def _execute(loader: Any, module: ModuleType) -> None:
        del loader.exec_module
        usual = gc.get_threshold()
        gc.set_threshold(*SELDOM)
        try:
            loader.exec_module(module)
        finally:
            gc.set_threshold(*usual)
        users: list[Any] = [module for module in list(sys.modules.values()) if not _is_installed(module)]
        users.append(users)  # not frozen: at exit, Python clears these modules, so that their files are written and closed
        gc.freeze()


def _is_installed(module: ModuleType) -> bool:
    """Whether a module belongs to Python or to an installed package."""
    file = _file_of(module)
    return file is None or file.startswith((sys.prefix, sys.base_prefix))


def _file_of(module: ModuleType) -> str | None:
    """The file of a module. One that is imported on first use would be, if it were asked for an attribute, or even for its
    `__dict__`; and some modules replace the handlers of signals when they are imported."""
    try:
        file: str | None = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # no module, but somebody's object in sys.modules
        return None
    return file


def _read(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8")
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


@contextmanager
def separate_imports(configs: Iterable[Path]) -> Iterator[None]:
    """Forget at the end what these configs imported from their folders: those of another one may have the same names."""
    path, modules = list(sys.path), set(sys.modules)
    try:
        yield
    finally:
        folders = {str(config.resolve().parent) for config in configs} - set(path)
        sys.path[:] = path
        for name in set(sys.modules) - modules - {MODULE_NAME}:
            file = _file_of(sys.modules[name]) or ""
            if any(Path(file).is_relative_to(folder) for folder in folders) and not file.startswith(sys.prefix):
                del sys.modules[name]


def _run_python(
    path: Path, text: str, before: Mapping[str, Any], overrides: Mapping[str, Any], builtins: Builtins | None
) -> tuple[dict[str, Any], dict[str, Any], ast.Module]:
    """Run the file as a module, so that its classes and functions behave as in any other module.

    Args:
        before: the values of earlier files.

    Returns:
        The values of the file, the names that its functions see, and its parsed text.
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
        tree = ast.parse(text, str(path))
        exec(compile(tree, str(path), "exec", dont_inherit=True), names)  # not with the __future__ imports of this file
    except ConfigError:
        raise
    except SystemExit as error:
        raise ConfigError.of(
            "raised",
            f"{path.name}{_line_in(path, error)}: expected a config that goes on to its end, got sys.exit({error.code!r}) (an "
            "argument parser would read hvdtrain's own arguments: config.value('key', default) reads ++key)",
        ) from error
    except Exception as error:
        line = _line_in(path, error)
        what = import_failure(error, OUR_FILES) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        again = isinstance(error, FileExistsError)
        hint = " (each rank reads the config, at each start: os.makedirs(..., exist_ok=True))" if again else ""
        raise ConfigError.of("raised", f"{path.name}{line}: {what}{hint}") from error
    loaded = {
        name: value
        for name, value in names.items()
        if not name.startswith("__") and not (name == "config" and value is access) and visible.get(name, names) is not value
    }
    return loaded, names, tree


def _override(
    names: dict[str, Any], tree: ast.Module, overrides: Mapping[str, Any], known: Collection[str], keys: Collection[str]
) -> set[str]:
    """Let the functions of a module, which run later, see overrides in place of its constants, also of those that it imports,
    which are returned.

    Args:
        names: those of the module.
        known: modules that are not this config's: other code of the program may use them.
        keys: names that have an effect by themselves.

    Raises:
        ConfigError: an override that only such functions can read does not reach them.
    """
    constants, reached = _constants(tree), set[str]()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)] if overrides else []
    for name, value in overrides.items():
        if name in constants:
            names[name] = value
        for module in _imported_from(imports, name, names.get("__package__")):
            inner = vars(sys.modules.get(module, object))
            found = inner.get(name)
            if found is None or callable(found):
                continue
            file = Path(inner.get("__file__") or "")
            if module not in known and file.suffix == ".py":
                inside = ast.parse(file.read_text(encoding="utf-8"), str(file))
                _override(inner, inside, {name: value}, known, keys)
            if inner[name] is value or found == value:
                names[name] = value
                reached.add(name)
            elif name not in keys:
                raise ConfigError.of(
                    "wrong-type",
                    f"++{name}: expected a constant of the config, or of a module that it imports, got one that {module} "
                    f"computes, or that other code uses (config.value({name!r}, default) in the config reads the override)",
                )
    return reached


def _computed_before(source: Source, trees: Mapping[str, ast.Module], name: str) -> str | None:
    """The warning that a file had computed with its own constant before an override took its place, if it did.

    Args:
        trees: the files' parsed texts, by their names.

    Raises:
        ConfigError: nothing else reads the name, so the override would have no effect.
    """
    is_read = False
    before: list[str] = []
    for file, tree in trees.items():
        at_once, later = _lines_that_read(tree, name)
        is_read = is_read or later
        if at_once and any(
            isinstance(node, ast.Assign | ast.AnnAssign) and name in _constants(_module(node)) for node in tree.body
        ):
            before.append(f"{file}, line {', '.join(map(str, at_once))}")
        else:
            is_read = is_read or bool(at_once)
    if not before:
        return None
    where, hint = " and ".join(before), f"config.value({name!r}, default) reads the override"
    if is_read or source.asks_for(name) or name in source.imported:
        return f"++{name}: {where}: computed before, with the constant of the file ({hint})"
    raise ConfigError.of(
        "wrong-type",
        f"++{name}: expected a constant that functions of the config read, got one that the file itself computes with: {where} "
        f"({name} = {hint})",
    )


def _module(statement: ast.stmt) -> ast.Module:
    return ast.Module([statement], [])


def _lines_that_read(tree: ast.Module, name: str) -> tuple[list[int], bool]:
    """The lines of code that runs while the file is read and that reads a name, and whether functions read it, which run later.

    >>> _lines_that_read(ast.parse("b = 2 * a\ndef f(c=a): return d"), "a"), _lines_that_read(ast.parse("f = lambda: a"), "a")
    (([1, 2], False), ([], True))
    """
    lines, is_read_later = set[int](), False
    left: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_later in left:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            is_read_later = is_read_later or is_later
            lines |= set() if is_later else {node.lineno}
        bodies = getattr(node, "body", []) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else []
        later = bodies if isinstance(bodies, list) else [bodies]
        left += [(part, is_later or part in later) for part in ast.iter_child_nodes(node)]
    return sorted(lines), is_read_later


def _imported_from(imports: Iterable[ast.ImportFrom], name: str, package: str | None) -> Iterator[str]:
    """The modules from which a Python file with these imports imports a name.

    >>> list(_imported_from(ast.parse("from a import *; from b import c; from .d import c; from e import c as f").body, "c", "g"))
    ['a', 'b', 'g.d']
    """
    for node in imports:
        if any(alias.name in ("*", name) and not alias.asname for alias in node.names):
            yield importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)


def _constants(tree: ast.Module) -> set[str]:
    """The names to which a Python file assigns only constants; a computed value may depend on an override.

    >>> sorted(_constants(ast.parse("hidden = 64; files = ['a']; path = str(files); hidden_2 = config.int('hidden_2', 3)")))
    ['files', 'hidden']
    """
    constant: dict[str, bool] = {}
    statements: list[ast.AST] = list(tree.body)
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        statements += ast.iter_child_nodes(statement)  # such as those under an if
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            computed = any(isinstance(part, ast.Name | ast.Call) for part in ast.walk(statement.value))
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for part in (part for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)):
                constant[part.id] = constant.get(part.id, True) and not computed
    return {name for name, is_constant in constant.items() if is_constant}


def _line_in(path: Path, error: BaseException) -> str:
    """', line 12' of the config that raised the error or that it passed through; '' if no line of the config did."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def _set_nested(
    values: dict[str, Any], origins: dict[str, str], name: str, value: Any, parse: Callable[[Any, Any], Any], origin: str
) -> list[Problem]:
    """Set the entry `seq_ordering` in a copy of the dict `train`. Returns the problem, if any."""
    first, *path = name.split(".")
    start = "++" if origin == COMMAND_LINE else ""
    inside: Any = values.get(first)
    if not isinstance(inside, dict):
        got = "nothing" if first not in values else type(inside).__name__
        close = get_close_matches(first, [key for key, value in values.items() if isinstance(value, dict)], n=1)
        hint = f" (did you mean {start}{'.'.join([*close, *path])}?)" if close else ""
        return problem("wrong-type", f"{start}{name}: expected '{first}' to be a dict in the config, got {got}{hint}")
    values[first] = inside = dict(inside)
    for part in path[:-1]:
        if not isinstance(inside.get(part), dict):
            return problem(
                "wrong-type",
                f"{start}{name}: expected '{part}' to be a dict inside '{first}', got {type(inside.get(part)).__name__}",
            )
        inside[part] = dict(inside[part])
        inside = inside[part]
    inside[path[-1]] = parse(value, str if isinstance(inside.get(path[-1]), str) else Any)
    if origin not in origins[first]:
        origins[first] = f"{origins[first]} and {origin}"
    return []


class ConfigAccess:
    """The `config` that a config file sees: overrides from the command line, earlier files and the names set so far."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def has(self, name: str) -> builtins.bool:
        """Whether the name has a value."""
        return name in self._values

    def typed_value(self, name: str, default: Any = None) -> Any:
        """The value without conversion."""
        return self._values.get(name, default)

    opt_typed_value = typed_value

    @property
    def typed_dict(self) -> Mapping[str, Any]:
        return self._values

    def value(self, name: str, default: Any = None) -> Any:
        """The value as a string; a list is joined by commas."""
        found = self._values.get(name, default)
        if isinstance(found, (list, tuple)):
            return ",".join(str(member) for member in found)
        return found if found is None or found is default else str(found)

    def bool(self, name: str, default: Any = None) -> Any:
        """The value as a bool, from a bool, a number or one of true/yes/on/1, false/no/off/0."""
        found = self._values.get(name, default)
        if isinstance(found, str):
            if found.lower() not in ("true", "yes", "on", "1", "false", "no", "off", "0"):
                raise ValueError(f"{name}: expected true or false, got {found!r}")
            return found.lower() in ("true", "yes", "on", "1")
        return found if found is None else builtins.bool(found)

    def is_true(self, name: str) -> builtins.bool:
        """Like `bool`, but False if the name has no value."""
        return builtins.bool(self.bool(name))

    def int(self, name: str, default: Any = None) -> Any:
        found = self._values.get(name, default)
        return found if found is None else builtins.int(found)

    def float(self, name: str, default: Any = None) -> Any:
        found = self._values.get(name, default)
        return found if found is None else builtins.float(found)

    def list(self, name: str, default: Any = None) -> Any:
        """The value as a list; a string is split at commas."""
        found = self._values.get(name, default)
        if isinstance(found, str):
            return found.split(",")
        return found if found is None else builtins.list(found)


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
        raise ConfigError.of("wrong-type", f"{name}: expected a function or its name as 'module:name', got {value!r}")
    try:
        return resolve(value)
    except ImportError as error:
        raise ConfigError.of("cannot-import", f"{name}: expected a function that can be imported, got {error}") from error
