"""What tests of trainings on ranks share."""

from functools import partial

import pytest
from trainings import ResultsOf, Trained


@pytest.fixture
def results(request: pytest.FixtureRequest, trained: Trained) -> ResultsOf:
    """What the function `trainings` of the test's module left, by run."""
    return partial(trained, request.module.trainings)
