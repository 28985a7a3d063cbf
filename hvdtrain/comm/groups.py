"""Groups of ranks: each trains one model, and the models are averaged."""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.comm.base import Communicator
from hvdtrain.comm.single import SingleCommunicator


@dataclass(frozen=True)
class RankGroup:
    """The group of a rank.

    Attributes:
        ranks: the ranks of the group.
        within: connects them.
        between: connects the groups, as if each was one rank. All ranks of a group call its collectives with the same tensors.
        whole: connects all ranks.
    """

    ranks: tuple[int, ...]
    within: Communicator
    between: Communicator
    whole: Communicator


def single_rank(comm: Communicator) -> RankGroup:
    """The group of a rank that is a model by itself."""
    return RankGroup((comm.rank,), SingleCommunicator(comm.local_rank, comm.local_size), comm, comm)
