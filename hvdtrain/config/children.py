"""Lets the processes that a config starts by spawn or forkserver import the config, as those of a script import the script.

Python starts such a process with nothing but the module that is run, which is not the config. A worker of a pool that cannot
import the pool's function ends, and the pool starts another one, for ever.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing import process
from types import ModuleType
from typing import Any, NoReturn

from hvdtrain.errors import ConfigError


def let_children_import(name: str, read: Callable[..., object], *arguments: Any) -> None:
    """From now on, let the processes that this one starts import a module of this name, which `read(*arguments)` creates."""
    # Python hands this dict on to each process that is started, which unpickles it before what it is to run.
    process.current_process()._config[name] = _Hint(name, os.getcwd(), lambda: _packed(read, arguments))  # type: ignore[attr-defined]


def is_reading_for_child() -> bool:
    """Whether this is such a process, which reads the config to import it."""
    return hasattr(process.current_process(), "_inheriting")


def _packed(read: Callable[..., object], arguments: Sequence[Any]) -> bytes:
    try:
        return pickle.dumps((read, arguments))
    except Exception as error:  # such as an override that is a program's own object
        return pickle.dumps((_fail, (f"a started process cannot read the config again: {type(error).__name__}: {error}",)))


class _Hint:
    """Becomes a finder of the module where it is unpickled. What that needs may be large, so it is pickled for processes only."""

    def __init__(self, name: str, folder: str, packed: Callable[[], bytes]) -> None:
        self._name = name
        self._folder = folder
        self._packed = packed

    def __reduce__(self) -> tuple[Any, ...]:
        return _install, (self._name, self._folder, self._packed())


def _install(name: str, folder: str, packed: bytes) -> _Hint:
    sys.meta_path.append(_Finder(name, folder, packed))
    return _Hint(name, folder, lambda: packed)  # for the processes that this one starts


class _Finder(MetaPathFinder, Loader):
    """Reads the config when its module is imported.

    Args:
        folder: the working folder in which the config was read.
        packed: the function that reads it, and its arguments.
    """

    def __init__(self, name: str, folder: str, packed: bytes) -> None:
        self._name = name
        self._folder = folder
        self._packed = packed

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name == self._name else None

    def exec_module(self, module: ModuleType) -> None:
        """Read the config up to its first process. What follows was not there either when it started that."""
        state = vars(process.current_process())
        before = state.copy()
        state["_inheriting"] = True  # with it, Python refuses to start processes
        try:
            os.chdir(self._folder)
            read, arguments = pickle.loads(self._packed)
            read(*arguments)
        except Exception as error:
            why = str(error.problems[0]) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
            why = why.strip().partition("\n")[0].rstrip(": ")
            sys.modules[self._name].__dict__["__getattr__"] = lambda name: _missing(name, why)
        finally:
            del state["_inheriting"]
            state.update(before)


def _missing(name: str, why: str) -> type:
    """Stands for a function or a class that is missing. It can be unpickled; a call of it fails."""
    if name.startswith("__"):
        raise AttributeError(name)

    def call(*_: Any, **__: Any) -> NoReturn:
        raise ConfigError.of(
            "raised",
            f"{name}: expected a function that a process by spawn or forkserver can import, got a config that the process could "
            f"read up to here only: {why} (define it above the first process that the config starts, or in a module of its own)",
        )

    missing: type = type("Missing", (type,), {"__call__": call})(name, (), {"__new__": lambda cls, *_, **__: object.__new__(cls)})
    return missing


def _fail(why: str) -> NoReturn:
    raise RuntimeError(why)
