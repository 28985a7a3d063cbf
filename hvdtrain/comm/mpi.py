"""MPI through mpi4py, for the start-up of other transports and for commands that only divide work. Training does not use it."""

from __future__ import annotations

from typing import Any, TypeVar

from hvdtrain.comm import this_process
from hvdtrain.comm.launchers import Place
from hvdtrain.errors import LaunchError

T = TypeVar("T")


def from_rank_zero(value: T) -> T:
    """Collective. Broadcast rank 0's value over MPI. Raises: LaunchError, if MPI does not connect the processes."""
    return world(this_process.place()).bcast(value)  # type: ignore[no-any-return]


def world(place: Place) -> Any:
    """MPI.COMM_WORLD, checked against what the launcher says. Raises: LaunchError."""
    try:
        from mpi4py import MPI  # importing it initializes MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"expected mpi4py to connect the {place.size} processes that {place.launcher} started, got: {error} "
            "(pip install mpi4py; or start one process)"
        ) from None
    if place.size != MPI.COMM_WORLD.Get_size():
        raise LaunchError(
            f"expected the {place.size} processes that {place.launcher} started, got {MPI.COMM_WORLD.Get_size()} from mpi4py "
            "(was mpi4py built for another MPI than the launcher's?)"
        )
    return MPI.COMM_WORLD
