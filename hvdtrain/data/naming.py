"""The batch in which an error occurs: its description, and advice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from hvdtrain.config.check import did_you_mean
from hvdtrain.data.feed import FEW_TAGS, Feed
from hvdtrain.data.types import Batch
from hvdtrain.errors import HvdtrainError

WANTS_LONG = re.compile(r"\bLong\b|not implemented for '(Int|Short|Char|Byte)'")
"""PyTorch's messages about class indices that are not int64."""

MAKES_BATCHES = "hvdtrain makes the batches; give it items that are single sequences"

TENSORS = "extern_data[KEY] has raw_tensor (batch, time, ...), seq_lens (batch,) and mask (batch, time)"
PACKED_TENSORS = (
    "with packed, extern_data[KEY] has raw_tensor (frames, ...), seq_lens (batch,) and offsets (batch + 1,), but no mask"
)


class Naming:
    """A context for calls of the config's functions: the traceback of an exception ends with a description of the batch, and
    advice.

    Args:
        feed: of the batch; a data key that is not in the batch may be missing in its files.
    """

    def __init__(self, batch: Batch | None, feed: Feed | None = None) -> None:
        self._batch = batch
        self._feed = feed

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._batch is None or not isinstance(error, Exception) or isinstance(error, HvdtrainError):
            return
        error.add_note(batch_text(self._batch) + ("" if self._feed is None else f"; of {self._feed.source}"))
        advice = _advice(error, self._batch)
        if advice is not None:
            error.add_note(advice)


def _advice(error: Exception, batch: Batch) -> str | None:
    """The probable fix for an error in accessing a data key or its tensor."""
    if WANTS_LONG.search(str(error)) and any(padded.values.dtype.kind in "iu" for padded in batch.data.values()):
        return "class indices have the type of the dataset: PyTorch's losses require int64, as in raw_tensor.long()"
    if batch.collate is not None:
        return None
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str) and error.args[0] not in batch.data:
        hint = did_you_mean(error.args[0], batch.data)
        return f"if {error.args[0]!r} is to be a data key: extern_data has {', '.join(map(repr, batch.data))}{hint}"
    if isinstance(error, AttributeError) and isinstance(error.obj, dict) and error.name in batch.data:
        return f"extern_data is a dict: extern_data[{error.name!r}]"
    if isinstance(error, (AttributeError, TypeError, ValueError)) and re.search(r"\b(Torch|TensorFlow|Packed)Data\b", str(error)):
        return PACKED_TENSORS if batch.is_packed else TENSORS
    if batch.is_packed:
        return None
    sizes = [set(padded.seq_lens.tolist()) for padded in batch.data.values()]
    if any(padded.values.ndim > 3 for padded in batch.data.values()) and all(len(size) == 1 and size != {1} for size in sizes):
        return f"if items have {max(sizes[0])} frames because they are batches: {MAKES_BATCHES}"
    single = [key for key, padded in batch.data.items() if padded.values.ndim == 2 and padded.values.shape[1] == 1]
    if single and isinstance(error, (RuntimeError, ValueError)) and re.search("target|labels", str(error)):
        return f"{single[0]} is one number per sequence, of shape (batch, 1): raw_tensor[:, 0] has shape (batch,)"
    return None


def kind_of_tree(tree: Any) -> str:
    """What a `collate` function returned, for messages.

    >>> import numpy
    >>> kind_of_tree({"x": numpy.zeros((2, 3)), "n": 5})
    "dict of 'x' (2, 3), 'n' int"
    """
    if isinstance(tree, Mapping):
        return f"{type(tree).__name__} of {', '.join(f'{key!r} {kind_of_tree(value)}' for key, value in [*tree.items()][:8])}"
    if isinstance(tree, (list, tuple)):
        return f"{type(tree).__name__} of {', '.join(map(kind_of_tree, tree[:8]))}"
    shape = getattr(tree, "shape", None)
    return type(tree).__name__ if shape is None else str(tuple(shape))


def batch_text(batch: Batch) -> str:
    """Type, shape and lengths of every data key, and some of the tags."""
    parts = [
        f"{key} {padded.values.dtype} {padded.values.shape}, seq_lens {padded.seq_lens.min()} to {padded.seq_lens.max()}"
        for key, padded in (batch.data.items() if batch.collate is None else ())
    ] or [f"{len(batch.indices)} items, of which collate made {kind_of_tree(batch.tree)}"]
    try:
        tags = [] if batch.seq_tags is None else batch.seq_tags()
    except HvdtrainError:  # a changed file, which the exception that is being handled reports
        tags = []
    more = [f"{len(tags) - FEW_TAGS} more"] if len(tags) > FEW_TAGS else []
    sequences = f"; sequences: {', '.join([*tags[:FEW_TAGS], *more])}" if tags else ""
    return f"in this batch: {'; '.join(parts)}{sequences}"
