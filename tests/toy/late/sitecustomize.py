"""In PYTHONPATH, this has programs import PyTorch in three quarters of the time, for tests that start many of them.

`import torch` registers functions for tensors without values, which its compiler uses, and imports a part of the compiler for it.
Here it does so only before something imports one of these modules, and in the same order.
"""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

REGISTERS = "torch._meta_registrations"
NEEDS_THEM = {
    *("torch._decomp", "torch._dynamo", "torch._inductor", "torch._prims", "torch._prims_common", "torch._refs"),
    "torch.utils._content_store",
}


class Late:
    """Finds no module itself, unless it has been imported meanwhile."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in NEEDS_THEM or sys.modules["torch"].__spec__._initializing:  # type: ignore[union-attr]
            return None
        sys.meta_path.remove(cls)
        del sys.modules[REGISTERS]
        import_module(REGISTERS)
        return ModuleSpec(name, Found(sys.modules[name])) if name in sys.modules else None  # type: ignore[arg-type]


class Found:
    """Loads what is there."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: Any) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.modules[REGISTERS] = ModuleType(REGISTERS)
sys.meta_path.insert(0, Late)
