"""Keeps the ranks' buffers alike: what a model has besides parameters, such as BatchNorm's statistics, masks and tables.

Nothing says which of them training changes. But an average of equal numbers is these numbers, while computing it would round
them, and 0 times the -inf of a mask is NaN. So the ranks compare hashes first, and average only what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor
from hvdtrain.learner.averaging import UpdateCounts, average, changed
from hvdtrain.learner.model_state import BUFFERS, ModelState, Role


def average_buffers(comm: Communicator, state: ModelState, counts: UpdateCounts) -> None:
    """Collective. Of the buffers that differ between ranks, average statistics, and take counters from rank 0.

    Raises:
        ConfigError: on all ranks, if a buffer has another shape on another rank.
    """
    statistics, counters = _differing(comm, state, BUFFERS)
    state.set_tensors("statistics", changed(statistics, partial(average, comm, counts=counts, name="statistics")))
    state.set_tensors("counters", changed(counters, partial(comm.broadcast, name="counters")))


def averaged_statistics(comm: Communicator, state: ModelState, counts: UpdateCounts) -> dict[str, Tensor]:
    """Collective. The averages of the statistics that differ between ranks, by name. Raises: as `average_buffers`."""
    [statistics] = _differing(comm, state, ("statistics",))
    return changed(statistics, partial(average, comm, counts=counts, name="saved.statistics"))


def _differing(comm: Communicator, state: ModelState, roles: Sequence[Role]) -> list[dict[str, Tensor]]:
    """Collective, if there are buffers. By role, those by name that are not the same on all ranks to the last bit.

    Raises:
        ConfigError: on all ranks.
    """
    named = named_kinds(state, roles)
    if comm.size == 1 or not named:
        return [{} for _ in roles]
    from hashlib import sha256  # as in comm/alike.py

    mine = sha256(repr(named).encode()).digest(), [digest for role in roles for digest in state.digests(role)]
    everybodys = comm.gather(mine, name="buffers")
    if any(signature != mine[0] for signature, _ in everybodys):
        check_alike(comm, "buffers", named)
    differ = iter([len(set(each)) > 1 for each in zip(*(digests for _, digests in everybodys), strict=True)])
    return [{name: tensor for name, tensor in state.tensors(role).items() if next(differ)} for role in roles]


def named_kinds(state: ModelState, roles: Sequence[Role]) -> dict[str, str]:
    """What the ranks' tensors of some roles have to have in common, by name: role, place in the model, type and shape."""
    return {
        name: f"{role}[{number}] {tensor.dtype} {tuple(tensor.shape)}"
        for role in roles
        for number, (name, tensor) in enumerate(state.tensors(role).items())
    }
