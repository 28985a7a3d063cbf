"""The errors about names of RETURNN's that are not there."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from pathlib import Path

OUR_FILES = (str(Path(__file__).parent), "<")
"""The beginnings of the names of this folder's files, and of what Python has built in."""

SUPPORTED = (
    "hvdtrain runs RETURNN's configs of plain PyTorch, whose get_model returns a torch.nn.Module and which use the run context "
    "(get_run_ctx: mark_as_loss, mark_as_output), TensorDict, Tensor and Dim, but not RETURNN's own layers and functions; "
    "docs/returnn.md lists what there is"
)


class NotInLayer(AttributeError):
    """A name of RETURNN's that hvdtrain does not have. An AttributeError, so that `hasattr` answers."""


def not_in_layer(what: str, known: Iterable[str]) -> NotInLayer:
    """The error about an attribute, where there are only the `known` ones."""
    there = ", ".join(sorted({name for name in known if not name.startswith("_")}))
    return NotInLayer(
        f"{what}: expected one of {there or 'no names at all'}, got a name that hvdtrain does not have ({SUPPORTED})"
    )


def told(error: Exception) -> str:
    """An error's message, with what there is: Python's own about a name that cannot be imported does not say it."""
    return str(error) if SUPPORTED in str(error) else f"{error}: expected a name that hvdtrain has ({SUPPORTED})"


def place(error: Exception) -> str:
    """The file and line of the user's that an error comes out of."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(OUR_FILES)]
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}" if frames else "a place that is not known"


def no_such_name(what: str, module: str) -> ImportError:
    """The error about a name in a module that is there."""
    return ImportError(f"{what}: expected a name that hvdtrain has, got another ({SUPPORTED})", name=module)


def no_such_module(name: str, known: Iterable[str]) -> ModuleNotFoundError:
    """The error about a module."""
    return ModuleNotFoundError(f"{name}: expected one of {', '.join(known)}, got another ({SUPPORTED})", name=name)
