"""The learning rate of an epoch: constant, or from a list."""

import numpy
from launching import faults

from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import error_key
from hvdtrain.schedule.rates import ScheduleKeys, epoch_learning_rate


def rates_of(num_epochs: int, **keys: object) -> list[float]:
    """The rates of the epochs, one after the other."""
    history: list[EpochRecord] = []
    for epoch in range(1, num_epochs + 1):
        history.append(EpochRecord(epoch, epoch_learning_rate(ScheduleKeys(**keys), None, epoch, history)))
    return [record.learning_rate for record in history]


def test_constant() -> None:
    assert rates_of(4, learning_rate=0.1) == [0.1] * 4


def test_a_list_and_then_its_last_entry() -> None:
    assert rates_of(4, learning_rates=[0.1, 0.3, 0.2]) == [0.1, 0.3, 0.2, 0.2]
    assert rates_of(3, learning_rates=[0.1], learning_rate=9.0) == [0.1, 0.1, 0.1]
    by_numpy = rates_of(3, learning_rates=numpy.linspace(0.2, 0.1, 2))
    assert by_numpy == [0.2, 0.1, 0.1]
    assert all(type(rate) is float for rate in by_numpy)


def test_a_list_is_followed_whatever_the_epochs_before_had() -> None:
    history = [EpochRecord(1, 5.0, {}), EpochRecord(2, 6.0, {})]
    assert epoch_learning_rate(ScheduleKeys(learning_rates=[1.0, 2.0, 3.0]), None, 3, history) == 3.0
    assert epoch_learning_rate(ScheduleKeys(learning_rates=[1.0, 2.0]), None, 3, []) == 2.0, "if nothing is known of them"


def test_the_score_that_compares_epochs_where_none_is_named() -> None:
    assert error_key({"train_loss_a": 1, "dev_loss_c": 1, "dev_loss_b": 1, "eval_loss_a": 1}) == "dev_loss_b"
    assert error_key({"train_loss_b": 1, "train_loss_a": 1, "zest_loss_a": 1}) == "train_loss_a"
    assert error_key({"eval_loss_b": 1, "eval_loss_a": 1}) == "eval_loss_a"
    assert error_key({}) is None


def test_rates_of_single_epochs() -> None:
    assert rates_of(5, learning_rate=0.5, learning_rates={2: 0.1, 4: 0.3}) == [0.5, 0.1, 0.1, 0.3, 0.3]
    assert faults(ScheduleKeys(learning_rates={2: 0.1}).problems()) == ["learning_rates: missing"]


def test_a_rate_is_needed() -> None:
    assert faults(ScheduleKeys().problems()) == ["learning_rate: missing"]
    assert faults(ScheduleKeys(learning_rates=[]).problems()) == ["learning_rates: missing"]
    assert (
        faults(ScheduleKeys(learning_rate=0.1).problems()) == faults(ScheduleKeys(learning_rates=numpy.ones(2)).problems()) == []
    )
