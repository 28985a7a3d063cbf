"""`--find-learning-rate`: a ramp on the config's own training, what it writes, and what it suggests."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from launching import TOY, Finished, hvdtrain

from hvdtrain.plugins.trial.find_learning_rate import Point, Ramp, RampLog, merge, smooth, suggest
from hvdtrain.runtime.scores import Scores
from hvdtrain.training.step_log import StepReport

RAMP = {"learning_rate_ramp": [1e-4, 100.0, 60], "optimizer": {"class": "sgd"}, "losses": "mean"}


def found(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "find_learning_rate.json").read_text())  # type: ignore[no-any-return]


KEYS = {
    **{**RAMP, "accum_grad_multiple_step": 2, "evaluated": True},
    **{"early_stopping_patience": 1, "early_stopping_min_difference": 100.0, "early_stopping_measure": "train_loss_ce"},
}
"""With accumulated gradients, over more than an epoch, until the loss explodes. Training itself would end after an epoch."""


@pytest.fixture(scope="module")
def alone(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Finished, Path]:
    """What one rank says, and its folder."""
    folder = tmp_path_factory.mktemp("one")
    keys = {**KEYS, "corpus": corpus, "model": folder / "model", "max_seqs": 6}
    return hvdtrain(TOY, keys, options=["--find-learning-rate"]), folder


def test_what_is_written_and_suggested(alone: tuple[Finished, Path]) -> None:
    ended, folder = alone
    assert ended.status == 0, ended.err
    assert sorted(path.name for path in folder.iterdir()) == ["find_learning_rate.json", "find_learning_rate.png"]
    assert "epoch 1 score" not in ended.out
    one = found(folder)
    suggested = one["suggestion"]
    assert f"find_learning_rate: learning_rate = {suggested['rate']:g} (the loss falls fastest at" in ended.out
    assert 1e-3 < suggested["rate"] <= suggested["lowest"] / 3 < 10
    assert "as the loss explodes there" in ended.out
    assert len([line for line in ended.out.splitlines() if line[9:10] == "|"]) == 12, "a chart"
    rates = [point["rate"] for point in one["points"]]
    assert rates[0] == pytest.approx(1e-4, rel=0.3), "that of the update's last step"
    assert all(later / earlier == pytest.approx(1e6 ** (2 / 119)) for earlier, later in zip(rates, rates[1:], strict=False))


@pytest.mark.slow
def test_one_rank_and_two_see_the_same_losses(alone: tuple[Finished, Path], corpus: Path, tmp_path: Path) -> None:
    keys = {**KEYS, "corpus": corpus, "model": tmp_path / "model", "max_seqs": 3, "use_horovod": True}
    two = hvdtrain(TOY, keys, 2, options=["--find-learning-rate"])
    assert two.status == 0, two.err
    losses = [[point["loss"] for point in found(folder)["points"]][:40] for folder in (alone[1], tmp_path)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_rule_of_the_suggestion() -> None:
    ramp = Ramp(1e-4, 1.0, 101)
    losses = [2.0 - 1.5 / (1 + math.exp(-(number - 50) / 4)) + (3.0 * (number > 90)) for number in range(101)]
    points = [Point(ramp.rate(number), loss) for number, loss in enumerate(losses)]
    result = suggest(points, smooth(points))
    assert result is not None
    assert result.steepest == pytest.approx(ramp.rate(50), rel=0.2)
    assert result.rate == pytest.approx(0.01, rel=0.2)
    flat = [Point(ramp.rate(number), 1.0) for number in range(101)]
    assert suggest(flat, smooth(flat)) is None
    rising = [Point(ramp.rate(number), 1.0 + number / 10) for number in range(101)]
    assert suggest(rising, smooth(rising)) is None
    broken = [*points[:60], *(Point(ramp.rate(number), math.nan) for number in range(60, 101))]
    assert len(smooth(broken)) == 60


def score(loss: float, count: int = 2) -> Scores:
    scores = Scores()
    scores.add("ce", loss * count, count, scale=0.5)
    scores.add("error", count, count)
    return scores


def test_the_losses_of_an_update_are_those_of_all_ranks_and_steps() -> None:
    by_rank = [[score(1.0), score(3.0), score(5.0)], [score(2.0, 6), Scores(), score(7.0)]]
    points = merge(Ramp(0.1, 0.4, 3), by_rank, rounds=2)
    assert points == [Point(0.2, 0.5 * (2 + 6 + 12) / 10)], "with the loss's scale; an unfinished update is left out"


class Meter:
    def __init__(self, loss: float) -> None:
        self._loss = loss

    def take_scores(self) -> Scores:
        return score(self._loss)


@pytest.mark.parametrize("last", [math.nan, math.inf, 1e9])
def test_a_loss_that_explodes_ends_the_ramp_and_noise_does_not(last: float) -> None:
    log = RampLog(Ramp(1e-4, 1.0, 1000))
    for number in range(200):
        log.step(StepReport(number, 0.0, None, None, Meter(2.0 + 0.5 * (-1) ** number - number / 400)))  # type: ignore[arg-type]
    assert log.ended_by is None
    log.step(StepReport(200, 0.0, None, None, Meter(last)))  # type: ignore[arg-type]
    assert log.ended_by == "the loss explodes"


def test_a_ramp_that_is_none_is_refused(corpus: Path, tmp_path: Path) -> None:
    for wrong in ([1e-3, 1e-4, 100], [0, 1, 100], [1e-3, 1, 5], [1, 2]):
        keys = {"corpus": corpus, "model": tmp_path / "model", "learning_rate_ramp": wrong}
        ended = hvdtrain(TOY, keys, options=["--find-learning-rate"])
        assert ended.status == 2
        assert ended.names("learning_rate_ramp")
