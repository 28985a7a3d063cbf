"""Notices that ranks which make the same updates no longer have the same weights.

All of them get the same gradients, so only code of the config that depends on its rank can make weights differ, or processors
that round otherwise. What they round is tiny, and rank 0's weights, which checkpoints have, replace it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator
from hvdtrain.data.randomness import mix_seed
from hvdtrain.learner.state_base import StateBase
from hvdtrain.runtime import log


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
    own = dict(zip(tensors, sums, strict=True))
    first = comm.gather(own if comm.rank == 0 else {}, name="weights_of_first")[0]
    differing = set().union(*comm.gather({name for name in own if own[name] != first[name]}, name="weights_that_differ"))
    names = [name for name in own if name in differing]
    of_first = dict(zip(names, comm.broadcast([tensors[name] for name in names], name="weights_that_differ"), strict=True))
    close = {name: tensor for name, tensor in of_first.items() if state.is_rounding(tensors[name], tensor)}
    texts = {name: f"the checksum {(first if name in close else own)[name]:016x}" for name in names}
    check_alike(comm, "weights", {**facts, **texts})
    state.set_tensors("parameters", close)
    log.detail(f"{len(names)} of {len(own)} parameters were rounded differently by the ranks: all take those of rank 0")
