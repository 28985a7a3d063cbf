"""Notices that ranks which make the same updates no longer have the same weights.

All of them get the same gradients, so only code of the config that depends on its rank can make weights differ, or processors
that round otherwise. What they round is tiny, and rank 0's weights, which checkpoints have, replace it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor
from hvdtrain.data.randomness import mix_seed
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime import log

PRECISION: Mapping[str, float] = {"bfloat16": 2.0**-8, "float16": 2.0**-10}
"""Of types that are less precise than float32: the distance from 1 to the next number."""

ROUNDINGS = 16
"""How many such distances, relative to a tensor's largest value, the ranks' roundings may differ."""


def checksum(state: StateBase) -> int:
    """Of this rank's trained parameters: 20 bits, so that a float64 can sum the squares of those of 8192 ranks."""
    return mix_seed(*state.sums("parameters")) & 0xFFFFF


def check_weights(comm: Communicator, state: StateBase, facts: Mapping[str, str]) -> None:
    """Collective. Compare the trained parameters of all ranks, and take those of rank 0 where only the rounding differs.

    Args:
        facts: what decides on an update, by name, to explain a difference.

    Raises:
        ConfigError: they differ; on all ranks, with the names.
    """
    sums = state.sums("parameters")
    if len(set(comm.gather(mix_seed(*sums), name="weights"))) == 1:
        return
    tensors = state.tensors("parameters")
    sums_here = dict(zip(tensors, sums, strict=True))
    first = comm.gather(sums_here if comm.rank == 0 else {}, name="weights_of_first")[0]
    differing = set().union(
        *comm.gather({name for name in sums_here if sums_here[name] != first[name]}, name="weights_that_differ")
    )
    names = [name for name in sums_here if name in differing]
    of_first = dict(zip(names, comm.broadcast([tensors[name] for name in names], name="weights_that_differ"), strict=True))
    close = {name: tensor for name, tensor in of_first.items() if _is_rounding(state, tensors[name], tensor)}
    texts = {name: f"the checksum {(first if name in close else sums_here)[name]:016x}" for name in names}
    check_alike(comm, "weights", {**facts, **texts})
    state.set_tensors("parameters", close)
    log.detail(f"{len(names)} of {len(sums_here)} parameters were rounded differently by the ranks: all take those of rank 0")


def _is_rounding(state: StateBase, value: Tensor, reference: Tensor) -> bool:
    """Whether two tensors of the same shape differ by no more than what processors round differently."""
    wide, wide_reference = state.wide(value), state.wide(reference)
    precision = next((bits for name, bits in PRECISION.items() if name in str(value.dtype)), 2.0**-23)
    difference = numpy.abs(wide - wide_reference).max(initial=0.0)
    return bool(difference <= ROUNDINGS * precision * numpy.abs(wide_reference).max(initial=0.0))
