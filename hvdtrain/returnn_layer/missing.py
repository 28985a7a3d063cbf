"""Errors about names of RETURNN that hvdtrain does not provide."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

OUR_FILES = (str(Path(__file__).parent), "<")
"""How file names in tracebacks begin for this folder and for code built into Python."""

SUPPORTED = (
    "without RETURNN, hvdtrain runs its configs for plain PyTorch, whose get_model returns a torch.nn.Module and which use the "
    "run context (get_run_ctx: mark_as_loss, mark_as_output), TensorDict, Tensor and Dim. For RETURNN's layers and functions: "
    "pip install hvdtrain[returnn]; docs/returnn.md lists the supported names"
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
