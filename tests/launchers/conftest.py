"""The programs that tests of launchers start import PyTorch faster, and ranks of MPI sleep while they wait for one that hangs."""

import os
from collections.abc import Iterator

import pytest
from launching import TOY
from trainings import take_naps


@pytest.fixture(scope="module", autouse=True)
def frugal_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TOY.with_name("late")), prepend=os.pathsep)
        for name, value in take_naps(tmp_path_factory.mktemp("naps")).items():
            patch.setenv(name, value)
        yield
