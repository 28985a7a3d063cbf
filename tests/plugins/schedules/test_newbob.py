"""Newbob: the rate of an epoch follows from the errors of the epochs before."""

from dataclasses import fields
from math import nan

import pytest
from launching import refused

from hvdtrain.plugins.schedules.keys import NewbobKeys
from hvdtrain.plugins.schedules.newbob import Newbob
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import negate_higher
from hvdtrain.schedule.rates import ScheduleKeys, epoch_learning_rate

OF_NEWBOB = {field.name for field in fields(NewbobKeys)}


def rates_of(errors: list[float | None], measure: str = "dev_loss_ce", **keys: object) -> list[float]:
    """The rates of the epochs, one after the other, where each epoch ends with an error; and that of the epoch after."""
    schedule = ScheduleKeys(**{name: value for name, value in keys.items() if name not in OF_NEWBOB})
    newbob = Newbob(
        schedule.learning_rate_control, NewbobKeys(**{name: value for name, value in keys.items() if name in OF_NEWBOB})
    )
    history: list[EpochRecord] = []
    rates = []
    for epoch, error in enumerate([*errors, None], start=1):
        rates.append(epoch_learning_rate(schedule, newbob, epoch, history))
        history.append(EpochRecord(epoch, rates[-1], {} if error is None else {measure: error}))
    return rates


NEWBOB = {"learning_rate_control": "newbob", "learning_rate": 0.8}


def test_newbob_decays_when_the_error_stagnates() -> None:
    """More of newbob is compared with RETURNN's (test_as_returnn.py)."""
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


def test_the_epochs_before_are_only_looked_at() -> None:
    history = [EpochRecord(1, 0.8, {"dev_loss_ce": 1.0}), EpochRecord(2, 0.8, {"dev_loss_ce": 1.0})]
    answers = {Newbob("newbob", NewbobKeys()).rate(0.8, 3, history) for _ in range(3)}
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


def history_of(*scores: float) -> list[EpochRecord]:
    return [EpochRecord(epoch, 0.8, {"dev_loss_bleu": score}) for epoch, score in enumerate(scores, start=1)]


def test_it_says_where_it_cannot_compare() -> None:
    keys = NewbobKeys(newbob_multi_num_epochs=2)
    newbob = Newbob("newbob", keys, ["dev_loss_bleu"])
    kept = "newbob: dev_loss_bleu of epoch 2 is not a number: epoch {} keeps the learning rate"
    assert newbob.warning(3, history_of(30.0, nan)) == kept.format(3)
    assert newbob.warning(4, history_of(30.0, nan, 20.0)) == kept.format(4)
    assert newbob.rate(0.8, 4, history_of(30.0, nan, 20.0)) == 0.8
    assert newbob.warning(5, history_of(30.0, nan, 20.0, 20.0)) is None
    told = "newbob_multi_epoch: dev_loss_bleu of epoch 1, 2 is not a number: epoch 4 keeps the learning rate"
    assert Newbob("newbob_multi_epoch", keys, ["dev_loss_bleu"]).warning(4, history_of(nan, nan, 20.0)) == told


def test_a_score_that_rises() -> None:
    def rate(*scores: float, higher: tuple[str, ...] = ("bleu",)) -> float:
        history = negate_higher(history_of(*scores), higher)
        return Newbob("newbob", NewbobKeys(), ["dev_loss_bleu"]).rate(0.8, len(scores) + 1, history)

    assert rate(20.0, 30.0) == 0.8, "it is better"
    assert rate(30.0, 20.0) == 0.4
    assert rate(20.0, 30.0, higher=()) == 0.4


def test_it_follows_the_loss_that_is_minimized() -> None:
    history = [
        EpochRecord(1, 0.8, {"dev_loss_accuracy": 0.9, "dev_loss_ce": 0.5}, {"ce": 1.0}),
        EpochRecord(2, 0.8, {"dev_loss_accuracy": 0.95, "dev_loss_ce": 0.4}, {"ce": 1.0}),
    ]
    assert Newbob("newbob", NewbobKeys()).rate(0.8, 3, history) == 0.8, "it is better"
    assert Newbob("newbob", NewbobKeys()).rate(0.8, 3, history[::-1]) == 0.4
