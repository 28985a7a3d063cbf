"""Keeps the ranks' buffers alike: what a model has besides parameters, such as BatchNorm's statistics, masks and tables.

Nothing says which of them training changes. But an average of equal numbers is these numbers, while computing it would round
them, and 0 times the -inf of a mask is NaN. So the ranks compare hashes first, and average only what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from hashlib import sha256
from itertools import islice

from hvdtrain.comm.alike import check_alike
from hvdtrain.comm.base import Communicator, Tensor
from hvdtrain.learner.model_state import ModelState, Role
from hvdtrain.learner.reducer import Average, UpdateCounts, average


def average_buffers(comm: Communicator, state: ModelState, counts: UpdateCounts) -> None:
    """Collective. Of the buffers that differ between ranks, average statistics, and take counters from rank 0.

    Raises:
        ConfigError: on all ranks, if a buffer has another shape on another rank.
    """
    differing = _differing(comm, state, ("statistics", "counters"))
    changes: dict[Role, Average] = {
        "statistics": partial(average, comm, counts=counts, name="statistics"),
        "counters": partial(comm.broadcast, name="counters"),
    }
    for (role, change), numbers in zip(changes.items(), differing, strict=True):
        if numbers:
            state.map_tensors(role, partial(_change_some, numbers, change))


def averaged_statistics(comm: Communicator, state: ModelState, counts: UpdateCounts) -> Average:
    """Averages the statistics that differ between ranks, for a model to be saved. It raises what `average_buffers` raises."""

    def change(tensors: list[Tensor]) -> list[Tensor]:
        [numbers] = _differing(comm, state, ("statistics",))
        return _change_some(numbers, partial(average, comm, counts=counts, name="saved.statistics"), tensors)

    return change


def _change_some(numbers: Sequence[int], change: Average, tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, those with some numbers changed."""
    changed = list(tensors)
    for number, new in zip(numbers, change([tensors[number] for number in numbers]) if numbers else [], strict=True):
        changed[number] = new
    return changed


def _differing(comm: Communicator, state: ModelState, roles: Sequence[Role]) -> list[list[int]]:
    """Collective, if there are buffers. By role, the numbers of those that are not the same on all ranks to the last bit.

    Raises:
        ConfigError: on all ranks.
    """
    kinds = [state.kinds(role) for role in roles]
    if comm.size == 1 or not any(kinds):
        return [[] for _ in roles]
    named = named_kinds(state, roles)
    own = sha256(repr(named).encode()).digest(), [digest for role in roles for digest in state.digests(role)]
    everybodys = comm.gather(own, name="buffers")
    if any(signature != own[0] for signature, _ in everybodys):
        check_alike(comm, "buffers", named)
    alike = iter([len(set(each)) == 1 for each in zip(*(digests for _, digests in everybodys), strict=True)])
    return [[number for number, is_alike in enumerate(islice(alike, len(of_role))) if not is_alike] for of_role in kinds]


def named_kinds(state: ModelState, roles: Sequence[Role]) -> dict[str, str]:
    """What the ranks' tensors of some roles have to have in common, by name: role, place in the model, type and shape."""
    return {name: f"{role}[{number}] {kind}" for role in roles for number, (name, kind) in enumerate(state.kinds(role).items())}
