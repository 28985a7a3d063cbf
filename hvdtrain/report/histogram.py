"""How the elements of an array are distributed, as TensorBoard's messages have it."""

from __future__ import annotations

from typing import Any

import numpy

from hvdtrain.data.types import Array

BINS = 64


def histogram(values: Array) -> dict[str, Any] | None:
    """The fields of TensorBoard's HistogramProto, of all elements that are finite numbers; None where there are none.

    >>> found = histogram(numpy.array([[0.0, 1.0], [4.0, numpy.nan]]))
    >>> found["num"], found["min"], found["max"], found["sum"], found["sum_squares"]
    (3, 0.0, 4.0, 5.0, 17.0)
    """
    flat = numpy.asarray(values, dtype=numpy.float64).reshape(-1)
    flat = flat[numpy.isfinite(flat)]
    if not len(flat):
        return None
    counts, edges = numpy.histogram(flat, BINS)
    return {
        "min": float(flat.min()),
        "max": float(flat.max()),
        "num": len(flat),
        "sum": float(flat.sum()),
        "sum_squares": float(numpy.square(flat).sum()),
        "bucket_limit": edges[1:].tolist(),
        "bucket": counts.tolist(),
    }
