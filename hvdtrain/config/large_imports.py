"""Large packages: the garbage collector passes over their objects, and PyTorch's compiler is imported only where it is used."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

COMPILER = "torch._dynamo"

LARGE = frozenset(("torch", COMPILER, "tensorflow", "keras"))
"""Packages whose import creates hundreds of thousands of objects."""

SELDOM = (100_000, 10, 10)
"""Thresholds with which Python's garbage collector hardly runs while a package is imported."""


class LargeImports(MetaPathFinder):
    """Hides the objects of large packages, which live until the process ends, from the garbage collector.

    It would traverse all of them again and again: while they are created, in each full collection (during which the other ranks
    wait for this one), and when the process ends. Without that, importing PyTorch and exiting takes 1.3 s of a core instead of
    1.9, TensorFlow 2.7 s instead of 4.5. PyTorch's compiler is a `DeferredCompiler`. Nothing else about the packages changes.
    """

    @classmethod
    def install(cls) -> None:
        """For the rest of the process, which should belong to hvdtrain: garbage that exists at such an import stays."""
        if not any(isinstance(finder, cls) for finder in sys.meta_path):
            sys.meta_path.insert(0, cls())

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The spec that Python finds, with a loader that tunes the garbage collector during the import."""
        if fullname == COMPILER and not DeferredCompiler.is_used:
            return ModuleSpec(fullname, DeferredLoader())
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


class DeferredCompiler(ModuleType):
    """Stands for the package of PyTorch's compiler until something of it is used.

    Each of PyTorch's optimizers imports it, when it is made and in every step, only to say what is not to be compiled: without
    a compiler that is nothing, and costs a second of a core. Asked for anything else, this is replaced by the package.
    """

    is_used = False
    _excepted: list[Any] = []
    """PyTorch's own functions that are not to be compiled, as it has said so far."""

    def graph_break(self, msg: str = "") -> None:
        """As PyTorch's: nothing, outside of code that is being compiled."""

    def disable(self, fn: Callable[..., Any] | None = None, *args: Any, **options: Any) -> Any:
        """As PyTorch's: for its own functions the function itself, for others what the package says."""
        if DeferredCompiler.is_used or not str(getattr(fn, "__module__", "")).startswith("torch."):
            return self._package().disable(fn, *args, **options)
        self._excepted.append(fn)
        return fn

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # what debuggers ask all modules for; a module inside asks for the path
            raise AttributeError(name)
        return getattr(self._package(), name)

    def _package(self) -> ModuleType:
        DeferredCompiler.is_used = True
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
            vars(sys.modules["torch"]).pop("_dynamo", None)  # by which the package would find this while it is imported
        while self._excepted:
            vars(self._excepted.pop()).pop("__dynamo_disable", None)  # where torch/_compile.py keeps what it was given
        return importlib.import_module(COMPILER)


class DeferredLoader(Loader):
    """Loads the `DeferredCompiler`."""

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run. Python has asked the module for its path by now, which would have imported the package."""
        module.__class__ = DeferredCompiler


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
