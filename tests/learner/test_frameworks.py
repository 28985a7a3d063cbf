"""The table of frameworks."""

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.learner.frameworks import check_elastic


def test_elastic_horovod_is_refused_for_tensorflow_with_the_reason() -> None:
    check_elastic("torch")
    with pytest.raises(LaunchError, match="expected backend 'torch', got 'tensorflow', whose ranks start too late") as caught:
        check_elastic("tensorflow")
    assert caught.value.on_every_rank
