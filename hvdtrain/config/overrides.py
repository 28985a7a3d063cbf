"""Overrides of what a config says."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

from hvdtrain.config.references import is_reference
from hvdtrain.errors import ConfigError, Problem, problem

COMMAND_LINE = "the command line"
CALL = "the call"
OVERRIDING = (COMMAND_LINE, CALL)
"""Origins of overrides: text from the command line, Python objects from a program that calls hvdtrain."""


CHANGED = set[str]()
"""Modules whose constants overrides have changed, until they are forgotten (`plugins/programs/restored.py`)."""

REPLACED = list[tuple[dict[str, Any], str, Any]]()
"""Constants of modules that the program itself has imported: the module's names, that of the constant and its value, which
`plugins/programs/restored.py` puts back."""


@dataclass(frozen=True)
class Code:
    """What the text of a Python file says.

    Attributes:
        constants: the names to which it assigns only constants.
        imports: from which modules it imports names.
    """

    tree: ast.Module
    constants: Collection[str]
    imports: Sequence[ast.ImportFrom]

    @classmethod
    @cache
    def parse(cls, text: str, path: str) -> Code:
        """Raises: SyntaxError."""
        tree = ast.parse(text, path)
        return cls(tree, constants_of(tree), [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)])


def override(
    names: dict[str, Any], code: Code, overrides: Mapping[str, Any], modules_before: Collection[str], keys: Collection[str]
) -> set[str]:
    """Let the functions of a module, which run later, see overrides in place of its constants, also of those that it imports,
    which are returned.

    Args:
        names: those of the module.
        modules_before: those that the program has imported before this config: they get their constants back.
        keys: names that have an effect by themselves.

    Raises:
        ConfigError: an override that only such functions can read does not reach them.
    """
    reached = set[str]()
    for name, value in overrides.items():
        if name in code.constants:
            names[name] = value
        for module in _imported_from(code.imports, name, names.get("__package__")):
            inner = vars(sys.modules.get(module, object))
            constant = inner.get(name)
            if constant is None or callable(constant):
                continue
            file = Path(inner.get("__file__") or "")
            if file.suffix == ".py" and (module not in modules_before or _is_of_program(file)):
                if module in modules_before:
                    REPLACED.append((inner, name, constant))
                else:
                    CHANGED.add(module)
                inside = Code.parse(file.read_text(encoding="utf-8"), str(file))
                override(inner, inside, {name: value}, modules_before, keys)
            if inner[name] is value or constant == value:
                names[name] = value
                reached.add(name)
            elif name not in keys:
                raise ConfigError.of(
                    "wrong-type",
                    f"++{name}: expected a constant of the config, or of a module that it imports, got one that {module} "
                    f"computes, or of an installed package (config.value({name!r}, default) in the config reads the override)",
                )
    return reached


def _is_of_program(file: Path) -> bool:
    """Whether a file is the program's own, not an installed package's."""
    return not any(file.is_relative_to(folder) for folder in (sys.prefix, sys.base_prefix, Path(__file__).parent.parent))


def _imported_from(imports: Iterable[ast.ImportFrom], name: str, package: str | None) -> Iterator[str]:
    """The modules from which a Python file with these imports imports a name.

    >>> list(_imported_from(ast.parse("from a import *; from b import c; from .d import c; from e import c as f").body, "c", "g"))
    ['a', 'b', 'g.d']
    """
    for node in imports:
        if any(alias.name in ("*", name) and not alias.asname for alias in node.names):
            yield importlib.util.resolve_name("." * node.level + (node.module or ""), package or None)


def lines_that_read(tree: ast.Module, name: str) -> tuple[list[int], bool]:
    """The lines of code that runs while the file is read and that reads a name, and whether functions read it, which run later.

    >>> lines_that_read(ast.parse("b = 2 * a\\ndef f(c=a): return d"), "a"), lines_that_read(ast.parse("f = lambda: a"), "a")
    (([1, 2], False), ([], True))
    """
    lines = set[int]()
    is_read_later = False
    unvisited: list[tuple[ast.AST, bool]] = [(tree, False)]
    for node, is_later in unvisited:
        if isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            is_read_later = is_read_later or is_later
            lines |= set() if is_later else {node.lineno}
        bodies = getattr(node, "body", []) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) else []
        later = bodies if isinstance(bodies, list) else [bodies]
        unvisited += [(child, is_later or child in later) for child in ast.iter_child_nodes(node)]
    return sorted(lines), is_read_later


def constants_of(tree: ast.Module) -> set[str]:
    """The names to which a Python file assigns only constants; a computed value may depend on an override.

    >>> sorted(constants_of(ast.parse("hidden = 64; files = ['a']; path = str(files); hidden_2 = config.int('hidden_2', 3)")))
    ['files', 'hidden']
    """
    constant: dict[str, bool] = {}
    statements: list[ast.AST] = list(tree.body)
    for statement in statements:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            continue
        statements += ast.iter_child_nodes(statement)  # such as those under an if
        if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and statement.value is not None:
            computed = any(isinstance(node, ast.Name | ast.Call) for node in ast.walk(statement.value))
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for node in (node for target in targets for node in ast.walk(target) if isinstance(node, ast.Name)):
                constant[node.id] = constant.get(node.id, True) and not computed
    return {name for name, is_constant in constant.items() if is_constant}


def line_in(path: Path, error: BaseException) -> str:
    """', line 12' of the config that raised the error or that it passed through; '' if no line of the config did."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f", line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f", line {lines[-1]}" if lines else ""


def set_nested(
    values: dict[str, Any], origins: dict[str, str], name: str, value: Any, parse: Callable[[Any, Any], Any], origin: str
) -> list[Problem]:
    """Set the entry `seq_ordering` in a copy of the dict `train`. Returns the problem, if any."""
    first, *path = name.split(".")
    start = "++" if origin == COMMAND_LINE else ""
    inside: Any = values.get(first)
    if not isinstance(inside, dict):
        got = "nothing" if first not in values else type(inside).__name__
        close = get_close_matches(first, [key for key, value in values.items() if isinstance(value, dict)], n=1)
        hint = f" (in the config, write {first} = {{{_entry_text(inside)}'{path[0]}': ...}})"
        hint = f" (did you mean {start}{'.'.join([*close, *path])}?)" if close else hint
        return problem("wrong-type", f"{start}{name}: expected '{first}' to be a dict in the config, got {got}{hint}")
    values[first] = inside = dict(inside)
    for entry in path[:-1]:
        if not isinstance(inside.get(entry), dict):
            return problem(
                "wrong-type",
                f"{start}{name}: expected '{entry}' to be a dict inside '{first}', got {type(inside.get(entry)).__name__}",
            )
        inside[entry] = dict(inside[entry])
        inside = inside[entry]
    inside[path[-1]] = parse(value, str if isinstance(inside.get(path[-1]), str) else Any)
    if origin not in origins[first]:
        origins[first] = f"{origins[first]} and {origin}"
    return []


def _entry_text(value: Any) -> str:
    """What a value is in the dict that may be in its place.

    >>> _entry_text("adam"), _entry_text("my_corpus:Words"), _entry_text("a.hdf,b.hdf"), _entry_text(["a.hdf"]), _entry_text(None)
    ("'class': 'adam', ", "'class': 'my_corpus:Words', ", "'files': 'a.hdf,b.hdf', ", "'files': ..., ", '')
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return f"'{'class' if value.isidentifier() or is_reference(value) else 'files'}': {value!r}, "
    return f"'{'files' if isinstance(value, (list, tuple, PathLike)) else 'class'}': ..., "
