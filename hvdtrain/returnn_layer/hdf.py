"""`returnn.datasets.hdf`: the HDF writer for forward callbacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from hvdtrain.data.hdf.writer import UNKNOWN_DIM, HDFWriter
from hvdtrain.data.types import Array
from hvdtrain.errors import ConfigError


class SimpleHDFWriter:
    """Writes batches to an HDF file in RETURNN's layout. The file exists once `close` has been called.

    Args:
        dim: number of features or classes; None if unknown.
        labels: names of the classes.
        ndim: number of axes without the batch: 1 for class indices, 2 for vectors; default: 2 if `dim` is given, else 1.
        extra_type: by name of an extra stream, its (dim, ndim, dtype).
        extra_labels: by name of an extra stream, the names of its classes.
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
        extra_dims = {name: dim or UNKNOWN_DIM for name, (dim, axes, _) in (extra_type or {}).items() if axes == 1}
        sparse = {"data": dim or UNKNOWN_DIM} if self._ndim == 1 else {}
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
        """Write a batch of sequences.

        Args:
            inputs: shape (batch, time, dim), or (batch, time) for class indices.
            seq_len: number of frames of each sequence, shape (batch,); or a dict with these numbers for axis 0, the time axis.
            seq_tag: tag of each sequence.
            extra: further streams with the same lengths.
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
        """Finish and close the file."""
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(None, None, None)

    def __enter__(self) -> SimpleHDFWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.__exit__(kind, error, trace)
