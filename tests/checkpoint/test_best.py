"""The best epoch: which score decides, what best.json says of it, and what is told if there is no such score."""

import json
from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from documented import first_example
from launching import TOY, faults, hvdtrain, refused

from hvdtrain.checkpoint.folder import CheckpointFolder
from hvdtrain.checkpoint.progress import BestModel, best_position
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.plugins.trial.dry_run import dry_run
from hvdtrain.run import train
from hvdtrain.schedule.early_stopping import EarlyStoppingKeys, early_stop_reason
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import Measure, best_of, missing_scores
from hvdtrain.settings import Settings, read_settings


def run(corpus: Path, model: Path, task: Callable[[Settings], object] = train, **overrides: object) -> None:
    """Train in this process, or do a task of a training; an epoch has two steps."""
    texts = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "evaluated": True, "model": model / "model", **overrides}
    task(read_settings([TOY], {name: str(value) for name, value in texts.items()}))


def best_in(folder: Path) -> dict[str, object]:
    return json.loads((folder / "best.json").read_text())


def history_of(*scores: float, name: str = "dev_loss_bleu") -> list[EpochRecord]:
    return [EpochRecord(epoch, 0.1, {name: score, "dev_loss_ce": 1.0}) for epoch, score in enumerate(scores, start=1)]


def best(history: list[EpochRecord], name: str = "dev_loss_bleu", higher: tuple[str, ...] = ("bleu",)) -> int | None:
    found = best_of(history, name, higher)
    return None if found is None else found.epoch


def test_the_best_epoch_is_the_first_with_the_best_score() -> None:
    assert best(history_of(20.0, 30.0, 30.0, 25.0)) == 2
    assert best(history_of(20.0, 30.0, 10.0, 10.0), higher=()) == 3
    assert best(history_of(20.0, 30.0), higher=("dev_loss_bleu",)) == 2
    assert best(history_of(nan, 30.0, nan)) == 2, "NaN is never better"
    assert best(history_of(nan, nan)) is None
    assert best(history_of(inf, 30.0), higher=()) == 2
    assert best(history_of(20.0), name="dev_loss_wer") is None


def test_early_stopping_of_a_score_that_rises() -> None:
    keys = EarlyStoppingKeys(early_stopping_patience=2, early_stopping_measure="dev_loss_bleu")
    history = history_of(20.0, 30.0, 25.0, 26.0)
    assert early_stop_reason(keys, history[:3], Measure(["dev_loss_bleu"], ["bleu"])) is None
    told = "dev_loss_bleu was best after epoch 2 (30), early_stopping_patience is 2"
    assert early_stop_reason(keys, history, Measure(["dev_loss_bleu"], ["bleu"])) == told
    strict = EarlyStoppingKeys(early_stopping_patience=2, early_stopping_min_difference=15.0)
    assert early_stop_reason(strict, history[:3], Measure(["dev_loss_bleu"], ["bleu"])) is not None


def test_scores_that_are_not_numbers_end_a_training_early() -> None:
    keys, measure = EarlyStoppingKeys(early_stopping_patience=2), Measure(["dev_loss_bleu"], ["bleu"])
    told = "dev_loss_bleu was best after epoch 2 (30), early_stopping_patience is 2"
    assert early_stop_reason(keys, history_of(nan, 30.0, nan, nan), measure) == told
    assert early_stop_reason(keys, history_of(nan, nan), measure) is None
    told = "dev_loss_bleu was not a number in any of 3 epochs, early_stopping_patience is 2"
    assert early_stop_reason(keys, history_of(nan, nan, nan), measure) == told


def test_an_evaluation_without_a_number_is_a_warning_and_never_the_best(corpus: Path, tmp_path: Path) -> None:
    """The score is not a number in epoch 2."""
    measure = {"learning_rate_control_error_measure": "dev_loss_quality_error", "learning_rate_control": "newbob"}
    keys = {"corpus": corpus, "part": "two.hdf", "max_seqs": 1, "evaluated": True, "model": tmp_path / "model", "num_epochs": 3}
    ended = hvdtrain(TOY, {**keys, **measure, "fault": "no_score,-1,2"})
    assert ended.status == 0, ended.err
    told = "dev: quality_error is nan in epoch 2: an epoch without a number never counts as the best"
    assert ended.out.count(told) == 1, ended.out
    assert "newbob: dev_loss_quality_error of epoch 2 is not a number: epoch 3 keeps the learning rate" in ended.out
    assert (best_in(tmp_path)["epoch"], best_in(tmp_path)["measure"]) == (3, "dev_loss_quality_error")
    assert "epoch 2 is the best" not in ended.out


def test_scores_that_no_epoch_has_are_told_with_those_that_there_are() -> None:
    history = [EpochRecord(1, 0.1, {"dev_loss_ce": 1.0, "train_loss_ce": 1.0}), EpochRecord(2, 0.1, {"dev_loss_fer": 1.0})]
    measures = {"a": "dev_loss_ce", "b": ["dev_loss_wer", "dev_loss_fer"], "c": None, "d": "dev_loss_cee"}
    misspelt, unknown = missing_scores(history, measures, ["ce", "bleu"], {"d": "config.py"})
    assert faults([misspelt, unknown]) == ["d: unknown-value", "higher_is_better: unknown-value"]
    assert (misspelt.got, misspelt.hint) == ("'dev_loss_cee' in config.py", "did you mean dev_loss_ce?")


def test_a_wrong_name_costs_no_epoch(corpus: Path, tmp_path: Path) -> None:
    given = {"num_epochs": 2, "save_interval": 10, "early_stopping_patience": 3}
    for name in ("early_stopping_measure", "learning_rate_control_error_measure"):
        with pytest.raises(ConfigError) as caught:
            run(corpus, tmp_path / name, **given, **{name: "dev_loss_accuracy"}, higher_is_better=["bleu"])
        assert faults(caught.value.problems) == [f"{name}: unknown-value", "higher_is_better: unknown-value"]
        assert "epoch 1 is saved" in caught.value.problems[-1].hint
        assert caught.value.on_every_rank
        assert (tmp_path / name / "model.001.pt").exists()
        assert len((tmp_path / name / "scores.jsonl").read_text().splitlines()) == 1
    with refused(f"{name}: unknown-value"):
        run(corpus, tmp_path / "dry", dry_run, **given, **{name: "dev_loss_accuracy"})
    run(corpus, tmp_path / name, **given, early_stopping_measure="dev_loss_fer")
    assert [json.loads(line)["epoch"] for line in (tmp_path / name / "scores.jsonl").read_text().splitlines()] == [1, 2]


def test_the_score_of_a_dataset_that_is_not_there_is_told_before_training(corpus: Path, tmp_path: Path) -> None:
    with refused("early_stopping_measure: unknown-value"):
        run(corpus, tmp_path, early_stopping_measure="eval_loss_ce", learning_rate_control_error_measure=["dev_ce", "dev_loss_x"])
    assert not list(tmp_path.iterdir())
    other_task = {"task": "forward", "eval": {"files": "eval.hdf"}, "early_stopping_measure": "dev_loss_ce"}
    read_settings([TOY], {name: str(value) for name, value in {**other_task, "model": "model"}.items()})


def test_best_json_follows_the_training(corpus: Path, tmp_path: Path) -> None:
    """Learning rate 1 makes the model worse, which is better for a score that is said to be better if higher."""
    given = {"learning_rate": 1.0, "early_stopping_measure": "dev_loss_ce"}
    run(corpus, tmp_path, **given, num_epochs=3)
    scores = [json.loads(line)["scores"] for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    order = sorted(range(1, 4), key=lambda epoch: scores[epoch - 1]["dev_loss_ce"])
    found = best_in(tmp_path)
    saved = {
        "epoch": order[0],
        "score": scores[order[0] - 1]["dev_loss_ce"],
        "file": f"model.00{order[0]}.pt",
        "scores": scores[order[0] - 1],
    }
    assert found == {"measure": "dev_loss_ce", "higher_is_better": False, **saved, "saved": saved}
    assert best_position(tmp_path / "model") == (order[0], None)

    run(corpus, tmp_path, **given, num_epochs=3, higher_is_better=["ce"])  # nothing to do but this
    assert (best_in(tmp_path)["epoch"], best_in(tmp_path)["higher_is_better"]) == (order[-1], True)
    run(corpus, tmp_path, **given, num_epochs=3, start_epoch=3, learning_rates={3: 0.0})  # epoch 3 again, as good as epoch 2
    assert best_in(tmp_path)["scores"] == min(scores[:2], key=lambda one: one["dev_loss_ce"])

    (tmp_path / "best.json").unlink()
    cleaned = hvdtrain(TOY, {"corpus": corpus, "model": tmp_path / "model", "task": "cleanup_old_models"})
    assert cleaned.status == 0
    assert best_in(tmp_path)["measure"] == "dev_loss_ce", "the first score of dev"


def test_the_best_epoch_whose_model_is_there(corpus: Path, tmp_path: Path) -> None:
    given = {"num_epochs": 3, "save_interval": 2, "learning_rate": 0.0, "save_in_background": True}
    run(corpus, tmp_path, **given)
    found = best_in(tmp_path)
    assert (found["epoch"], found["file"]) == (1, None), "all are alike, and it was not saved"
    assert isinstance(found["saved"], dict)
    assert (found["saved"]["epoch"], found["saved"]["file"]) == (2, "model.002.pt")
    ended = hvdtrain(
        TOY, {"corpus": corpus, "model": tmp_path / "model", "task": "eval", "load_epoch": "best", "evaluated": True}
    )
    assert ended.status == 0, ended.err
    assert f"Loaded {tmp_path / 'model.002.pt'}" in ended.out
    for name in ("model.002.pt", "model.003.pt"):
        (tmp_path / name).unlink()
    model = BestModel(CheckpointFolder(tmp_path / "model"), Measure())
    model.update(history_of(1.0))
    assert (best_in(tmp_path)["epoch"], best_in(tmp_path)["saved"]) == (1, None)
    with pytest.raises(CheckpointError, match=r"best.json: expected the best epoch that has a model, got none"):
        best_position(tmp_path / "model")
    model.update([])
    assert not (tmp_path / "best.json").exists(), "nothing is known of an older training's"


def test_a_best_json_that_cannot_be_written_ends_no_training(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "best.json").mkdir()
    run(corpus, tmp_path)
    assert "best.json: expected to write which epoch is best, got: " in capsys.readouterr().out
    assert torch.load(tmp_path / "model.001.pt", weights_only=True)["epoch"] == 1


def test_the_log_says_why_models_are_kept(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(corpus, tmp_path, num_epochs=6, cleanup_old_models={"keep_last_n": 1, "keep_best_n": 1})
    out = capsys.readouterr().out
    told = [line for line in out.splitlines() if line.startswith("Why they are kept: ")][-1]
    assert "4: " in told
    assert "pattern" in told
    assert "5: last, " in told
    assert "The pattern is the default of `keep`; cleanup_old_models = {..., 'keep': []} keeps no others." in out
    run(corpus, tmp_path, num_epochs=7, cleanup_old_models={"keep_last_n": 1, "keep_best_n": 0, "keep": []})
    assert [path.name for path in tmp_path.glob("model.???.pt")] == ["model.007.pt"]
    assert "Why they are kept: 7: last.\n" in capsys.readouterr().out


ACCURACY = """
def train_step(*, model, extern_data, _train_step=train_step, **_):
    _train_step(model=model, extern_data=extern_data)
    wrong = hvdtrain.get_run_ctx().losses["fer"].value
    hvdtrain.get_run_ctx().mark_as_loss(1 - wrong.float(), "accuracy", as_error=True)
"""


def test_the_worst_epoch_is_not_the_best(corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracy comes first by name, and is best where it is highest."""
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + ACCURACY)

    def started(folder: str, task: Callable[[Settings], object] = train, **overrides: object) -> str:
        texts = {"corpus": corpus, "evaluated": True, "model": tmp_path / folder / "model", "num_epochs": 3, **overrides}
        task(read_settings([config], {name: str(value) for name, value in texts.items()}))
        return capsys.readouterr().out

    out = started("plain", cleanup_old_models=False)
    scores = [json.loads(line) for line in (tmp_path / "plain" / "scores.jsonl").read_text().splitlines()]
    best_epoch_of = min(scores, key=lambda line: line["scores"]["dev_loss_ce"])["epoch"]
    assert (best_in(tmp_path / "plain")["measure"], best_in(tmp_path / "plain")["epoch"]) == ("dev_loss_ce", best_epoch_of)
    assert scores[0]["losses"] == {"ce": 1.0}
    assert "the best epoch is that of the loss that is minimized, lower is better\n" in out
    assert f"epoch 1 is the best so far: dev_loss_ce {scores[0]['scores']['dev_loss_ce']:.4g}, lower is better\n" in out
    assert out.count("higher_is_better = ['accuracy']") == 1, "one warning"

    for name, given in {
        "early_stopping_measure": "dev_loss_accuracy",
        "learning_rate_control_error_measure": "dev_loss_accuracy",
        "cleanup_old_models": True,
    }.items():
        with pytest.raises(ConfigError, match=rf"{name}: .*'dev_loss_accuracy'.* whose name says") as caught:
            started(name, **{name: given})
        assert "(epoch 1 is saved: with other keys, the same command continues after it)" in str(caught.value.problems[0])
        assert len((tmp_path / name / "scores.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="cleanup_old_models: .*'dev_loss_accuracy'"):
        started("dry", dry_run, cleanup_old_models=True)
    with pytest.raises(ConfigError, match="early_stopping_measure: .*'dev_loss_accuracy'"):
        started("plain", early_stopping_measure="dev_loss_accuracy", num_epochs=4)
    assert not (tmp_path / "plain" / "model.004.pt").exists(), "what the checkpoint knows is an error before training"
    cleaned = {"corpus": corpus, "model": tmp_path / "plain" / "model", "task": "cleanup_old_models"}
    ended = hvdtrain(config, cleaned)
    assert (ended.status, ended.err.count("cleanup_old_models: expected a score whose lower")) == (2, 1)
    out = started("plain", num_epochs=4, early_stopping_measure="dev_loss_accuracy", higher_is_better=["accuracy"])
    assert "the best epoch is that of dev_loss_accuracy, higher is better\n" in out

    written = best_in(tmp_path / "plain")
    (tmp_path / "plain" / "best.json").write_text(json.dumps({**written, "higher_is_better": False}))
    with pytest.raises(CheckpointError, match="best.json: .*'dev_loss_accuracy'.*higher_is_better = "):
        best_position(tmp_path / "plain" / "model")


def test_several_losses_are_compared_by_their_sum(corpus: Path, tmp_path: Path) -> None:
    run(corpus, tmp_path, num_epochs=2, losses="several")
    for line in (tmp_path / "scores.jsonl").read_text().splitlines():
        scores = json.loads(line)["scores"]
        parts = [(1.0, "ce"), (0.1, "energy"), (0.001, "first")]
        for dataset in ("train", "dev"):
            total = sum(scale * scores[f"{dataset}_loss_{name}"] for scale, name in parts)
            assert scores[f"{dataset}_loss_total"] == pytest.approx(total, rel=1e-12)
    assert best_in(tmp_path)["measure"] == "dev_loss_total"


def test_the_example_in_the_docs(corpus: Path, tmp_path: Path) -> None:
    example = first_example("resuming.md", "The best epoch")
    config = tmp_path / "config.py"
    config.write_text(TOY.read_text() + ACCURACY + example)
    given = {"corpus": corpus, "evaluated": True, "model": tmp_path / "model", "num_epochs": 9, "learning_rate": 0}
    ended = hvdtrain(config, given)
    assert ended.status == 0, ended.err
    assert "Finished training in epoch 4: dev_loss_accuracy was best after epoch 1" in ended.out
    assert best_in(tmp_path)["higher_is_better"] is True
    assert best_in(tmp_path)["file"] == "model.001.pt"
