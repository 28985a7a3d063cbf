"""Notices that ranks which make the same updates no longer have the same weights.

All of them get the same gradients, so only code of the config that depends on its rank can make weights differ, or processors
that round otherwise. What they round is tiny, and rank 0's weights, which checkpoints have, replace it.
"""

from __future__ import annotations

from collections.abc import Mapping

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor
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
    own = dict(zip(state.kinds("parameters"), state.sums("parameters"), strict=True))
    if len(set(comm.gather(mix_seed(*own.values()), name="weights"))) == 1:
        return
    first = comm.gather(own if comm.rank == 0 else {}, name="weights_of_first")[0]
    differing = set().union(*comm.gather({name for name in own if own[name] != first[name]}, name="weights_that_differ"))
    numbers = [number for number, name in enumerate(own) if name in differing]
    shown = dict(own)

    def take(tensors: list[Tensor]) -> list[Tensor]:
        changed = list(tensors)
        of_first = comm.broadcast([tensors[number] for number in numbers], name="weights_that_differ")
        for number, tensor in zip(numbers, of_first, strict=True):
            if state.is_rounding(tensors[number], tensor):
                name = list(own)[number]
                changed[number], shown[name] = tensor, first[name]
        return changed

    state.map_tensors("parameters", take)
    texts = {name: f"the checksum {shown[name]:016x}" for name in own if name in differing}
    check_alike(comm, "weights", {**facts, **texts})
    log.detail(f"{len(differing)} of {len(own)} parameters were rounded differently by the ranks: all take those of rank 0")
