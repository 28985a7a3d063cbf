"""Every collective of both transports, on three real ranks."""

from pathlib import Path

import pytest
from launching import TOY, Finished, launch
from trainings import take_naps

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """Both in one launch: the ranks connect anew."""
    folder = tmp_path_factory.mktemp("collectives")
    return launch([str(TOY.parent / "collectives.py"), str(folder)], 3, environment=take_naps(folder)), folder


@pytest.mark.parametrize("transport", ["use_horovod", "torch_distributed"])
def test_collectives(launched: tuple[Finished, Path], transport: str) -> None:
    finished, folder = launched
    assert sorted(path.name for path in folder.glob(f"{transport}.*.ok")) == [f"{transport}.{rank}.ok" for rank in range(3)], (
        finished.err
    )
    assert finished.status == 0 or transport == "use_horovod", finished.err
