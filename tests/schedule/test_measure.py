"""Which score compares epochs, and in which direction."""

from hvdtrain.schedule.directions import implies_higher_is_better
from hvdtrain.schedule.history import EpochRecord
from hvdtrain.schedule.measure import (
    Measure,
    complete_history,
    error_key,
    unclear_line,
    unclear_scores,
    with_totals,
    wrong_directions,
)


def record(epoch: int, losses: dict[str, float], **scores: float) -> EpochRecord:
    scores = {f"dev_loss_{name}": value for name, value in scores.items()}
    return EpochRecord(epoch, 0.8, with_totals(scores, losses), losses)


def best_epoch(history: list[EpochRecord]) -> int | None:
    found = Measure().best(history)
    return None if found is None else found.epoch


def test_epochs_are_compared_by_the_loss_that_is_minimized() -> None:
    history = [record(1, {"ce": 1.0}, accuracy=0.92, ce=0.5), record(2, {"ce": 1.0}, accuracy=0.93, ce=0.4)]
    measure = Measure()
    assert measure.name(history) == "dev_loss_ce"
    assert best_epoch(history) == 2, "by name, it would be accuracy, of which the first epoch has the lowest"
    assert Measure(["dev_loss_wer", "dev_loss_accuracy"], ["accuracy"]).name(history) == "dev_loss_accuracy"
    only_train = [EpochRecord(1, 0.1, {"train_loss_b": 1.0, "train_loss_a": 0.5}, {"b": 1.0})]
    assert measure.name(only_train) == "train_loss_b"
    of_others = {"train_loss_ce": 1.0, "test_loss_ce": 1.0, "eval_loss_ce": 1.0}
    assert error_key(of_others, losses={"ce": 1.0}) == "eval_loss_ce"
    assert error_key({**of_others, "dev_loss_fer": 1.0}, losses={"ce": 1.0}) == "eval_loss_ce"


def test_several_losses_are_compared_by_their_sum() -> None:
    losses = {"ce": 1.0, "ctc": 0.5}
    history = [record(1, losses, aux=0.0, ce=1.0, ctc=4.0), record(2, losses, aux=9.0, ce=1.1, ctc=2.0)]
    assert [one.scores["dev_loss_total"] for one in history] == [3.0, 2.1]
    assert Measure().name(history) == "dev_loss_total"
    assert best_epoch(history) == 2
    own = record(1, losses, total=7.0, ce=1.0, ctc=2.0)
    assert own.scores["dev_loss_total"] == 7.0, "a score of the config's keeps its name"
    assert own.scores["dev_loss_total_minimized"] == 2.0
    assert Measure().name([own]) == "dev_loss_total_minimized"
    assert Measure().name([record(1, losses, ce=1.0)]) == "dev_loss_ce", "ctc is computed in training only"


def test_a_loss_whose_negative_is_minimized() -> None:
    history = [record(epoch, {"likelihood": -1.0}, likelihood=value) for epoch, value in ((1, -9.0), (2, -3.0), (3, -5.0))]
    assert (Measure().name(history), best_epoch(history)) == ("dev_loss_total", 2)


def test_epochs_of_earlier_releases_get_the_sums_too() -> None:
    """Otherwise the best of them would be forgotten."""
    losses = {"ce": 1.0, "ctc": 0.5}
    older = [EpochRecord(1, 0.1, {"dev_loss_ce": 0.1, "dev_loss_ctc": 0.1}), EpochRecord(2, 0.1, {"dev_score": 3.0})]
    history = [*complete_history(older, losses), record(3, losses, ce=1.0, ctc=1.0)]
    assert best_epoch(history) == 1
    assert history[1].scores == {"dev_score": 3.0}
    assert older[0].losses == {}


def test_what_returnn_wrote_is_compared_as_by_returnn() -> None:
    assert error_key({"dev_error": 0.1, "dev_score": 0.5, "train_score": 0.7}) == "dev_score"
    assert error_key({"dev_loss_b": 0.1, "dev_loss_a": 0.5}) == "dev_loss_a"
    assert error_key({"dev_loss_acc": 0.1, "dev_loss_ce": 0.5}) == "dev_loss_ce", "but no score whose direction is unclear"
    assert error_key({"dev_loss_acc": 0.1}) == "dev_loss_acc"


def test_names_that_say_that_higher_is_better() -> None:
    higher = "acc accuracy frame_accuracy bleu BLEU4 f1 macro-F1 auc valAuc top1_acc recall@5 mIoU psnr ROUGE-L".split()
    lower = "ce ctc fer wer loss backward accuracy_error bleu_loss neg_f1 face mapping total precise mae nll_top1_acc".split()
    assert [name for name in higher if not implies_higher_is_better(name)] == []
    assert [name for name in lower if implies_higher_is_better(name)] == []


def test_a_key_that_would_take_the_worst_epoch_for_the_best() -> None:
    history = [record(1, {"ce": 1.0}, accuracy=0.9, ce=0.5, bleu=3.0)]
    measures = {"early_stopping_measure": "dev_loss_accuracy", "learning_rate_control_error_measure": "dev_loss_ce"}
    [problem] = wrong_directions(history, measures, [], ["bleu"], {"early_stopping_measure": "config.py"})
    assert problem.key == "early_stopping_measure"
    assert "'dev_loss_accuracy' in config.py" in problem.got
    assert "higher_is_better = ['accuracy']" in problem.hint
    assert wrong_directions(history, measures, ["cleanup_old_models"], ["bleu", "dev_loss_accuracy"], {}) == []
    [problem] = wrong_directions(history, {}, ["cleanup_old_models"], ["accuracy"], {})
    assert problem.key == "cleanup_old_models"
    assert "'dev_loss_bleu'" in problem.got
    assert wrong_directions([], measures, ["cleanup_old_models"], [], {}) == []
    line = unclear_line(history, Measure())
    assert line is not None
    assert line.startswith("accuracy, bleu: ")
    assert "higher_is_better = ['accuracy', 'bleu']" in line
    assert unclear_line(history, Measure(higher=["accuracy", "bleu"])) is None
    assert unclear_scores([record(1, {"dice": 1.0}, dice=0.2)], []) == [], "what is minimized is better if it is lower"
