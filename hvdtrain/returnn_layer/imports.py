"""Who sees which `returnn`: the config that is read, and what it imports, ours; everybody else the installed one.

A config runs with an import function of its own, so that it finds our modules however late one of its functions imports them.
What it imports in turn, a recipe of the user's own say, looks into `sys.modules`: there our modules stand while the config
imports something, and while hvdtrain runs one of the config's steps. At all other times `returnn` is the installed RETURNN, or
nothing: what hvdtrain itself needs it for goes on working.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import importlib.util
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from hvdtrain.config.source import ConfigAccess
from hvdtrain.returnn_layer.missing import no_such_module, no_such_name, told
from hvdtrain.returnn_layer.stand_ins import NAMES, ROOT, stand_in


class Layer(Loader):
    """RETURNN as one config sees it. A finder and a loader of Python's import system."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._config = ConfigAccess({})
        self._set_aside: dict[str, ModuleType] = {}
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether the config, or something that it imported, asked for a module of RETURNN."""
        return bool(self._modules)

    def builtins(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The builtins that a config file with these `names` runs with."""
        self._config = ConfigAccess(names)
        return {**vars(builtins), "__import__": self._import}

    def is_read(self, values: Mapping[str, Any]) -> None:
        """Be told what is in effect: from now on `get_global_config()` says that, instead of what stands in the file."""
        self._config = ConfigAccess(values)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Have our modules in `sys.modules` inside the `with` block, in any number of threads at once."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._set_aside = _taken_out(_installed())
                sys.modules.update(self._modules)
                sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    sys.meta_path.remove(self)
                    self._modules.update(_taken_out(NAMES))
                    sys.modules.update(self._set_aside)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Python asks this where a module is. Raises: ModuleNotFoundError, for a module of RETURNN that we do not have."""
        if name.partition(".")[0] != ROOT:
            return None
        if name not in NAMES:
            raise no_such_module(name, list(NAMES))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return stand_in(spec.name, lambda: self._config)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run: the module is whole."""

    @classmethod
    def unless_installed(cls) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """The builtins for configs that are only asked for their datasets, which the installed RETURNN may have to read: these
        see RETURNN where it is installed, and ours where it is not.
        """
        return None if _is_installed() else cls().builtins

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """What the `import` statements of the config call."""
        if level == 0 and name in sys.modules and name.partition(".")[0] != ROOT:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self.in_place():
            try:
                module = builtins.__import__(name, globals, locals, fromlist, level)
            except ImportError as error:
                if error.name not in NAMES:
                    raise
                raise ImportError(told(error), name=error.name) from error
        lacking = [wanted for wanted in fromlist or () if name in NAMES and wanted != "*" and not hasattr(module, wanted)]
        if lacking:
            raise no_such_name(f"{name}.{lacking[0]}", name)
        return module


def _taken_out(names: Iterable[str]) -> dict[str, ModuleType]:
    """The modules of these names that were in `sys.modules`, and are no longer."""
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec(ROOT) is not None
    except ImportError:
        return False


def _installed() -> list[str]:
    """The names of RETURNN's own modules, where somebody imported them."""
    return [name for name in list(sys.modules) if name.partition(".")[0] == ROOT] if ROOT in sys.modules else []
