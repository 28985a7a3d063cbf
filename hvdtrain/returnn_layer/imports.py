"""What a config finds when it imports `returnn`: the installed RETURNN, or stand-ins for some of its modules.

`Installed`: imports are Python's own; RETURNN is told about the config when the config first imports it.

`Layer`: the modules in `NAMES` are visible to a config and its imports, and the installed RETURNN to everything else. A config
runs with its own import function, so that it finds the layer's modules even if one of its functions imports them late. Modules
that the config imports, such as a user's recipe, look in `sys.modules`. The layer's modules are there while the config imports
something and while hvdtrain runs one of the config's functions. At all other times, `returnn` is the installed RETURNN (or
missing), which hvdtrain itself can use. The errors about names that it does not have are at the end.
"""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import importlib.util
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from pathlib import Path
from types import ModuleType
from typing import Any

from hvdtrain.config.source import ConfigAccess
from hvdtrain.returnn_layer.basic import Stream

ROOT = "returnn"

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


_VOCABULARIES = ("Vocabulary", "BytePairEncoding", "CharacterTargets", "Utf8ByteTargets")

_TENSOR = ("Tensor", "Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")

NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "returnn": {},
    "returnn.frontend": {"frontend": ()},
    "returnn.frontend.run_ctx": {"frontend": ("RunCtx", "get_run_ctx")},
    "returnn.tensor": {"tensors": _TENSOR, "templates": ("TensorDict",)},
    "returnn.tensor.tensor": {"tensors": ("Tensor",)},
    "returnn.tensor.tensor_dict": {"templates": ("TensorDict",)},
    "returnn.tensor.dim": {"tensors": ("Dim", "FeatureDim", "SpatialDim", "batch_dim", "single_step_dim")},
    "returnn.torch": {},
    "returnn.torch.context": {"frontend": ("RunCtx", "get_run_ctx")},
    "returnn.torch.engine": {"frontend": ("TrainCtx",), "basic": ("ForwardCallbackIface",)},
    "returnn.util": {},
    "returnn.util.basic": {"basic": ()},
    "returnn.util.file_cache": {"basic": ("CachedFile",)},
    "returnn.forward_iface": {"basic": ("ForwardCallbackIface",)},
    "returnn.log": {"basic": ("log",)},
    "returnn.config": {},
    "returnn.datasets": {},
    "returnn.datasets.hdf": {"datasets": ("SimpleHDFWriter",)},
    "returnn.datasets.generating": {"datasets": _VOCABULARIES},
    "returnn.datasets.util": {},
    "returnn.datasets.util.hdf": {"datasets": ("SimpleHDFWriter",)},
    "returnn.datasets.util.vocabulary": {"datasets": _VOCABULARIES},
}
"""By module of RETURNN: its names, by the file in this folder that defines them; () stands for the file's `__all__`.

Today's RETURNN does not have `returnn.torch.context` and `TrainCtx` any more, and never had `returnn.datasets.util.hdf`, but
recipes import them.
"""


class StandIn(ModuleType):
    """A module with the name of one of RETURNN's and hvdtrain's implementations."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        inside = [other.rpartition(".")[2] for other in NAMES if other.rpartition(".")[0] == self.__name__]
        raise not_in_layer(f"{self.__name__}.{name}", [*vars(self), *inside])


def stand_in(name: str, config: Callable[[], ConfigAccess]) -> StandIn:
    """Create the module.

    Args:
        name: a key of `NAMES`.
        config: returns the result of `returnn.config.get_global_config()`.
    """
    module = StandIn(name, f"The part of {name} that hvdtrain provides.")
    for file, wanted in NAMES[name].items():
        ours = importlib.import_module(f"hvdtrain.returnn_layer.{file}")
        for attribute in wanted or ours.__all__:
            setattr(module, attribute, getattr(ours, attribute))
    if name == "returnn.config":
        names: Mapping[str, Any] = {"Config": ConfigAccess, "get_global_config": lambda **_: config()}
        vars(module).update(names)
    module.__path__ = []  # marks it as a package, which can have submodules
    return module


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


OUR_FILES = (str(Path(__file__).parent), "<")
"""How file names in tracebacks begin for this folder and for code built into Python."""

SUPPORTED = (
    "without RETURNN, hvdtrain runs its configs for plain PyTorch, whose get_model returns a torch.nn.Module and which use the "
    "run context (get_run_ctx: mark_as_loss, mark_as_output), TensorDict, Tensor and Dim. For RETURNN's layers and functions: "
    "pip install returnn dm-tree rapidfuzz soundfile; docs/returnn.md lists the supported names"
)


class NotInLayer(AttributeError):
    """A name of RETURNN that hvdtrain does not provide. An AttributeError, so that `hasattr` works."""


def not_in_layer(what: str, known: Iterable[str]) -> NotInLayer:
    """The error about an attribute that is none of the `known` ones."""
    names = ", ".join(sorted({name for name in known if not name.startswith("_")}))
    return NotInLayer(f"{what}: expected one of {names or 'no names'}, got a name that hvdtrain does not have ({SUPPORTED})")


def explanation(error: Exception) -> str:
    """An error's message together with what is supported, which Python's own import errors do not say."""
    return str(error) if SUPPORTED in str(error) else f"{error}: expected a name that hvdtrain has ({SUPPORTED})"


def location(error: Exception) -> str:
    """The file and line of the user's code that an error comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OUR_FILES)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "an unknown place"


def no_such_name(what: str, module: str) -> ImportError:
    """The error about a missing name in a module that hvdtrain provides."""
    return ImportError(f"{what}: expected a name that hvdtrain has, got another ({SUPPORTED})", name=module)


def no_such_module(name: str, known: Iterable[str]) -> ModuleNotFoundError:
    """The error about a module that hvdtrain does not provide."""
    return ModuleNotFoundError(f"{name}: expected one of {', '.join(known)}, got another ({SUPPORTED})", name=name)
