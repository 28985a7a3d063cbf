"""The cost of sequences, as the unit of the limits of batches: `batch_cost`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy

from hvdtrain.data.plan.batch_keys import COST, BatchKeys, Limit, Limits
from hvdtrain.data.types import Array
from hvdtrain.errors import DataError

DECIMALS = 10**6
"""Costs that are not integers are rounded to millionths, so that sums do not depend on the order in which they are added up."""


def sorting_lengths(lengths: Mapping[str, Array]) -> Array:
    """The lengths that sequences are sorted by: those of 'data', or else of the first data key."""
    return lengths["data"] if "data" in lengths else next(iter(lengths.values()))


def costs_of(keys: BatchKeys, lengths: Mapping[str, Array]) -> Array | None:
    """The cost of every sequence, as the config defines it; None: the config does not.

    Args:
        lengths: by data key, number of frames of every sequence.

    Raises:
        DataError: the config's function returns no costs, or there is no such data key.
    """
    cost = keys.batch_cost
    if cost is None:
        return None
    if isinstance(cost, dict):
        name = cost.get("key")
        if name is not None and name not in lengths:
            raise DataError(f"batch_cost.key: expected one of the data keys {', '.join(lengths)}, got {name!r}")
        frames = (sorting_lengths(lengths) if name is None else lengths[name]).astype(numpy.float64)
        return frames + frames * frames / float(cost["at"])
    number = len(next(iter(lengths.values())))
    costs = numpy.asarray(cost(dict(lengths)))
    if costs.shape != (number,) or costs.dtype.kind not in "iuf":
        raise DataError(
            f"batch_cost: expected it to return an array of {number} numbers, got {costs.dtype} of shape {costs.shape}"
        )
    if number and not (numpy.isfinite(costs).all() and costs.min() >= 0):
        wrong = int(numpy.flatnonzero(~(numpy.isfinite(costs) & (costs >= 0)))[0])
        raise DataError(f"batch_cost: expected finite costs of 0 or more, got {costs[wrong]} for sequence {wrong}")
    return costs


def count_in_cost(
    keys: BatchKeys, lengths: Mapping[str, Array], limits: Limits
) -> tuple[Mapping[str, Array], Limits, Mapping[str, Array]]:
    """What limits batches: the sizes of sequences and the limits on them, in which the cost is like one more data key.

    Returns:
        The sizes by data key, the limits, and those sizes among them that say how much time a sequence takes.

    Raises:
        DataError: as `costs_of`, or a data key has the name of the cost.
    """
    costs = costs_of(keys, lengths)
    if costs is None:
        return lengths, limits, lengths
    if COST in lengths:
        raise DataError(f"batch_cost: expected no data key called {COST!r}, which means the cost in limits, got one")
    unit = DECIMALS if costs.dtype.kind == "f" else 1
    if float(costs.sum()) * unit >= 2**62:
        raise DataError(
            f"batch_cost: expected costs with a sum below {2**62 // unit:.1e}, got {costs.sum():.1e} (use a larger unit)"
        )
    column = numpy.rint(costs * unit).astype(numpy.int64)
    limits = replace(
        limits,
        batch_size=_in_units(limits.batch_size, unit),
        packed_batch_size=_in_units(limits.packed_batch_size, unit),
        max_pad_size=dict.fromkeys(lengths, limits.max_pad_size) if isinstance(limits.max_pad_size, int) else limits.max_pad_size,
    )
    return {**lengths, COST: column}, limits, {COST: column}


def _in_units(limit: Limit, unit: int) -> Any:
    """A limit on the cost, or by data key with the cost among them. A number without a key is one on the cost."""
    if limit is None:
        return None
    by_key = limit if isinstance(limit, Mapping) else {COST: limit}
    return {name: min(most * unit, 2**62) if name == COST else most for name, most in by_key.items()}
