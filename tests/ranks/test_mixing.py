"""Training on a mix of datasets: the same on any number of ranks, resumed within an epoch, with the scores of each dataset."""

from pathlib import Path

import pytest
from launching import TOY
from trainings import Run, Trained, assert_alike, assert_same, trains

ONE, TWO = (Run("torch", "horovod", size) for size in (1, 2))


@trains(ONE, TWO)
def mixed(run: Run, folder: Path) -> dict[str, dict[str, object]]:
    keys: dict[str, object] = {
        "configs": [TOY, TOY.with_name("mix.py")],
        "num_epochs": 2,
        "max_seqs": 12 // run.size,
        "record": True,
    }
    made = {"whole": keys}
    if run == TWO:
        made["stopped"] = keys | {"fault": "SIGTERM,1,3,20"}
    return made


def test_ranks_train_the_same_model(trained: Trained) -> None:
    alone, several = trained(mixed, ONE), trained(mixed, TWO)
    assert several.trained_on("whole") == alone.trained_on("whole")
    assert sum(alone.trained_on("whole").values()) == 400
    assert_alike(several.weights("whole"), alone.weights("whole"))
    for mine, theirs in zip(several.scores("whole"), alone.scores("whole"), strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)


def test_a_resumed_epoch_mixes_the_same(trained: Trained) -> None:
    results = trained(mixed, TWO)
    assert results.out("stopped").count("stopped by SIGTERM in epoch") == 2
    assert results.trained_on("stopped") == results.trained_on("whole")
    assert results.scores("stopped") == results.scores("whole")
    assert_same(results.weights("stopped"), results.weights("whole"))


def test_reports_have_the_scores_of_each_dataset(trained: Trained) -> None:
    """The mean of all is that of the parts, weighted by their frames."""
    for scores in trained(mixed, TWO).scores("whole"):
        for score in ("train_loss_ce", "train_loss_fer", "dev_loss_ce"):
            large, small = scores[f"{score}.large"], scores[f"{score}.small"]
            assert min(large, small) < scores[score] < max(large, small)
        parts = ("", ".large", ".small")
        assert set(scores) == {
            f"{where}_loss_{name}{part}" for where in ("train", "dev") for name in ("ce", "fer") for part in parts
        }
