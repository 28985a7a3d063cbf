"""Makes the layer's `returnn` modules visible to a config and its imports, and the installed RETURNN to everything else.

A config runs with its own import function, so that it finds the layer's modules even if one of its functions imports them late.
Modules that the config imports, such as a user's recipe, look in `sys.modules`. The layer's modules are there while the config
imports something and while hvdtrain runs one of the config's functions. At all other times, `returnn` is the installed RETURNN
(or missing), which hvdtrain itself can use.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from hvdtrain.config.source import ConfigAccess
from hvdtrain.returnn_layer.installed import is_installed
from hvdtrain.returnn_layer.missing import explanation, no_such_module, no_such_name
from hvdtrain.returnn_layer.stand_ins import NAMES, ROOT, stand_in


class Layer(Loader):
    """RETURNN as one config sees it: a finder and loader of Python's import system."""

    def __init__(self) -> None:
        self._modules: dict[str, ModuleType] = {}
        self._config = ConfigAccess({})
        self._set_aside: dict[str, ModuleType] = {}
        self._inside = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> bool:
        """Whether the config, or a module that it imported, has imported `returnn`."""
        return bool(self._modules)

    def builtins(self, names: Mapping[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""
        self._config = ConfigAccess(names)
        return {**vars(builtins), "__import__": self._import}

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Set the values that `get_global_config()` returns from now on, instead of those in the file."""
        self._config = ConfigAccess(values)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Have the layer's modules in `sys.modules` inside the `with` block. Several threads can be inside at the same time."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._set_aside = _remove_modules(_installed())
                sys.modules.update(self._modules)
                sys.meta_path.insert(0, self)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    sys.meta_path.remove(self)
                    self._modules.update(_remove_modules(NAMES))
                    sys.modules.update(self._set_aside)

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find a module of `returnn` for Python's import system. Raises: ModuleNotFoundError, if the layer does not have it."""
        if name.partition(".")[0] != ROOT:
            return None
        if name not in NAMES:
            raise no_such_module(name, list(NAMES))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return stand_in(spec.name, lambda: self._config)

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` returns the complete module."""

    @classmethod
    def unless_installed(cls) -> Callable[[Mapping[str, Any]], dict[str, Any]] | None:
        """The builtins for a config of which only the datasets are used, which may need the installed RETURNN: such a config sees
        RETURNN if it is installed, and the layer otherwise.
        """
        return None if is_installed() else cls().builtins

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Called by the config's `import` statements."""
        if level == 0 and name in sys.modules and name.partition(".")[0] != ROOT:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self.active():
            try:
                module = builtins.__import__(name, globals, locals, fromlist, level)
            except ImportError as error:
                if error.name not in NAMES:
                    raise
                raise ImportError(explanation(error), name=error.name) from error
        missing = [wanted for wanted in fromlist or () if name in NAMES and wanted != "*" and not hasattr(module, wanted)]
        if missing:
            raise no_such_name(f"{name}.{missing[0]}", name)
        return module


def _remove_modules(names: Iterable[str]) -> dict[str, ModuleType]:
    """Remove the modules with these names from `sys.modules` and return them."""
    return {name: sys.modules.pop(name) for name in names if name in sys.modules}


def _installed() -> list[str]:
    """The names of the installed RETURNN's modules that are imported."""
    return [name for name in list(sys.modules) if name.partition(".")[0] == ROOT] if ROOT in sys.modules else []
