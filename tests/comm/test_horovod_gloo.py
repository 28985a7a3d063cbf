"""Horovod's elastic driver: what is refused before training."""

import pytest

from hvdtrain.comm.launchers import launcher_of
from hvdtrain.errors import LaunchError


def test_tensorflow_is_refused_with_the_reason() -> None:
    horovodrun = {"HOROVOD_RANK": "0", "HOROVOD_SIZE": "2"}
    launcher_of(horovodrun).check_backend("tensorflow")
    launcher = launcher_of({**horovodrun, "HOROVOD_ELASTIC": "1"})
    launcher.check_backend("torch")
    with pytest.raises(
        LaunchError, match=r"horovodrun --min-np: expected backend 'torch', got 'tensorflow', whose ranks start too late"
    ):
        launcher.check_backend("tensorflow")
