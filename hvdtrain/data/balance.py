"""The order of an epoch's batches: as the sequences come, shuffled, or so that the batches of one step cost about the same.

None of it depends on the number of ranks, so a position within an epoch means the same on any number of them.
"""

from __future__ import annotations

import numpy

from hvdtrain.data.types import Array


def shuffled(num_batches: int, generator: numpy.random.RandomState) -> Array:
    """The batches in random order, int64 of shape (num_batches,)."""
    return generator.permutation(num_batches).astype(numpy.int64, copy=False)


def dealt(costs: Array, group: int, generator: numpy.random.RandomState) -> Array:
    """The batches in groups of similar cost; the groups in random order, the costs within a group ascending.

    Batches i * group to (i + 1) * group - 1 of the result are neighbours when sorted by cost. So ranks whose number
    divides `group` take batches of similar cost in every step. Where it does not come out even, the rest, which is
    left out of the sorted batches at a random place, comes last.

    Args:
        costs: of every batch; shape (num_batches,), or (num_batches, n) where later columns decide between equal ones.

    Returns:
        int64 indices of shape (num_batches,), every batch once.
    """
    columns = costs if costs.ndim == 2 else costs[:, None]
    by_cost = numpy.lexsort(columns.T[::-1])
    num_groups, rest = divmod(len(by_cost), group)
    cut = int(generator.randint(num_groups + 1)) * group
    grouped = numpy.concatenate([by_cost[:cut], by_cost[cut + rest :]]).reshape(num_groups, group)
    in_groups = grouped[generator.permutation(num_groups)].reshape(-1)
    return numpy.concatenate([in_groups, by_cost[cut : cut + rest]]).astype(numpy.int64, copy=False)


def rearranged(order: Array, bounds: Array, batches: Array) -> tuple[Array, Array]:
    """`order` and `bounds` of a plan with its batches in another order.

    Args:
        batches: which batch comes when; shape (number of batches,).
    """
    counts = numpy.diff(bounds)[batches]
    edges = numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64, copy=False)
    places = numpy.repeat(bounds[:-1][batches] - edges[:-1], counts) + numpy.arange(edges[-1])
    return order[places], edges
