"""`returnn.datasets.hdf`: the writer that forward callbacks write HDF files with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hvdtrain.data.hdf.writer import HDFWriter
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError


class SimpleHDFWriter:
    """Takes batches and writes them into an HDF file in RETURNN's layout, which is there when `close` has been called.

    Args:
        dim: how many features or classes there are; None: not known.
        labels: the classes' names.
        ndim: axes without the batch: 1 for class indices, 2 for vectors; without it 2 where there is a dim.
        extra_labels: by the name of an extra stream, its classes' names.
    """

    def __init__(
        self,
        filename: str,
        dim: int | None,
        labels: Sequence[str] | None = None,
        ndim: int | None = None,
        *,
        extra_type: Mapping[str, tuple[int, int, str]] | None = None,
        extra_labels: Mapping[str, Sequence[str]] | None = None,
        swmr: bool = False,
        extend_existing_file: bool = False,
    ) -> None:
        if extend_existing_file:
            raise ConfigError(["SimpleHDFWriter: expected a file that does not exist yet, got extend_existing_file = True"])
        self._ndim = ndim if ndim is not None else 1 if dim is None else 2
        all_labels = {**({"data": labels} if labels else {}), **(extra_labels or {})}
        extra_dims = {name: dim for name, (dim, axes, _) in (extra_type or {}).items() if axes == 1 and dim}
        sparse = {"data": dim} if self._ndim == 1 and dim else {}
        self._writer = HDFWriter(Path(filename), labels=all_labels, dims={**sparse, **extra_dims})
        self._writer.__enter__()
        self._is_open = True

    def insert_batch(
        self,
        inputs: Array,
        seq_len: Sequence[int] | Mapping[int, Sequence[int]],
        seq_tag: Sequence[str | bytes],
        extra: Mapping[str, Array] | None = None,
    ) -> None:
        """Add some sequences.

        Args:
            inputs: shape (batch, time, dim), or (batch, time) for class indices.
            seq_len: each sequence's number of frames; or such numbers by axis behind the batch, of which there may be one.
            extra: further streams of the same lengths.
        """
        by_axis = seq_len if isinstance(seq_len, Mapping) else {0: seq_len}
        if inputs.ndim != self._ndim + 1 or list(by_axis) not in ([0], []):
            raise ConfigError(
                [f"SimpleHDFWriter: expected {self._ndim} axes and the batch, padded in time only, got {inputs.shape}, {by_axis}"]
            )
        lengths = by_axis.get(0, [inputs.shape[1]] * len(seq_tag))
        for number, (tag, length) in enumerate(zip(seq_tag, lengths, strict=True)):
            arrays = {name: values[number][: int(length)] for name, values in {"data": inputs, **(extra or {})}.items()}
            self._writer.add(tag.decode("utf-8") if isinstance(tag, bytes) else str(tag), arrays)

    def close(self) -> None:
        """Write the file."""
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(None, None, None)

    def __enter__(self) -> SimpleHDFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(kind, error, trace)
