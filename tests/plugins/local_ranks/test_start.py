"""Which processes this one starts: a pure function of its place and the keys."""

import pytest

from hvdtrain.comm.keys import LaunchKeys
from hvdtrain.comm.launchers import Place
from hvdtrain.errors import LaunchError
from hvdtrain.plugins.local_ranks.start import places

ALONE = Place(None)
SRUN = Place("srun", rank=3, size=5, local_rank=0, local_size=2)
MPIRUN = Place("mpirun", rank=1, size=2, local_rank=1, local_size=2)


def ranks(keys: LaunchKeys, of: Place) -> list[tuple[int, int, int, int]]:
    return [(place.rank, place.size, place.local_rank, place.local_size) for place in places(keys, of)]


def test_which_processes_are_started() -> None:
    assert ranks(LaunchKeys(), ALONE) == []
    assert ranks(LaunchKeys(ngpu=1, multiprocessing_distributed=False), ALONE) == []
    assert ranks(LaunchKeys(ngpu=0), ALONE) == []
    assert ranks(LaunchKeys(), SRUN) == []
    assert ranks(LaunchKeys(ngpu=2), Place("hvdtrain", 0, 2, 0, 2)) == []
    assert ranks(LaunchKeys(ngpu=3), ALONE) == [(0, 3, 0, 3), (1, 3, 1, 3), (2, 3, 2, 3)]
    assert ranks(LaunchKeys(dist_rank=2, dist_world_size=3), ALONE) == [(2, 3, 0, 1)]
    assert ranks(LaunchKeys(ngpu=2, dist_rank=1, dist_world_size=2), ALONE) == [(2, 4, 0, 2), (3, 4, 1, 2)]


def test_processes_of_a_launcher_that_start_some_of_their_own() -> None:
    keys = LaunchKeys(ngpu=2, multiprocessing_distributed=True, dist_launcher="slurm")
    assert ranks(keys, Place("srun", 1, 2, 0, 1)) == [(2, 4, 0, 2), (3, 4, 1, 2)]
    assert ranks(keys, Place("srun", 1, 2, 1, 2)) == [(2, 4, 2, 4), (3, 4, 3, 4)]
    one_each = LaunchKeys(ngpu=1, multiprocessing_distributed=False, dist_launcher="slurm", dist_world_size=5)
    assert ranks(one_each, SRUN) == []


@pytest.mark.parametrize(
    ("keys", "place", "message"),
    [
        (LaunchKeys(ngpu=2), MPIRUN, "ngpu: expected 1 for processes that mpirun started, got 2"),
        (
            LaunchKeys(dist_launcher="slurm"),
            MPIRUN,
            "expected processes that srun started for 'slurm', got processes that mpirun started",
        ),
        (
            LaunchKeys(dist_launcher="mpi"),
            ALONE,
            "expected processes that mpirun started for 'mpi', got a process without a launcher",
        ),
        (
            LaunchKeys(dist_world_size=2),
            ALONE,
            "dist_rank: expected the rank of this process, of dist_world_size = 2, got nothing",
        ),
        (LaunchKeys(dist_world_size=3), MPIRUN, "expected what mpirun says, 1 of 2, got 1 of 3"),
    ],
)
def test_keys_that_contradict_the_launcher(keys: LaunchKeys, place: Place, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        places(keys, place)
