"""Packages with many objects, hidden from the garbage collector."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

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
    file = file_of(module)
    return file is None or file.startswith((sys.prefix, sys.base_prefix))


def file_of(module: ModuleType) -> str | None:
    """The file of a module. One that is imported on first use would be, if it were asked for an attribute, or even for its
    `__dict__`; and some modules replace the handlers of signals when they are imported."""
    try:
        file: str | None = object.__getattribute__(module, "__dict__").get("__file__")
    except AttributeError:  # no module, but somebody's object in sys.modules
        return None
    return file
