"""The table of frameworks."""

import pytest

from hvdtrain.errors import LaunchError
from hvdtrain.learner.base import Learner
from hvdtrain.plugins.horovod.launcher import check_elastic


def test_elastic_horovod_is_refused_for_tensorflow_with_the_reason() -> None:
    check_elastic("torch")
    with pytest.raises(LaunchError, match="expected backend 'torch', got 'tensorflow', whose ranks start too late") as caught:
        check_elastic("tensorflow")
    assert caught.value.on_every_rank


def test_a_framework_that_lacks_part_of_a_learner_makes_none() -> None:
    class Half(Learner):
        def evaluate(self, batch: object) -> None: ...

    with pytest.raises(TypeError, match="abstract methods .*backward.* try_batch"):
        Half(None, None)  # type: ignore[abstract, arg-type]
