"""Watches a config's imports: if it imports the package `returnn`, that gets the config and hvdtrain's log."""

from __future__ import annotations

import builtins
import importlib
import importlib.machinery
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from types import ModuleType
from typing import Any

from hvdtrain.config.missing import MissingPackage
from hvdtrain.runtime import log as program_log

ROOT = "returnn"

MOVED = {"returnn.torch.context": "returnn.frontend", "returnn.datasets.util.hdf": "returnn.datasets.hdf"}
"""Modules that recipes import but today's RETURNN no longer has, each with the module that now has its names. If the installed
RETURNN has such a module, that one is imported."""

RENAMED = {"returnn.torch.engine": {"TrainCtx": "returnn.frontend.run_ctx:RunCtx"}}
"""Names that modules of today's RETURNN no longer have, by module, each with its new place."""


OLD = frozenset(
    """
    BundleFile CachedDataset CachedDataset2 Config Dataset Debug DebugHelpers EngineBase EngineBatch Fsa GeneratingDataset
    HDFDataset HyperParamTuning LearningRateControl LmDataset Log MetaDataset NativeOp NormalizationData NumpyDumpDataset
    Pretrain RawWavDataset SprintCache SprintControl SprintDataset SprintErrorSignals SprintExternInterface SprintInterface
    StereoDataset TFCompat TFDataPipeline TFDistributed TFEngine TFHorovod TFKenLM TFNativeOp TFNetwork TFNetworkLayer
    TFNetworkRecLayer TFNetworkSegModLayer TFNetworkSigProcLayer TFSprint TFUpdater TFUtil TaskSystem Util
    """.split()
)
"""Modules of RETURNN from before it was a package. Its own loader provides them, once `returnn` has been imported."""


class WatchedImports:
    """Watches the imports of one config, which are otherwise those of Python.

    Attributes:
        has_returnn: whether the config, or a module that it imported, has imported `returnn`.
    """

    def __init__(self) -> None:
        self.has_returnn = False
        self._config: Any = None
        self._names: dict[str, Any] = {}

    def builtins(self, names: dict[str, Any]) -> dict[str, Any]:
        """The builtins for a config file with the namespace `names`."""
        self._names = names
        if self._config is not None:  # a second file
            self._config.typed_dict = names
        return {**vars(builtins), "__import__": self._import}

    def set_config(self, values: Mapping[str, Any]) -> None:
        """Set the values that RETURNN's `get_global_config()` returns from now on, instead of those in the file."""
        self._config.typed_dict = dict(values)

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] = (),
        level: int = 0,
    ) -> ModuleType:
        root = name.partition(".")[0]
        is_old = root in OLD and root not in sys.modules and importlib.machinery.PathFinder.find_spec(root) is None
        if level == 0 and (root == ROOT or is_old):
            self.begin()
        elif name in sys.modules:
            return builtins.__import__(name, globals, locals, fromlist, level)
        with self._watch_imports():
            module = builtins.__import__(name, globals, locals, fromlist, level)
            for old in fromlist or ():
                place = RENAMED.get(name, {}).get(old)
                if place is not None and not hasattr(module, old):
                    module_name, _, new = place.partition(":")
                    setattr(module, old, getattr(importlib.import_module(module_name), new))
        return module

    @contextmanager
    def _watch_imports(self) -> Iterator[None]:
        """Also watch the imports of modules that are imported inside the `with` block."""
        original = builtins.__import__

        def watching_import(
            name: str,
            globals: Mapping[str, Any] | None = None,
            locals: Mapping[str, Any] | None = None,
            fromlist: Sequence[str] | None = (),
            level: int = 0,
        ) -> ModuleType:
            if level == 0 and name.partition(".")[0] == ROOT:
                self.begin()
            return original(name, globals, locals, fromlist, level)

        builtins.__import__ = watching_import
        try:
            yield
        finally:
            builtins.__import__ = original

    def begin(self) -> None:
        """Pass the config's names, as far as the file has set them, and hvdtrain's log to RETURNN, at its first import.

        Raises:
            MissingPackage: RETURNN is not installed.
        """
        if self.has_returnn:
            return
        self.has_returnn = True  # set first, since RETURNN's imports of itself are watched, too
        try:
            importlib.import_module(ROOT)
        except ModuleNotFoundError as error:
            self.has_returnn = False
            if error.name != ROOT:
                raise
            from hvdtrain.plugins.returnn.reading import INSTALL  # here, as it imports numpy

            raise MissingPackage(f"expected the package returnn, got none {INSTALL}", name=ROOT) from None
        if not any(isinstance(finder, MovedModules) for finder in sys.meta_path):
            sys.meta_path.append(MovedModules())
        config, log = (importlib.import_module(f"returnn.{name}") for name in ("config", "log"))
        self._config = config.Config()
        self._config.typed_dict = self._names
        config.set_global_config(self._config)
        streams = {level: Stream(level) for level in range(1, 6)}
        vars(log.log).update({f"v{level}": stream for level, stream in streams.items()})
        log.log.verbose = [False] * 6  # whether RETURNN may draw progress bars and the like
        log.log.initialized = True


class Stream:
    """A text stream that writes its lines to hvdtrain's log, at a level of `log_verbosity`."""

    def __init__(self, level: int) -> None:
        self._level = level
        self._unfinished = ""

    def write(self, text: str) -> int:
        *lines, self._unfinished = (self._unfinished + text).split("\n")
        for line in lines:
            program_log.write(self._level, line)
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are logged immediately, and an unfinished line waits for its end."""


class MovedModules(Loader):
    """A finder and loader of Python's import system for the modules in `MOVED`; it is the last in the list of finders."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in MOVED else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name, f"The names of {MOVED[spec.name]}.")
        names = vars(importlib.import_module(MOVED[spec.name]))
        vars(module).update({name: value for name, value in names.items() if not name.startswith("__")})
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: `create_module` returns the complete module."""


def select_torch(behavior_version: int | None) -> None:
    """Select PyTorch and a behaviour version (None: not set) for RETURNN's functions."""
    from returnn.frontend import select_backend_torch
    from returnn.util.basic import BackendEngine, BehaviorVersion

    if BehaviorVersion.get_if_set() != behavior_version:
        BehaviorVersion._reset()  # another config in this process may have set it
    select_backend_torch()
    BackendEngine.selected_engine = BackendEngine.Torch
    if behavior_version is not None:
        BehaviorVersion.set(behavior_version)
