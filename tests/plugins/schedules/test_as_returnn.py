"""Rates and files as RETURNN's own code makes them: same scores in, same learning rates out; each reads the other's file."""

import random
from pathlib import Path

import pytest
from returnn.config import Config
from returnn.learning_rate_control import load_learning_rate_control_from_config

from hvdtrain.plugins.schedules.file import LearningRateFile, read_learning_rate_file
from hvdtrain.plugins.schedules.keys import NewbobKeys
from hvdtrain.plugins.schedules.newbob import Newbob
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import wanted_of
from hvdtrain.schedule.rates import ScheduleKeys, epoch_learning_rate

CONTROLS = ["constant", "newbob", "newbob_rel", "newbob_relative", "newbob_abs", "newbob_multi_epoch"]


def some_keys(chance: random.Random, control: str) -> tuple[dict, dict]:
    """Keys of both sections, drawn at random."""
    schedule = {"learning_rate": chance.choice([0.1, 1.0]), "learning_rate_control": control}
    if chance.random() < 0.3:
        schedule["learning_rates"] = chance.choice([[0.2, 0.3], {1: 0.2, 4: 0.05}])
    newbob = {
        "newbob_relative_error_threshold": chance.choice([-0.01, 0.0, -0.1]),
        "newbob_error_threshold": chance.choice([-0.01, -0.05]),
        "newbob_learning_rate_decay": chance.choice([0.5, 0.9]),
        "newbob_learning_rate_growth": chance.choice([1.0, 1.1, 0.5]),
        "newbob_relative_error_div_by_old": chance.random() < 0.5,
        "learning_rate_control_relative_error_relative_lr": chance.random() < 0.5,
        "learning_rate_control_min_num_epochs_per_new_lr": chance.choice([0, 1, 2, 3]),
        "min_learning_rate": chance.choice([0.0, 0.04]),
        "newbob_multi_num_epochs": chance.choice([1, 2, 3]),
    }
    if chance.random() < 0.5:
        newbob["newbob_multi_update_interval"] = chance.choice([1, 2])
    if chance.random() < 0.5:
        newbob["newbob_relative_error_grow_threshold"] = newbob["newbob_relative_error_threshold"] - 0.05
    if chance.random() < 0.5:
        newbob["learning_rate_control_error_measure"] = chance.choice(["dev_loss_wer", ["nothing", "train_loss_ce"]])
    return schedule, newbob


@pytest.mark.parametrize("control", CONTROLS)
def test_the_same_scores_give_the_same_rates(control: str) -> None:
    chance = random.Random(control)
    changed = 0
    for _ in range(40):
        schedule, newbob = some_keys(chance, control)
        rule = None
        if control != "constant":
            measure = newbob.get("learning_rate_control_error_measure")
            options = {name: value for name, value in newbob.items() if name != "learning_rate_control_error_measure"}
            rule = Newbob(control, NewbobKeys(**options), wanted_of(measure))
        theirs = load_learning_rate_control_from_config(Config({**schedule, **newbob}))
        history: list[EpochRecord] = []
        error = chance.choice([2.0, -2.0])  # of a log-likelihood
        for epoch in range(1, 13):
            rate = epoch_learning_rate(ScheduleKeys(**schedule), rule, epoch, history)
            assert rate == theirs.get_learning_rate_for_epoch(epoch), (schedule, newbob, history)
            changed += bool(history) and rate != history[-1].learning_rate
            error *= chance.uniform(0.8, 1.05)
            scores = {name: error * chance.uniform(0.98, 1.02) for name in ("train_loss_ce", "dev_loss_ce", "dev_loss_wer")}
            if chance.random() < 0.05:
                scores = {}
            history.append(EpochRecord(epoch, rate, scores))
            theirs.set_epoch_error(epoch, scores)
    assert changed > 20 or control == "constant"


RECORDS = [
    EpochRecord(1, 0.001, {"dev_loss_ce": 0.7, "train_loss_ce": 0.9, "train_loss_b": float("inf")}),
    EpochRecord(2, 5e-4, {"dev_loss_ce": 1 / 3, "train_loss_ce": 0.5}),
]


def test_returnn_reads_what_is_written(tmp_path: Path) -> None:
    path = tmp_path / "made" / "learning_rates"
    file = LearningRateFile(path, RECORDS[:1])
    file.add(RECORDS[1])
    theirs = load_learning_rate_control_from_config(Config({"learning_rate": 9.0, "learning_rate_file": str(path)}))
    read = {epoch: (data.learning_rate, data.error) for epoch, data in theirs.epoch_data.items()}
    assert read == {record.epoch: (record.learning_rate, record.scores) for record in RECORDS}
    # Byte for byte what it writes itself.
    text = path.read_text()
    theirs.save()
    assert path.read_text() == text
    assert [other.name for other in path.parent.iterdir()] == ["learning_rates"]


def test_what_returnn_wrote_is_read(tmp_path: Path) -> None:
    path = tmp_path / "learning_rates"
    keys = {"learning_rates": [0.1, 0.2, 0.3, 0.4], "learning_rate": 0.1, "learning_rate_file": str(path)}
    theirs = load_learning_rate_control_from_config(Config(keys))
    for record in RECORDS:
        theirs.set_epoch_error(record.epoch, {**record.scores, ":meta:epoch_num_train_steps": 10.0})
    theirs.save()
    # Epochs 3 and 4 have a rate and no scores yet.
    assert read_learning_rate_file(path) == [
        EpochRecord(record.epoch, rate, record.scores) for record, rate in zip(RECORDS, [0.1, 0.2], strict=True)
    ]
