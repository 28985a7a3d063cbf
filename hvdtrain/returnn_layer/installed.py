"""The installed RETURNN as the `returnn` of a config: found, and told about the config, when the config first imports it."""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from hvdtrain.returnn_layer.basic import Stream
from hvdtrain.returnn_layer.stand_ins import ROOT

MOVED = {"returnn.torch.context": "returnn.frontend", "returnn.datasets.util.hdf": "returnn.datasets.hdf"}
"""Modules that recipes import and that today's RETURNN does not have, by the module that has their names. One that the installed
RETURNN has is its own."""

RENAMED = {"returnn.torch.engine": {"TrainCtx": "returnn.frontend.run_ctx:RunCtx"}}
"""Names that modules of today's RETURNN do not have any more, by module; each with where it is."""


def is_installed() -> bool:
    """Whether there is a package `returnn`."""
    try:
        return importlib.util.find_spec(ROOT) is not None
    except ImportError:
        return False


class Installed:
    """The installed RETURNN as one config sees it. Imports are Python's own; they are only watched.

    Attributes:
        in_use: whether the config, or a module that it imported, has imported `returnn`.
    """

    def __init__(self) -> None:
        self.in_use = False
        self._config: Any = None
        self._names: dict[str, Any] = {}

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""
        self._names = names
        if self._config is not None:  # a second file
            self._config.typed_dict = names
        return {**vars(builtins), "__import__": self._import}

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Set the values that RETURNN's `get_global_config()` has from now on, instead of those in the file."""
        self._config.typed_dict = dict(values)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        """Called by the config's `import` statements."""
        if name.partition(".")[0] == ROOT and level == 0:
            self._begin()
        elif name in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self._watching():
            module = builtins.__import__(name, globals, locals, fromlist, level)
            for attribute in fromlist or ():
                place = RENAMED.get(name, {}).get(attribute)
                if place is not None and not hasattr(module, attribute):
                    there, _, own = place.partition(":")
                    setattr(module, attribute, getattr(importlib.import_module(there), own))
        return module

    @contextmanager
    def _watching(self) -> Iterator[None]:
        """Notice imports of `returnn` by the modules that are imported inside of the `with` block."""
        original = builtins.__import__

        def watched(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            if level == 0 and name.partition(".")[0] == ROOT:
                self._begin()
            return original(name, globals, locals, fromlist, level)

        builtins.__import__ = watched
        try:
            yield
        finally:
            builtins.__import__ = original

    def _begin(self) -> None:
        """The config's first import: RETURNN gets the config's names, as far as the file has set them, and hvdtrain's log."""
        if self.in_use:
            return
        self.in_use = True
        if not any(isinstance(one, Moved) for one in sys.meta_path):
            sys.meta_path.append(Moved())
        config, log = (importlib.import_module(f"returnn.{name}") for name in ("config", "log"))
        self._config = config.Config()
        self._config.typed_dict = self._names
        config.set_global_config(self._config)
        streams = {level: Stream(level) for level in range(1, 6)}
        vars(log.log).update({f"v{level}": stream for level, stream in streams.items()})
        log.log.verbose = [False] * 6  # whether RETURNN may draw progress bars and the like
        log.log.initialized = True


class Moved(Loader):
    """A finder and loader of Python's import system for the modules in `MOVED`; it is asked last."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, f"The names of {MOVED[spec.name]}.")
        there = vars(importlib.import_module(MOVED[spec.name]))
        vars(module).update({name: value for name, value in there.items() if not name.startswith("__")})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Does nothing: `create_module` returns the complete module."""


def select_torch(behavior_version: int | None) -> None:
    """Let RETURNN's functions compute with PyTorch, and as that version of their behaviour asks for (None: not set)."""
    from returnn.frontend import select_backend_torch
    from returnn.util.basic import BackendEngine, BehaviorVersion

    if BehaviorVersion.get_if_set() != behavior_version:
        BehaviorVersion._reset()  # of another config in this process
    select_backend_torch()
    BackendEngine.selected_engine = BackendEngine.Torch
    if behavior_version is not None:
        BehaviorVersion.set(behavior_version)
