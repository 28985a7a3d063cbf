"""What follows from evaluations within epochs: the best model, early stopping, the learning rate, reports and trackers."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
from launching import TOY, Finished, hvdtrain
from tensorboard_events import events

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.hooks import Age
from hvdtrain.checkpoint.kept_models import KeptModels
from hvdtrain.checkpoint.progress import BestModel, Progress
from hvdtrain.plugins.average.rules import AverageRule, Averages, make_rule
from hvdtrain.plugins.report.plots import score_figures
from hvdtrain.plugins.report.runs import read_runs
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys, early_stop_reason
from hvdtrain.schedule.history import EpochRecord, EvaluationRecord, merge_records
from hvdtrain.schedule.measure import Measure


def toy(corpus: Path, folder: Path, **keys: object) -> Finished:
    plain = {"corpus": corpus, "model": folder / "model", "evaluated": True, "num_epochs": 2, "eval_interval_steps": 6}
    return hvdtrain(TOY, plain | keys)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_best_model_within_an_epoch_is_kept(corpus: Path, tmp_path: Path) -> None:
    """The learning rate rises until the model gets worse."""
    keys: dict[str, object] = {"learning_rate": 20.0, "optimizer": {"class": "sgd"}, "losses": "mean", "use_tensorboard": True}
    keys |= {"average_checkpoints": {"best": 2}, "learning_rate_schedule": {"class": "constant", "num_warmup_steps": 40}}
    ended = toy(corpus, tmp_path, **keys)
    assert ended.status == 0, ended.err
    found = lines_of(tmp_path / "evaluations.jsonl")
    assert [line["global_step"] for line in found] == [6, 12, 18, 24, 30, 36]
    epochs = lines_of(tmp_path / "scores.jsonl")
    scores = {(line["epoch"], line["global_step"]): line["scores"]["dev_loss_ce"] for line in found}
    scores |= {(line["epoch"], None): line["scores"]["dev_loss_ce"] for line in epochs}
    order = sorted(scores, key=lambda key: scores[key])
    best = json.loads((tmp_path / "best.json").read_text())
    assert (best["epoch"], best.get("step")) == order[0]
    assert best["step"] is not None, "the test wants a best model within an epoch"
    assert best["saved"]["file"] == best["file"] == f"model.{best['epoch']:03d}.step-{best['step']}.pt"
    kept = {path.name for path in tmp_path.glob("model.*.step-*")}
    assert kept == {f"model.{epoch:03d}.step-{step}.pt" for epoch, step in order[:2] if step is not None}
    assert f"epoch {best['epoch']}, step {found[0]['step']}, is the best so far" in ended.out
    assert "evaluation after step 6 (" in ended.out
    again = toy(corpus, tmp_path, task="eval", load_epoch="best", eval_interval_steps=None)
    assert again.status == 0, again.err
    assert f"dev: ce {scores[order[0]]:.4g}" in again.out, "the model is the one that was evaluated"
    [average] = json.loads((tmp_path / "averages.json").read_text())
    assert set(average["of"]) == {
        f"model.{epoch:03d}.pt" if step is None else f"model.{epoch:03d}.step-{step}.pt" for epoch, step in order[:2]
    }
    written = [(event.step, event.summary.value) for event in events(tmp_path / "tensorboard")]
    values = {(step, value.tag): value.simple_value for step, of_step in written for value in of_step}
    assert all(0 < line["elapsed"] <= epochs[line["epoch"] - 1]["elapsed"] and line["seconds"] > 0 for line in found)
    curves = [curve for figure in score_figures(read_runs([tmp_path])) for curve in figure.panels[0].curves]
    [within] = [curve for curve in curves if curve.name == "dev, within epochs" and len(curve.y) == 6][:1]
    assert within.x["step"] == [6, 12, 18, 24, 30, 36]
    assert within.y == [float(f"{line['scores']['dev_loss_ce']:.6g}") for line in found]
    for line in found:
        assert values[line["global_step"], "dev/ce"] == pytest.approx(line["scores"]["dev_loss_ce"])


def test_early_stopping_counts_evaluations_and_ends_the_epoch(corpus: Path, tmp_path: Path) -> None:
    keys = {"early_stopping_patience": 2, "early_stopping_min_difference": 9.0, "eval_interval_for": ["early_stopping"]}
    ended = toy(corpus, tmp_path, num_epochs=5, **keys)
    assert ended.status == 0, ended.err
    assert "epoch 1 ends after step 18" in ended.out
    [epoch] = lines_of(tmp_path / "scores.jsonl")
    found = lines_of(tmp_path / "evaluations.jsonl")
    assert (epoch["steps"], [line["step"] for line in found]) == (18, [6, 12, 18])
    assert epoch["num_sequences"] == 18 * 12
    assert epoch["scores"]["dev_loss_ce"] == found[-1]["scores"]["dev_loss_ce"], "of the same weights"
    assert json.loads((tmp_path / "best.json").read_text())["epoch"] == 1
    assert not list(tmp_path.glob("model.*.step-*")), "evaluations do not compete for the best model"
    again = toy(corpus, tmp_path, num_epochs=5, **keys)
    assert (again.status, len(lines_of(tmp_path / "scores.jsonl"))) == (0, 1)
    assert "nothing to do" in again.out


def test_newbob_decides_after_every_evaluation(corpus: Path, tmp_path: Path) -> None:
    keys = {"learning_rate_control": "newbob", "newbob_relative_error_threshold": -10.0, "eval_interval_for": ["learning_rate"]}
    ended = toy(corpus, tmp_path, **keys)
    assert ended.status == 0, ended.err
    rates = [line["learning_rate"] for line in lines_of(tmp_path / "evaluations.jsonl")]
    assert rates == [0.01, 0.01, 0.005, 0.00125, 0.000625, 0.0003125], "twice at the end of the first epoch, which counts, too"
    steps = {(line["epoch"], line["step"]): line["learning_rate"] for line in lines_of(tmp_path / "steps.jsonl")}
    assert [steps[1, step] for step in (12, 13, 18, 19)] == [0.01, 0.005, 0.005, 0.0025]
    assert [line["learning_rate"] for line in lines_of(tmp_path / "scores.jsonl")] == [0.0025, 0.00015625]


def test_by_the_clock(corpus: Path, tmp_path: Path) -> None:
    ended = toy(corpus, tmp_path, eval_interval_steps=None, eval_interval_minutes=1e-6, num_epochs=1)
    assert ended.status == 0, ended.err
    assert lines_of(tmp_path / "evaluations.jsonl")


def test_keys_that_promise_nothing_are_refused(corpus: Path, tmp_path: Path) -> None:
    assert toy(corpus, tmp_path, evaluated=False).problems == ("eval_interval_steps: missing",)
    wrong: dict[str, tuple[dict[str, object], str]] = {
        "early": ({"eval_interval_for": ["early_stopping"]}, "eval_interval_for: missing"),
        "rate": ({"eval_interval_for": ["learning_rate"]}, "eval_interval_for: missing"),
        "use": ({"eval_interval_for": ["best"]}, "eval_interval_for: out-of-range"),
        "steps": ({"eval_interval_steps": 0}, "eval_interval_steps: out-of-range"),
    }
    for keys, expected in wrong.values():
        assert toy(corpus, tmp_path, **keys).problems == (expected,)
    hint = toy(corpus, tmp_path, evaluate_interval_steps=3)
    assert "eval_interval_steps" in hint.err
    assert "log_interval_steps" not in hint.err


def test_files_of_an_abandoned_training_are_not_taken_for_those_of_this_one(corpus: Path, tmp_path: Path) -> None:
    """Models within epochs and averages that stayed in the folder, of which the names are the same."""
    keys: dict[str, object] = {"num_epochs": 1, "average_checkpoints": [{"steps": [6]}, {"last": 1}], "ema_decay": 0.9}
    assert toy(corpus, tmp_path, **keys).status == 0
    abandoned = json.loads((tmp_path / "averages.json").read_text())
    for name in ("model.001.pt", "model.001.opt.pt", "scores.jsonl", "evaluations.jsonl"):
        (tmp_path / name).unlink()
    ended = toy(corpus, tmp_path, learning_rate=0.001, **keys)
    assert ended.status == 0, ended.err
    made = json.loads((tmp_path / "averages.json").read_text())
    scores = [one["scores"]["dev_loss_ce"] for one in made]
    [within, *_], [epoch] = lines_of(tmp_path / "evaluations.jsonl"), lines_of(tmp_path / "scores.jsonl")
    assert scores[:2] == [within["scores"]["dev_loss_ce"], epoch["scores"]["dev_loss_ce"]], "averages of one model each"
    for now, before in zip(made, abandoned, strict=True):
        assert (now["name"], now["of"]) == (before["name"], before["of"])
        assert now["scores"] != before["scores"]


def history() -> list[EpochRecord]:
    within = [EvaluationRecord(epoch, 0.1, {"dev_loss_ce": score}, {"ce": 1.0}, step) for epoch, step, score in WITHIN]
    return merge_records([EpochRecord(1, 0.1, {"dev_loss_ce": 2.0}, {"ce": 1.0})], within)


WITHIN = [(1, 5, 3.0), (1, 10, 1.0), (2, 25, 1.5), (2, 30, 1.2)]


def test_records_are_in_order_and_patience_counts_them() -> None:
    records = history()
    assert [record.at_step for record in records] == [5, 10, None, 25, 30]
    reasons = [early_stop_reason(EarlyStoppingKeys(early_stopping_patience=patience), records, Measure()) for patience in (3, 4)]
    assert reasons == ["dev_loss_ce was best after step 10 in epoch 1 (1), early_stopping_patience is 3", None]


def test_models_within_epochs_that_are_kept(tmp_path: Path) -> None:
    records = history()
    everything = {record.age for record in records}
    folder = CheckpointFolder(tmp_path / "model")
    best = BestModel(folder, Measure(), within_epochs=True)
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    progress = Progress(history=[record for record in records if record.at_step is None], evaluations=evaluations)

    def kept(existing: set[Age], *rules: AverageRule) -> set[Age]:
        needed = KeptModels(folder, best, [Averages(rules, Measure(), num_epochs=9)]).needed(progress, existing)
        return {age for age in needed if age[1] != inf}

    assert kept(everything) == {(1, 10)}
    assert kept(everything, make_rule("best", 3)) == {(1, 10), (2, 30), (2, 25)}
    assert kept(everything, make_rule("steps", [5])) == {(1, 5), (1, 10)}
    assert kept(everything - {(1, 10)}) == {(2, 30)}
