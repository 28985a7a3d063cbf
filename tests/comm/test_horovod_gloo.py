"""Horovod's elastic driver: what is refused before training."""

import pytest

from hvdtrain.comm.horovod_gloo import check_backend
from hvdtrain.errors import LaunchError


def test_tensorflow_is_refused_with_the_reason() -> None:
    check_backend("torch")
    with pytest.raises(
        LaunchError, match=r"horovodrun --min-np: expected backend 'torch', got 'tensorflow', whose ranks start too late"
    ):
        check_backend("tensorflow")
