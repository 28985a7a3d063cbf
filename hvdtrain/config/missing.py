"""The message about a failed import of a config: which module, imported by which file, and where Python looked."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from hvdtrain.errors import DataError

MACHINERY = ("<frozen importlib", "<")
"""How the file names of Python's import system begin in tracebacks."""

MOST = 12
"""The most folders that a message lists."""


class MissingPackage(ModuleNotFoundError):
    """A package that is not installed. The message says how to install it."""


def import_package(name: str, where: str) -> Any:
    """A package that reads data. Raises: DataError, which says for what it is needed, and how it is installed."""
    try:
        return import_module(name)
    except ImportError:
        raise DataError(f"{where}: expected the package {name}, got none (pip install {name})") from None


def import_failure(error: ImportError, skipped: Iterable[str] = ()) -> str:
    """What failed, the file and line of the import, and the folders that were searched.

    Args:
        skipped: how the names of files begin that are not the user's code.
    """
    is_explained = isinstance(error, MissingPackage)
    text = str(error) if is_explained else f"{type(error).__name__}: {error}"
    importer = _importer(error, (*MACHINERY, *skipped))
    if importer:
        text += f", imported by {importer}"
    if (hiding := _hiding_file(error)) is not None:
        return f"{text} ({hiding} hides the package of that name: rename the file)"
    if error.path is not None:
        return f"{text} (that module is {error.path}: another version of it may be needed)"
    if not isinstance(error, ModuleNotFoundError) or not error.name or is_explained:
        return text
    parent = error.name.rpartition(".")[0]
    package = sys.modules.get(parent) if parent else None
    folders = list(getattr(package, "__path__", None) or sys.path) if package is not None else sys.path
    whose = f"the package {parent}" if package is not None else "sys.path"
    install = "pip install its package, or " if package is None else ""
    advice = f"{install}add its folder to PYTHONPATH or, in the config, to sys.path"
    return f"{text}; looked in {whose}: {_folder_list(folders)} ({advice})"


def _importer(error: ImportError, skipped: tuple[str, ...]) -> str:
    """'file.py, line 3' of the statement that failed; '' if it is not known."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(skipped)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _folder_list(folders: Iterable[str]) -> str:
    """The folders as text; those that do not exist are marked."""
    absolute = list(dict.fromkeys(str(Path(folder).absolute()) for folder in folders))
    shown = [folder if Path(folder).exists() else f"{folder} (does not exist)" for folder in absolute[:MOST]]
    more = f" and {len(absolute) - MOST} more" if len(absolute) > MOST else ""
    return ", ".join(shown) + more


def _hiding_file(error: ImportError) -> str | None:
    """The file that was imported in place of an installed package, as both have the same name."""
    name = (error.name or "").partition(".")[0]
    spec = PathFinder.find_spec(name) if name else None
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None or name in sys.stdlib_module_names:
        return None
    return spec.origin if installed(name, Path(spec.origin).parent) else None


def installed(name: str, beside: Path) -> bool:
    """Whether there is an installed package or module of this name outside of a folder; configs in other folders are none."""
    folders = [folder for folder in sys.path if folder.startswith((sys.prefix, sys.base_prefix)) or "site-packages" in folder]
    spec = PathFinder.find_spec(name, [folder for folder in folders if Path(folder).resolve() != beside.resolve()])
    return name in sys.builtin_module_names or (spec is not None and spec.origin is not None)
