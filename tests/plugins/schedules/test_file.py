"""The learning rate file: old forms that are read, and what is no such file."""

import math
from pathlib import Path

import pytest
from returnn.learning_rate_control import LearningRateControl

from hvdtrain.errors import ConfigError, DataError
from hvdtrain.plugins.schedules.file import LearningRateFile, read_learning_rate_file
from hvdtrain.report.epoch import EpochReport
from hvdtrain.schedule.history import EpochRecord

EpochData = LearningRateControl.EpochData


def test_forms_that_returnn_wrote_over_the_years(tmp_path: Path) -> None:
    path = tmp_path / "rates"
    path.write_text(
        "{1: EpochData(0.5, {'dev_score': np.float32(0.25), 'train_score': nan}),\n"
        "2: EpochData(learningRate=np.float64(0.25), error={':meta:hostname': 'here', 'dev_score': -inf}),\n"
        "3: EpochData(learningRate=None, error={'dev_score': 1.0}),\n"
        "4: 0.125,\n}\n"
    )
    first, second = read_learning_rate_file(path)
    assert (first.epoch, first.learning_rate, first.scores["dev_score"]) == (1, 0.5, 0.25)
    assert math.isnan(first.scores["train_score"])
    assert second == EpochRecord(2, 0.25, {"dev_score": -math.inf})


@pytest.mark.parametrize(
    "text", ["{1: EpochData(", "[1, 2]", "{1: __import__('os').system('true')}", "{1: EpochData(learningRate='fast')}", "\x00"]
)
def test_what_is_no_such_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rates"
    path.write_text(text)
    with pytest.raises(DataError, match=r"rates: expected a learning rate file, .* got: "):
        read_learning_rate_file(path)


def test_a_file_that_cannot_be_written_is_refused_before_training(tmp_path: Path) -> None:
    path = tmp_path / "file" / "rates"
    LearningRateFile(path, [])
    assert not path.exists(), "a file without epochs would be refused by the next start"
    path.parent.rmdir()
    path.parent.write_text("")
    with pytest.raises(ConfigError, match="learning_rate_file: expected a writable file, got .*file/rates: File exists"):
        LearningRateFile(path, [])


def test_epochs_that_a_stopped_run_lost_are_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "rates"
    for record in [EpochRecord(epoch, 0.1 * epoch, {"dev_loss_ce": 1.0}) for epoch in (1, 2, 3)]:
        LearningRateFile(path, read_learning_rate_file(path) if path.exists() else []).add(record)
    again = EpochRecord(2, 7.0, {"dev_loss_ce": 2.0})
    LearningRateFile(path, read_learning_rate_file(path)).add(again)
    assert [record.learning_rate for record in read_learning_rate_file(path)] == [0.1, 7.0]


def test_what_is_noted_of_an_epoch_beside_its_scores_stays(tmp_path: Path) -> None:
    """RETURNN's EpochData takes it for metadata."""
    path = tmp_path / "rates"
    path.write_text("{1: EpochData(learningRate=0.5, error={':meta:hostname': 'here', ':meta:odd': [1], 'dev_score': 1.0})}")
    report = EpochReport(2, 10, 30, 4.6, 0.9, 0.25, 100, {"train_loss_ce": 2.0, "dev_loss_ce": math.inf})
    LearningRateFile(path, read_learning_rate_file(path)).epoch(report)
    read = eval(path.read_text(), {"EpochData": EpochData})
    assert read[1].error == {"dev_score": 1.0}
    assert read[1].meta == {"hostname": "here"}
    assert read[2].error == {"train_loss_ce": 2.0, "dev_loss_ce": math.inf}
    numbers = {name: value for name, value in read[2].meta.items() if isinstance(value, (int, float))}
    assert numbers == {
        "effective_learning_rate": 0.25,
        "epoch_num_train_steps": 10,
        "epoch_train_time_secs": 5,
        "global_train_step": 20,
        "global_train_step_end": 30,
    }
    assert set(read[2].meta) - set(numbers) == {"hostname", "hvdtrain", "time"}
    assert [record.scores for record in read_learning_rate_file(path)] == [read[1].error, read[2].error]
