"""The learning rate of an epoch: constant, a list, newbob."""

from dataclasses import fields

import numpy
import pytest
from launching import faults

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


def test_a_list_goes_over_into_newbob() -> None:
    # Epoch 4 is the first without an entry. The error grew from epoch 2 to epoch 3: half of the last rate.
    assert rates_of([1.0, 0.5, 0.6], learning_rates=[0.1, 0.4, 0.2], learning_rate_control="newbob") == [0.1, 0.4, 0.2, 0.1]


@pytest.mark.parametrize("control", ["newbob", "newbob_rel", "newbob_relative"])
def test_newbob_decays_when_the_error_stagnates(control: str) -> None:
    # Relative changes (new - old) / new: -1, -0.01010, 0, +0.5; the threshold is -0.01.
    errors = [2.0, 1.0, 0.99, 0.99, 1.98]
    rates = rates_of(errors, learning_rate_control=control, learning_rate=0.8)
    assert rates == [0.8, 0.8, 0.8, 0.8, 0.4, 0.2]


def test_newbob_needs_two_epochs() -> None:
    assert rates_of([5.0], **NEWBOB) == [0.8, 0.8]


def test_newbob_compares_with_the_threshold() -> None:
    # (0.8 - 1.0) / 0.8 = -0.25 is above -0.3, but not above -0.2.
    assert rates_of([1.0, 0.8], **NEWBOB, newbob_relative_error_threshold=-0.3)[-1] == 0.4
    assert rates_of([1.0, 0.8], **NEWBOB, newbob_relative_error_threshold=-0.2)[-1] == 0.8
    # Exactly at the threshold is not above it: (0.5 - 1.0) / 0.5 = -1.
    assert rates_of([1.0, 0.5], **NEWBOB, newbob_relative_error_threshold=-1.0)[-1] == 0.8


def test_newbob_relative_to_the_older_error() -> None:
    # (0.8 - 1.0) / 1.0 = -0.2 is above -0.22; relative to the newer error, -0.25 is not.
    keys = {**NEWBOB, "newbob_relative_error_threshold": -0.22}
    assert rates_of([1.0, 0.8], **keys, newbob_relative_error_div_by_old=True)[-1] == 0.4
    assert rates_of([1.0, 0.8], **keys, newbob_relative_error_div_by_old=False)[-1] == 0.8


def test_newbob_divides_by_the_size_of_the_error() -> None:
    # A log-likelihood: (-2 - -1) / |-2| = -0.5 is an improvement.
    assert rates_of([-1.0, -2.0], **NEWBOB)[-1] == 0.8
    assert rates_of([-2.0, -1.0], **NEWBOB)[-1] == 0.4


def test_newbob_of_an_error_that_has_come_down_to_zero() -> None:
    for by_old in (False, True):
        # Down to 0 is better, staying there is no change, up from 0 is worse.
        assert rates_of([1.0, 0.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.8
        assert rates_of([0.0, 0.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.4
        assert rates_of([0.0, 1.0], **NEWBOB, newbob_relative_error_div_by_old=by_old)[-1] == 0.4


def test_newbob_decay_and_growth_factors() -> None:
    keys = {**NEWBOB, "newbob_learning_rate_decay": 0.25, "newbob_learning_rate_growth": 2.0}
    # Better (grow), worse (decay), better (grow).
    assert rates_of([4.0, 2.0, 3.0, 1.0], **keys) == [0.8, 0.8, 1.6, 0.4, 0.8]


def test_newbob_does_not_decay_below_the_minimum() -> None:
    assert rates_of([1.0] * 5, **NEWBOB, min_learning_rate=0.15) == [0.8, 0.8, 0.4, 0.2, 0.15, 0.15]


def test_the_minimum_is_for_decays_only() -> None:
    keys = {**NEWBOB, "min_learning_rate": 0.5, "newbob_learning_rate_growth": 0.5}
    assert rates_of([4.0, 2.0, 1.0], **keys) == [0.8, 0.8, 0.4, 0.2]


def test_newbob_keeps_a_new_rate_for_some_epochs() -> None:
    keys = {**NEWBOB, "learning_rate_control_min_num_epochs_per_new_lr": 3}
    # The error never gets better; each rate lasts for three epochs.
    assert rates_of([1.0] * 9, **keys) == [0.8] * 3 + [0.4] * 3 + [0.2] * 3 + [0.1]
    assert rates_of([1.0] * 3, **{**keys, "learning_rate_control_min_num_epochs_per_new_lr": 1}) == [0.8, 0.8, 0.4, 0.2]


def test_newbob_relative_to_the_learning_rate() -> None:
    # The change of epoch 4 is (0.98 - 1.0) / 0.98 = -0.0204. At half of the first rate it counts as -0.0408.
    errors = [1.0, 1.0, 1.0, 0.98]
    keys = {**NEWBOB, "newbob_relative_error_threshold": -0.03, "learning_rate_control_min_num_epochs_per_new_lr": 2}
    assert rates_of(errors, **keys) == [0.8, 0.8, 0.4, 0.4, 0.2]
    assert rates_of(errors, **keys, learning_rate_control_relative_error_relative_lr=True) == [0.8, 0.8, 0.4, 0.4, 0.4]


def test_newbob_changes_nothing_where_an_error_is_missing() -> None:
    assert rates_of([1.0, None, 1.0], **NEWBOB) == [0.8] * 4


def test_newbob_looks_at_the_score_that_is_named() -> None:
    keys = ScheduleKeys(**NEWBOB)
    named = NewbobKeys(learning_rate_control_error_measure="dev_loss_wer")
    first_there = NewbobKeys(learning_rate_control_error_measure=["dev_error", "dev_loss_wer"])
    history = [
        EpochRecord(1, 0.8, {"dev_loss_ce": 2.0, "dev_loss_wer": 0.1}),
        EpochRecord(2, 0.8, {"dev_loss_ce": 1.0, "dev_loss_wer": 0.1}),
    ]
    assert epoch_learning_rate(keys, NewbobKeys(), 3, history) == 0.8
    assert epoch_learning_rate(keys, named, 3, history) == 0.4
    assert epoch_learning_rate(keys, first_there, 3, history) == 0.4


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


def test_newbob_by_the_change_itself() -> None:
    # The changes are -0.5, -0.005, +0.1; the threshold is -0.01.
    keys = {"learning_rate": 0.8, "learning_rate_control": "newbob_abs"}
    assert rates_of([1.0, 0.5, 0.495, 0.595], **keys) == [0.8, 0.8, 0.8, 0.4, 0.2]
    assert rates_of([1.0, 0.5, 0.495, 0.595], **keys, newbob_error_threshold=0.0)[-2:] == [0.8, 0.4]


def test_newbob_by_the_mean_of_several_epochs() -> None:
    keys = {"learning_rate": 0.8, "learning_rate_control": "newbob_multi_epoch", "newbob_multi_num_epochs": 2}
    # Looked at before epochs 3, 5, 7: changes by then (-1), (-1, -1 and 0: mean -0.67 of the last two -0.5), (0, 0).
    assert rates_of([4.0, 2.0, 1.0, 1.0, 1.0, 1.0], **keys) == [0.8] * 6 + [0.4]
    # Every epoch: before epoch 5 the mean of -1 and 0, before 6 of 0 and 0.
    assert rates_of([4.0, 2.0, 1.0, 1.0, 1.0], **keys, newbob_multi_update_interval=1) == [0.8] * 5 + [0.4]
    # Grows where the mean is far enough below.
    growing = {**keys, "newbob_learning_rate_growth": 2.0, "newbob_relative_error_grow_threshold": -0.6}
    assert rates_of([4.0, 2.0, 1.0, 0.9], **growing) == [0.8, 0.8, 1.6, 1.6, 1.6]


def test_decay_as_a_function() -> None:
    assert rates_of([1.0] * 3, **NEWBOB, newbob_learning_rate_decay=lambda rate: rate - 0.25) == pytest.approx(
        [0.8, 0.8, 0.55, 0.3]
    )


def test_rates_of_single_epochs() -> None:
    assert rates_of([1.0] * 4, learning_rate=0.5, learning_rates={2: 0.1, 4: 0.3}) == [0.5, 0.1, 0.1, 0.3, 0.3]
    assert faults(ScheduleKeys(learning_rates={2: 0.1}).problems()) == ["learning_rates: missing"]


def test_a_rate_is_needed() -> None:
    assert faults(ScheduleKeys().problems()) == ["learning_rate: missing"]
    assert faults(ScheduleKeys(learning_rates=[]).problems()) == ["learning_rates: missing"]
    assert (
        faults(ScheduleKeys(learning_rate=0.1).problems()) == faults(ScheduleKeys(learning_rates=numpy.ones(2)).problems()) == []
    )
