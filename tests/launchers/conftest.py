"""The processes that tests of launchers start import PyTorch faster."""

import os
from collections.abc import Iterator

import pytest
from launching import TOY


@pytest.fixture(scope="session", autouse=True)
def quick_start() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TOY.with_name("late")), prepend=os.pathsep)
        yield
