"""demos/demo_horovod_mpi.py on one host; tests/cluster starts it on several."""

import pytest
from launching import ROOT, launch

pytestmark = pytest.mark.slow

DEMO = str(ROOT / "demos" / "demo_horovod_mpi.py")


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_two_ranks_hear_each_other_over_mpi_and_over_horovod(framework: str) -> None:
    finished = launch([DEMO, "--framework", framework], ranks=2, environment={"NCCL_DEBUG": "INFO"})
    assert finished.status == 0, finished.err
    for rank in range(2):
        assert f"hello over MPI from rank {rank} of 2 on " in finished.out
        assert f"hello over Horovod from rank {rank} of 2, local rank {rank} of 2 on " in finished.out
    assert f"{framework} 2." in finished.out
    assert "  NCCL_DEBUG: INFO\n" in finished.out
    assert "sum of 1 to 2: 3, expected 3;" in finished.out


def test_alone_it_says_so() -> None:
    finished = launch([DEMO])
    assert finished.status == 0, finished.err
    assert "no launcher started 1 process\n" in finished.out
    assert "MPI: this is the only process" in finished.out


def test_processes_that_do_not_find_each_other_get_a_hint() -> None:
    finished = launch([DEMO], environment={"RANK": "0", "WORLD_SIZE": "2"})
    assert finished.status == 2
    assert "rank 0: expected the 2 processes that torchrun started, got 1 from mpi4py" in finished.err
