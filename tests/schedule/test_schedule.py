"""The learning rate of an epoch: constant, a list, newbob."""

from dataclasses import fields

import numpy
import pytest
from launching import faults, refused

from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import error_key
from hvdtrain.schedule.rates import NewbobKeys, ScheduleKeys, epoch_learning_rate


def sections(keys: dict[str, object]) -> tuple[ScheduleKeys, NewbobKeys]:
    """The keys of the two sections, from one dict."""
    own = {field.name for field in fields(NewbobKeys)}
    newbob = NewbobKeys(**{name: value for name, value in keys.items() if name in own})
    return ScheduleKeys(**{name: value for name, value in keys.items() if name not in own}), newbob


def rates_of(errors: list[float | None], measure: str = "dev_loss_ce", **keys: object) -> list[float]:
    """The rates of the epochs, one after the other, where each epoch ends with an error; and that of the epoch after."""
    schedule, newbob = sections(keys)
    history: list[EpochRecord] = []
    rates = []
    for epoch, error in enumerate([*errors, None], start=1):
        rates.append(epoch_learning_rate(schedule, newbob, epoch, history))
        history.append(EpochRecord(epoch, rates[-1], {} if error is None else {measure: error}))
    return rates


NEWBOB = {"learning_rate_control": "newbob", "learning_rate": 0.8}


def test_constant() -> None:
    assert rates_of([3.0, 4.0, 5.0], learning_rate=0.1) == [0.1] * 4


def test_a_list_and_then_its_last_entry() -> None:
    assert rates_of([1.0, 1.0, 1.0], learning_rates=[0.1, 0.3, 0.2]) == [0.1, 0.3, 0.2, 0.2]
    assert rates_of([1.0, 1.0], learning_rates=[0.1], learning_rate=9.0) == [0.1, 0.1, 0.1]
    by_numpy = rates_of([1.0, 1.0], learning_rates=numpy.linspace(0.2, 0.1, 2))
    assert by_numpy == [0.2, 0.1, 0.1]
    assert all(type(rate) is float for rate in by_numpy)


def test_a_list_is_followed_whatever_the_epochs_before_had() -> None:
    history = [EpochRecord(1, 5.0, {}), EpochRecord(2, 6.0, {})]
    assert epoch_learning_rate(ScheduleKeys(learning_rates=[1.0, 2.0, 3.0]), NewbobKeys(), 3, history) == 3.0
    assert epoch_learning_rate(ScheduleKeys(learning_rates=[1.0, 2.0]), NewbobKeys(), 3, []) == 2.0, "if nothing is known of them"


def test_newbob_decays_when_the_error_stagnates() -> None:
    """More of newbob is compared with RETURNN's (test_rates_returnn.py)."""
    # Relative changes (new - old) / new: -1, -0.01010, 0, +0.5; the threshold is -0.01.
    assert rates_of([2.0, 1.0, 0.99, 0.99, 1.98], **NEWBOB) == [0.8, 0.8, 0.8, 0.8, 0.4, 0.2]


def test_a_change_exactly_at_the_threshold_is_not_above_it() -> None:
    keys = {"learning_rate": 0.8, "newbob_relative_error_threshold": -1.0, "newbob_multi_num_epochs": 1}
    assert rates_of([1.0, 0.5], learning_rate_control="newbob", **keys)[-1] == 0.8
    growing = {**keys, "newbob_learning_rate_growth": 2.0}  # the mean of several epochs: nor is it below
    assert rates_of([1.0, 0.5], learning_rate_control="newbob_multi_epoch", **growing)[-1] == 0.8


def test_newbob_of_an_error_that_has_come_down_to_zero() -> None:
    for by_old in (False, True):
        # Down to 0 is better, staying there is no change, up from 0 is worse.
        assert rates_of([1.0, 0.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.8
        assert rates_of([0.0, 0.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.4
        assert rates_of([0.0, 1.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.4


def test_the_score_newbob_looks_at_where_none_is_named() -> None:
    assert error_key({"train_loss_a": 1, "dev_loss_c": 1, "dev_loss_b": 1, "eval_loss_a": 1}) == "dev_loss_b"
    assert error_key({"train_loss_b": 1, "train_loss_a": 1, "zest_loss_a": 1}) == "train_loss_a"
    assert error_key({"eval_loss_b": 1, "eval_loss_a": 1}) == "eval_loss_a"
    assert error_key({}) is None


def test_the_epochs_before_are_only_looked_at() -> None:
    history = [EpochRecord(1, 0.8, {"dev_loss_ce": 1.0}), EpochRecord(2, 0.8, {"dev_loss_ce": 1.0})]
    answers = {epoch_learning_rate(ScheduleKeys(**NEWBOB), NewbobKeys(), 3, history) for _ in range(3)}
    assert answers == {0.4}
    assert len(history) == 2


def test_decay_as_a_function() -> None:
    assert rates_of([1.0] * 3, **NEWBOB, newbob_learning_rate_decay=lambda rate: rate - 0.25) == pytest.approx(
        [0.8, 0.8, 0.55, 0.3]
    )


@pytest.mark.parametrize("rate", [None, "fast", float("nan"), -0.1])
def test_a_function_that_returns_no_rate(rate: object) -> None:
    with refused("newbob_learning_rate_decay: wrong-result"):
        rates_of([1.0, 1.0], learning_rate=0.1, learning_rate_control="newbob", newbob_learning_rate_decay=lambda _: rate)


def test_rates_of_single_epochs() -> None:
    assert rates_of([1.0] * 4, learning_rate=0.5, learning_rates={2: 0.1, 4: 0.3}) == [0.5, 0.1, 0.1, 0.3, 0.3]
    assert faults(ScheduleKeys(learning_rates={2: 0.1}).problems()) == ["learning_rates: missing"]


def test_a_rate_is_needed() -> None:
    assert faults(ScheduleKeys().problems()) == ["learning_rate: missing"]
    assert faults(ScheduleKeys(learning_rates=[]).problems()) == ["learning_rates: missing"]
    assert (
        faults(ScheduleKeys(learning_rate=0.1).problems()) == faults(ScheduleKeys(learning_rates=numpy.ones(2)).problems()) == []
    )
