"""What the log announces before a training."""

from pathlib import Path

import pytest

from hvdtrain.checkpoint.progress import Progress
from hvdtrain.runtime import log
from hvdtrain.settings import read_settings
from hvdtrain.start_up.announce import log_prospects
from hvdtrain.training.limits import TrainingLimits


@pytest.mark.parametrize(("file", "level"), [(Path("exp/model.005.pt"), 3), (None, 2)])
def test_a_loaded_model_that_counts_as_trained_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: Path | None, level: int
) -> None:
    (tmp_path / "config.py").write_text(
        "model = 'exp/model'\nlearning_rate = 0.1\nmax_seqs = 1\ntrain = {'files': 'train.hdf'}\n"
        "def get_model(**_): ...\ndef train_step(**_): ...\n"
    )
    lines: list[tuple[int, str]] = []
    monkeypatch.setattr(log, "write", lambda level, line: lines.append((level, line)))
    log_prospects(read_settings([tmp_path / "config.py"], {}), Progress(epoch=5, file=file), TrainingLimits(num_epochs=3), 3)
    assert (lines[-1][0], "++start_epoch 1 trains" in lines[-1][1]) == (level, file is None)
