"""The rows about an epoch and at the end of a training: text from numbers."""

from dataclasses import replace
from datetime import datetime

from hvdtrain.report.epoch import EpochReport
from hvdtrain.report.json_lines import as_line
from hvdtrain.report.rows import cost_row, end_row, end_text, progress_parts, score_row, speed_text
from hvdtrain.runtime.log import wrap

REPORT = EpochReport(
    epoch=3,
    steps=470,
    global_step=1410,
    elapsed=107.2,
    computing=0.99,
    learning_rate=5e-4,
    num_sequences=13_500,
    scores={
        "train_loss_ctc": 3.41,
        "eval_loss_ctc": 2.95,
        "eval_loss_wer": 0.574,
        "dev_loss_ctc": 2.987,
        "dev_loss_wer": 0.583,
    },
    padding={"classes": 0.3, "data": 0.041},
    seconds=[{"compute": 107.0, "evaluation": 34.2, "saving": 0.3}],
    learning_rates={"first": 1.1e-3, "lowest": 5e-4, "highest": 1.1e-3, "mean": 8e-4},
    num_frames={"classes": 13_600, "data": 118_000},
    memory=760_000_000,
)
NOW = datetime(2026, 11, 24, 21, 10, 50).timestamp()


def test_scores_stand_in_columns_the_compared_ones_after_those_of_training() -> None:
    best = score_row(REPORT, 12, "dev_loss_wer", is_best=True)
    assert best == "epoch  3/12  train ctc 3.410 | dev ctc 2.987  wer 0.583  best so far | eval ctc 2.950  wer 0.574"
    later = replace(REPORT, epoch=10, scores={name: 10 * score for name, score in REPORT.scores.items()})
    other = score_row(later, 12, "dev_loss_wer", is_best=False)
    assert other == "epoch 10/12  train ctc 34.10 | dev ctc 29.87  wer 5.830              | eval ctc 29.50  wer 5.740"
    assert score_row(replace(REPORT, scores={"train_loss_ce": float("nan")}), 3, None, is_best=False) == "epoch 3/3  train ce nan"
    alone = replace(REPORT, scores={"train_loss_ce": 0.25})
    assert score_row(alone, 3, "train_loss_ce", is_best=True) == "epoch 3/3  train ce 0.250  best so far"


def test_what_an_epoch_took() -> None:
    row = cost_row(REPORT, 1270.0, NOW, 13)
    assert row == (
        "             1:47 train, 0:34 eval | computing 99.0 % | 126 seq/s, 1.1 k frames/s | 725 MB | lr 1.1e-3 -> 5e-4 | "
        "padding 4 % | left 0:21:10, ends 21:32"
    )
    least = replace(REPORT, seconds=[], learning_rates=None, padding={}, num_frames={}, memory=None, elapsed=0.0)
    assert cost_row(least, None, NOW, 2) == "  0.0 s train | computing 99.0 % | lr 5e-4"
    slow = replace(REPORT, seconds=[{"evaluation": 34.0, "saving": 20.0}])
    assert "1:47 train, 0:34 eval, 0:20 saving | " in cost_row(slow, None, NOW, 2)
    assert speed_text(4.25, {"data": 4.25}) == "4.2 seq/s"


def test_the_end_has_a_day_if_it_is_not_today() -> None:
    assert [end_text(NOW, hours * 3600) for hours in (2, 3, 30, 24 * 8)] == ["23:10", "Wed 00:10", "Thu 03:10", "2026-12-02"]


def test_a_narrow_terminal_has_rows_on_several_lines() -> None:
    rows = score_row(REPORT, 12, "dev_loss_wer", is_best=False), cost_row(REPORT, 1270.0, NOW, 13)
    assert [line for row in rows for line in wrap(row, 79, 13)] == [
        "epoch  3/12  train ctc 3.410 | dev ctc 2.987  wer 0.583",
        "             eval ctc 2.950  wer 0.574",
        "             1:47 train, 0:34 eval | computing 99.0 %",
        "             126 seq/s, 1.1 k frames/s | 725 MB | lr 1.1e-3 -> 5e-4",
        "             padding 4 % | left 0:21:10, ends 21:32",
    ]
    assert wrap(rows[0], 200, 13) == [rows[0]]
    long = "epoch 1  " + "  ".join(f"loss{number} 1.234" for number in range(6))
    lines = wrap(long, 40, 9)
    assert lines == [
        "epoch 1  loss0 1.234  loss1 1.234",
        *[f"         loss{number} 1.234  loss{number + 1} 1.234" for number in (2, 4)],
    ]
    assert wrap("a" * 90 + " | b", 40, 4) == ["a" * 90, "    b"], "a word is not cut"


def test_the_end_of_a_training() -> None:
    best = {"epoch": 9, "measure": "dev_loss_wer", "score": 0.523, "higher_is_better": False, "file": "model.009.pt"}
    row, words = end_row(1690.0, best, "exp/g2p", "hvdtrain report exp/g2p")
    assert row == (
        "total 0:28:10 | best epoch 9: dev wer 0.523 (lower is better) | exp/g2p/model.009.pt | next: hvdtrain report exp/g2p"
    )
    assert words == "best epoch 9"
    within = {**best, "step": 40, "file": None, "higher_is_better": True, "measure": "dev_loss_bleu"}
    assert (
        end_row(None, within, ".", None)[0] == "best epoch 9, step 40: dev bleu 0.523 (higher is better) | its model is not kept"
    )
    assert end_row(None, None, ".", None) == ("", "")


def test_parts_of_a_line_about_a_step() -> None:
    assert progress_parts("ce 0.5", (126.0, {"data": 1130.0}), 5 << 30) == ["mean ce 0.5", "126 seq/s, 1.1 k frames/s", "5.0 GB"]
    assert progress_parts("", None, None) == []


def test_what_only_the_log_shows_is_not_in_scores_jsonl() -> None:
    line = as_line(REPORT)
    assert not {"num_frames", "memory", "computing_of_ranks"} & line.keys()
    assert line["padding"] == REPORT.padding
