"""Which models `cleanup_old_models` keeps."""

from math import nan
from pathlib import Path

import pytest

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.errors import ConfigError
from hvdtrain.plugins.cleanup.removal import Cleanup
from hvdtrain.plugins.cleanup.rule import CleanupRule, parse_rule
from hvdtrain.runtime import log
from hvdtrain.schedule.history import EpochRecord

# What RETURNN keeps of epochs 1 to n with the scores below.
KEPT = [
    (10, {}, [3, 4, 5, 7, 8, 9, 10]),
    (10, {"keep_last_n": 1, "keep_best_n": 1}, [4, 5, 8, 10]),
    (24, {}, [5, 10, 15, 20, 21, 22, 23, 24]),
    (50, {}, [5, 10, 20, 37, 40, 42, 47, 48, 49, 50]),
    (100, {}, [5, 10, 20, 37, 40, 69, 74, 80, 97, 98, 99, 100]),
    (101, {"keep_last_n": 1, "keep_best_n": 1}, [20, 40, 80, 101]),
    (240, {"keep_last_n": 1, "keep_best_n": 1}, [20, 40, 80, 101, 160, 240]),
    (480, {}, [20, 40, 80, 101, 160, 202, 303, 320, 404, 477, 478, 479, 480]),
]


@pytest.mark.parametrize(("last", "options", "kept"), KEPT)
def test_cleanup_keeps_what_returnn_keeps(last: int, options: dict[str, int], kept: list[int]) -> None:
    epochs = range(1, last + 1)
    scores = {epoch: {"dev_loss_ce": (epoch * 7919 % 101) / 101, "train_loss_ce": 1 / epoch} for epoch in epochs}
    assert list(CleanupRule(**options).epochs_to_keep(epochs, scores)) == kept


def test_mistakes_in_cleanup_are_told_together() -> None:
    assert parse_rule(False) is None
    with pytest.raises(ConfigError) as caught:
        parse_rule({"keep_last": 3, "keep_best_n": -1, "keep": 4})
    assert len(caught.value.problems) == 3


def test_a_model_whose_score_is_not_a_number_is_none_of_the_best() -> None:
    rule = CleanupRule(keep_last_n=1, keep_best_n=2, keep=[])
    for values, expected in (((nan, 9.0, 2.0, 3.0), [3, 4]), ((nan, 9.0, nan, nan), [2, 4]), ((nan, nan, nan, nan), [4])):
        scores = {epoch: {"dev_loss_ce": value} for epoch, value in enumerate(values, start=1)}
        assert list(rule.epochs_to_keep(scores, scores)) == expected


def test_the_best_models_by_a_score_that_rises_are_kept() -> None:
    scores = {epoch: {"dev_loss_bleu": bleu, "dev_loss_ce": 1.0} for epoch, bleu in enumerate((1.0, 9.0, 2.0, 3.0), start=1)}
    rule = CleanupRule(keep_last_n=1, keep_best_n=1, keep=[], higher_is_better=["bleu"])
    assert rule.epochs_to_keep(scores, scores) == {2: ["best dev_loss_bleu"], 4: ["last"]}
    assert CleanupRule(1, 1, []).epochs_to_keep(scores, scores) == {1: ["best dev_loss_bleu"], 4: ["last"]}
    ignoring = CleanupRule(1, 1, [], ignore_score_keys=["dev_loss_bleu"])
    assert ignoring.epochs_to_keep(scores, scores) == {4: ["last"]}
    assert CleanupRule(1, 0).epochs_to_keep(range(1, 10), {}) == {4: ["pattern"], 5: ["pattern"], 8: ["pattern"], 9: ["last"]}


def test_scores_to_ignore_that_no_epoch_has_are_named_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(log, "warning", lines.append)
    cleanup = Cleanup(CleanupRule(ignore_score_keys=["dev_loss_ce", "dev_los_bleu"]))
    for _ in range(2):
        record = EpochRecord(1, 0.1, {"dev_loss_ce": 1.0, "dev_loss_bleu": 2.0})
        cleanup.clean_up(CheckpointFolder(tmp_path / "model"), [record], lambda epochs: {})
    [line] = lines
    assert "ignore_score_keys: expected scores among dev_loss_bleu, dev_loss_ce, got 'dev_los_bleu'" in line
    assert "did you mean dev_loss_bleu?" in line
